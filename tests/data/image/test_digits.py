"""The digits that come with scikit-learn: split, changed and read the same way every time."""

import csv
import gzip
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from systolic.core.errors import DataError, MissingExtraError, NotFoundError
from systolic.data.image import sets
from systolic.data.image.sets import Digits
from systolic.job import Read, Split


def raw_digits() -> np.ndarray:
    """scikit-learn's table, read without the library, whose import takes seconds."""
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    with gzip.open(package / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.array([[float(value) for value in row] for row in csv.reader(file)])


def everything(split: Split) -> tuple[np.ndarray, np.ndarray]:
    batches = list(Digits().open(Read(split=split, batch=100, shuffle=False, epochs=1)))
    kept = np.concatenate([batch["mask"] for batch in batches]) > 0
    return tuple(np.concatenate([b[name] for b in batches])[kept] for name in ("image", "label"))


def test_splits_are_disjoint_whole_and_hold_every_class() -> None:
    parts = {split: everything(split) for split in Split}
    assert sum(len(labels) for _, labels in parts.values()) == 1797
    assert [len(parts[split][1]) for split in Split] == [Digits().size(split) for split in Split]
    # Compared as multisets: no image of the source is missing from or doubled in the splits.
    together = np.concatenate([images for images, _ in parts.values()]).reshape(1797, 64)
    source = np.round(raw_digits()[:, :64] * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, together)) == sorted(map(bytes, source))
    for split, share in ((Split.train, 0.7), (Split.validation, 0.1), (Split.test, 0.2)):
        counts = np.bincount(parts[split][1], minlength=10)
        assert counts.min() > 0.9 * share * 174
        assert counts.sum() == pytest.approx(share * 1797, abs=6)


def test_the_test_split_never_changes() -> None:
    """Results stay comparable only while the same images are held out."""
    images, labels = everything(Split.test)
    assert labels[:12].tolist() == LABELS
    assert int(images.astype(np.int64).sum()) == PIXELS


LABELS = [1, 3, 9, 1, 4, 6, 3, 5, 8, 9, 5, 8]
PIXELS = 1791401


def test_batches_are_bytes_and_resume_where_they_were() -> None:
    read = Read(split=Split.train, batch=32, seed=3)
    batches = Digits().open(read)
    first = next(batches)
    assert first["image"].dtype == np.uint8
    assert first["image"].shape == (32, 8, 8, 1)
    assert first["label"].dtype == np.int32
    state = batches.get_state()
    expected = [next(batches) for _ in range(3)]
    again = Digits().open(read)
    again.set_state(state)
    for batch in expected:
        resumed = next(again)
        np.testing.assert_array_equal(batch["image"], resumed["image"])
        np.testing.assert_array_equal(batch["label"], resumed["label"])


def test_training_images_are_moved_and_evaluated_ones_are_not() -> None:
    moved = np.concatenate(
        [
            b["image"]
            for b in Digits().open(
                Read(split=Split.train, batch=len(everything(Split.train)[0]), epochs=1)
            )
        ]
    )
    still, _ = everything(Split.train)
    assert not {bytes(i) for i in moved} <= {bytes(i) for i in still}
    plain = next(Digits(shift=0).open(Read(split=Split.train, batch=len(still), epochs=1)))
    assert sorted(map(bytes, plain["image"])) == sorted(map(bytes, still))


@pytest.mark.parametrize("kind", ["bytes", "floats", "png"])
def test_single_files_are_read(tmp_path: Path, kind: str) -> None:
    images, _ = everything(Split.test)
    if kind == "png":
        from PIL import Image

        path = tmp_path / "digit.png"
        Image.fromarray(images[0, :, :, 0]).resize((80, 80), Image.Resampling.NEAREST).save(path)
    else:
        path = tmp_path / "digit.npy"
        np.save(path, images[0] if kind == "bytes" else images[0, :, :, 0] / 255)
    read = Digits().load(path)["image"]
    assert read.shape == (8, 8, 1)
    assert np.abs(read.astype(int) - images[0]).mean() < (25 if kind == "png" else 0.01)


def test_files_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="is not a file"):
        Digits().load(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("hello")
    np.save(tmp_path / "large.npy", np.full((8, 8), 16.0))
    np.save(tmp_path / "flat.npy", np.zeros(64, np.uint8))
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("text.png", "large.npy", "flat.npy", "empty.npy"):
        with pytest.raises(DataError, match=name) as caught:
            Digits().load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_without_scikit_learn_the_machine_lacks_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is right: exit code 1, as for every package that is missing."""
    monkeypatch.setattr(sets.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="pip install scikit-learn") as error:
        sets._file()
    assert error.value.exit_code == 1
