"""What compiled programs depend on besides themselves."""

import os
from pathlib import Path

import pytest

import systolic
from systolic import IMPORTED
from systolic.compiling.compile import CODE
from systolic.compiling.program_store import SOURCES, sources
from systolic.core.errors import RunError


def test_sources_are_those_of_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written just before a start, as by a clone, are what runs; a later change may not be."""
    for package in SOURCES:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "one.py").write_text(f"# {package}\n")
    monkeypatch.setattr("systolic.compiling.program_store.IMPORTED", os.stat(tmp_path).st_ctime + 1)
    found = sources(tmp_path)
    assert sorted(found) == sorted(SOURCES)
    assert len(set(found.values())) == len(SOURCES)
    sources.cache_clear()
    monkeypatch.setattr("systolic.compiling.program_store.IMPORTED", IMPORTED)
    with pytest.raises(RunError, match=r"one\.py changed after this process imported the package"):
        sources(tmp_path)
    sources.cache_clear()
    (tmp_path / SOURCES[0] / "one.py").write_text("# another\n")
    monkeypatch.setattr(
        "systolic.compiling.program_store.IMPORTED", os.stat(tmp_path).st_ctime + 60
    )
    assert {name for name, one in sources(tmp_path).items() if one != found[name]} == {SOURCES[0]}
    sources.cache_clear()


def test_packages_of_the_digest_of_a_request_are_there() -> None:
    package = Path(systolic.__file__).parent
    assert [name for name in CODE if not any((package / name).rglob("*.py"))] == []
