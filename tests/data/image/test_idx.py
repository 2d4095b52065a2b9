"""IDX files, written here byte by byte and read back."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from systolic.core.errors import DataError, NotFoundError
from systolic.data.image.sets import DEBIAN, Idx, read_idx
from systolic.data.image.tables import SmallImages
from systolic.data.random_access import Picks
from systolic.job import Read, Split

NUM_TRAIN, NUM_TEST = 240, 50


def write(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content += array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(params=["", ".gz"])
def folder(tmp_path: Path, request) -> Path:
    rng = np.random.default_rng(0)
    for stem, count in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        # Each image is one value, which no other image has in its first two pixels.
        images = np.zeros((count, 6, 6), np.uint8)
        images[:, 2, 2], images[:, 3, 3] = np.divmod(np.arange(count) + 1, 250)
        write(tmp_path / f"{stem}-images-idx3-ubyte{request.param}", images)
        labels = rng.integers(0, 10, count).astype(np.uint8)
        write(tmp_path / f"{stem}-labels-idx1-ubyte{request.param}", labels)
    return tmp_path


def numbers(batches) -> list[int]:
    found = []
    for batch in batches:
        images = batch["image"][batch["mask"] > 0, :, :, 0].astype(int)
        found += (images[:, 2, 2] * 250 + images[:, 3, 3] - 1).tolist()
    return found


def read(split: Split, **changes) -> Read:
    return Read(**{"split": split, "batch": 32, "shuffle": False, "epochs": 1, **changes})


def test_files_are_read_and_training_is_split(folder: Path) -> None:
    data = Idx(path=folder, side=6)
    train, validation = (numbers(data.open(read(s))) for s in (Split.train, Split.validation))
    assert sorted(train + validation) == list(range(NUM_TRAIN))
    assert abs(len(validation) - NUM_TRAIN / 12) <= 5
    assert (data.size(Split.train), data.size(Split.validation)) == (len(train), len(validation))
    assert numbers(data.open(read(Split.test))) == list(range(NUM_TEST))
    labels = read_idx(next(folder.glob("t10k-labels*")))
    found = np.concatenate([b["label"][b["mask"] > 0] for b in data.open(read(Split.test))])
    np.testing.assert_array_equal(found, labels)
    # Held out anew with every value: the same examples each time, whatever was read before.
    assert numbers(Idx(path=folder, side=6).open(read(Split.validation))) == validation


def test_shift_and_flip_are_those_of_the_definition() -> None:
    images = np.random.default_rng(0).integers(1, 255, (20, 5, 5, 2)).astype(np.uint8)
    table = SmallImages(images, np.arange(20, dtype=np.int32), seed=1, shift=2, flip=True)
    picks = Picks(np.arange(20), np.arange(100, 120))
    taken = table.take(picks)["image"]
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
    offsets, flipped = set(), 0
    for index, image in enumerate(taken):
        fits = [
            (row, column, mirror)
            for row in range(5)
            for column in range(5)
            for mirror in (1, -1)
            if np.array_equal(padded[index, row : row + 5, column : column + 5][:, ::mirror], image)
        ]
        assert len(fits) == 1
        offsets.add(fits[0][:2])
        flipped += fits[0][2] < 0
    assert len(offsets) > 8
    assert 3 < flipped < 17
    np.testing.assert_array_equal(table.take(picks)["image"], taken)


def test_changes_belong_to_stream_positions(folder: Path) -> None:
    data = Idx(path=folder, side=6, flip=True)

    def stream(batch: int, shards: int) -> np.ndarray:
        readers = [
            data.open(Read(split=Split.train, batch=batch, seed=5, shard=s, shards=shards))
            for s in range(shards)
        ]
        found = [next(r)["image"] for _ in range(96 // (batch * shards)) for r in readers]
        return np.concatenate(found)

    np.testing.assert_array_equal(stream(32, 1), stream(12, 4))


def test_what_does_not_fit_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], says: str, data: Idx) -> None:
        with pytest.raises(kind, match=says) as caught:
            data.open(read(Split.train))
        assert "\n" not in str(caught.value)

    refused(NotFoundError, "apt-get install dataset-none-such", Idx(path=DEBIAN / "none-such"))
    refused(NotFoundError, "does not exist", Idx(path=tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    refused(NotFoundError, "has no train-images-idx3-ubyte", Idx(path=tmp_path / "empty"))
    refused(DataError, "6 x 6 pixels, not 28 x 28", Idx(path=folder))
    refused(DataError, "names 3 classes", Idx(path=folder, side=6, names=("a", "b", "c")))
    images = next(folder.glob("train-images*"))
    content = images.read_bytes()
    images.write_bytes(content[:-20])
    refused(DataError, "get the file again", Idx(path=folder, side=6))
    plain = gzip.decompress(content) if images.suffix == ".gz" else content
    wrong = b"\x01" + plain
    images.write_bytes(gzip.compress(wrong) if images.suffix == ".gz" else wrong)
    refused(DataError, "is not an IDX file", Idx(path=folder, side=6))
