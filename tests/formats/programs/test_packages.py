"""Packages of the cache: installed once by pip, whole or not at all, with one line where that fails."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from systolic.core.errors import RunError
from systolic.formats import packages


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip installs from, and an empty cache."""
    links = tmp_path / "links"
    links.mkdir()
    about = "alone-1.0.dist-info"
    with zipfile.ZipFile(links / "alone-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("alone.py", "WORDS = 'from the cache'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: alone\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "alone.py,,\n")
    monkeypatch.setenv("SYSTOLIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def test_a_set_is_installed_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del index
    monkeypatch.setitem(packages.SETS, "test", ("alone==1.0",))
    said: list[str] = []
    assert packages.installed("test") is None
    folder = packages.package_folder("test", said.append)
    assert said == [f"installing alone==1.0 into {folder}, once"]
    code = "import alone; print(alone.WORDS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"from the cache\n"
    assert packages.package_folder("test", said.append) == folder == packages.installed("test")
    assert len(said) == 1


def test_what_cannot_be_installed_is_one_line_and_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del index
    monkeypatch.setitem(packages.SETS, "test", ("alone==2.0",))
    with pytest.raises(
        RunError, match=r"pip could not install alone==2\.0: .*PIP_INDEX_URL"
    ) as error:
        packages.package_folder("test")
    assert "\n" not in str(error.value)
    assert packages.installed("test") is None
    kept = packages.cache_home() / packages.FOLDER
    assert [one.name for one in kept.iterdir() if not one.name.endswith(".lock")] == []
