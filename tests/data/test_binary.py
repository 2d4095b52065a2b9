"""A file that is not text is refused in one line, whatever its name."""

from pathlib import Path

import pytest

from systolic import recipes
from systolic.core.errors import DataError, OptionError
from systolic.job import Split


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bin.txt"
    path.write_bytes(b"words \x00\x01\xff" * 100)
    with pytest.raises(DataError, match=r"bin\.txt is binary, not text \(a zero byte at 6\)"):
        recipes.find("lm")({"path": path}).data.size(Split.train)


def test_text_of_any_alphabet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("слово 言葉 kelime\n" * 200)
    job = recipes.find("lm")({"path": path, "sequence": 64})
    assert job.data.fields()["tokens"].shape == (64,)
    assert job.data.size(Split.train) != 0


def test_a_tokenizer_without_text_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no path is given"):
        recipes.find("lm")({"tokenizer": tmp_path / "none.json"})
