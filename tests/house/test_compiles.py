"""Programs kept by tests for later runs."""

import os
from pathlib import Path

import pytest

from tests import compiles
from tests.compiles import KeptPrograms


def test_only_the_oldest_beyond_the_limit_go_whoever_kept_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under other flags, as slow tests are, leaves those of default tests where they are."""
    mine = KeptPrograms(tmp_path / "xla", tmp_path / "worker")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=7")
    other = KeptPrograms(tmp_path / "xla", tmp_path / "other")
    assert mine.shared != other.shared
    files = [mine.shared / "a-cache", other.shared / "b-cache", mine.shared / "c-cache"]
    for age, file in enumerate(files):
        file.write_bytes(bytes(100))
        os.utime(file, (age, age))
    other.prune()
    assert all(file.exists() for file in files)
    monkeypatch.setattr(compiles, "KEPT_BYTES", 200)
    other.prune()
    assert [file.exists() for file in files] == [False, True, True]
