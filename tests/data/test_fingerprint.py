"""What tells data from other data of the same size."""

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from systolic.core.errors import DataError
from systolic.data import fingerprint
from systolic.data.arrays import Arrays
from systolic.data.fingerprint import contents_of, difference, of_files
from systolic.data.image.images import Images
from systolic.data.text.documents import Documents
from systolic.job import Split
from systolic.job.data import Contents


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name, size in (("a", 700), ("b", 0), ("c", 300), ("d", 1000)):
        (tmp_path / name).write_bytes(np.random.default_rng(size).bytes(size))
    return sorted(tmp_path.iterdir())


def of(files: list[Path]) -> Contents:
    found = of_files(files[0].parent, files)
    assert found is not None
    return found


def turn(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("name", "place"), [("a", 0), ("a", 699), ("c", 150), ("d", 999)])
def test_any_byte_of_small_data_counts(files: list[Path], name: str, place: int):
    before = of(files)
    assert (before.files, before.bytes) == (4, 2000)
    turn(files[0].parent / name, place)
    told = difference(before, of(files))
    assert told == "as many bytes (2000) with other contents, compared whole"


def test_of_large_data_blocks_at_even_distances_count(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 40)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 10)
    # 4 blocks of 10 in 2000 bytes begin at 0, 663, 1326 and 1990; a has 0 to 699, c to 999, d the rest.
    noticed = [0, 9, 663, 672, 1326, 1335, 1990, 1999]
    unnoticed = [10, 662, 673, 1325, 1336, 1989]
    before = of(files)
    for place in (*noticed, *unnoticed):
        file, inner = next(
            (files[n], place - a)
            for n, a, b in ((0, 0, 700), (2, 700, 1000), (3, 1000, 2000))
            if a <= place < b
        )
        turn(file, inner)
        assert (difference(before, of(files)) is not None) is (place in noticed), place
        turn(file, inner)
    assert difference(before, of(files)) is None


def test_names_sizes_and_their_number_count(files: list[Path]):
    before = of(files)
    assert difference(before, of(files[:3])) == "3 files, 4 before"
    renamed = files[3].rename(files[3].with_name("e"))
    assert difference(before, of([*files[:3], renamed])) == "other names"
    renamed.rename(files[3]).write_bytes(b"1234")
    assert difference(before, of(files)) == "1004 bytes, 2000 before"
    # A byte that moves from one file to the next changes neither the bytes as a whole nor their order.
    one, two = [replace(before, digest=d) for d in "ab"]
    assert difference(one, two) is not None


def test_data_that_is_copied_or_touched_is_the_same(files: list[Path], tmp_path: Path):
    before = of(files)
    shutil.copytree(files[0].parent, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "a", (1, 1))
    assert difference(before, of(sorted((tmp_path / "copy").iterdir()))) is None


def test_a_file_that_is_gone_is_named(files: list[Path]):
    files[2].unlink()
    with pytest.raises(DataError, match=f"{files[2]} can't be read"):
        of(files)


def test_text_for_validation_counts_where_it_has_files_of_its_own(tmp_path: Path):
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_text("some text\n" * 50)
    data = Documents(path=tmp_path / "train.txt")
    assert set(contents_of(data)) == {"train"}
    assert set(contents_of(data.at(tmp_path / "train.txt"))) == {"train"}
    apart = replace(data, validation=tmp_path / "validation.txt")
    assert set(contents_of(apart)) == {"train", "validation"}


def test_every_split_of_pictures_has_its_own(tmp_path: Path):
    from PIL import Image

    for number in range(10):
        (tmp_path / "one").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "one" / f"{number}.bmp")
    data = Images(path=tmp_path, side=8)
    before = contents_of(data)
    assert {name: one.files for name, one in before.items()} == {
        "train": 8,
        "validation": 1,
        "test": 1,
    }
    turn(tmp_path / "one" / "0.bmp", 100)
    after = contents_of(data)
    assert [difference(before[name], after[name]) is None for name in before].count(False) == 1


def test_arrays_count_by_their_bytes():
    def made(**changes: float) -> Contents:
        x = np.arange(12.0).reshape(6, 2)
        x[3, 1] += changes.get("by", 0)
        found = Arrays.of(train={"x": x, "label": np.zeros(6)}).contents(Split.train)
        assert found is not None
        return found

    assert difference(made(), made()) is None
    assert "other contents" in str(difference(made(), made(by=1.0)))
    assert Arrays.of(train={"x": np.ones(3)}).contents(Split.test) is None


def _rows(count: int):
    return {"train": {"x": np.zeros((count, 5), np.float32), "y": np.zeros(count, np.float32)}}


def test_other_arrays_are_named_with_their_function() -> None:
    before, now = (
        Arrays.call(functools.partial(_rows, count)).contents(Split.train) for count in (72, 60)
    )
    assert before is not None
    assert now is not None
    assert now.where == f"train arrays of {__name__}._rows()"
    assert (
        difference(before, now)
        == "x float32[60, 5] and y float32[60], before x float32[72, 5] and y float32[72]"
    )
    # Records of earlier versions keep no shapes.
    assert difference(replace(before, arrays=()), now) == "arrays of other names, types or shapes"
    again = Arrays.call(functools.partial(_rows, 72)).contents(Split.train)
    assert again is not None
    assert difference(before, again) is None
