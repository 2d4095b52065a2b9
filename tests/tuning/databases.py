"""Databases with the tables of a study: to make these takes longer than most tests of one."""

import functools
import tempfile
from pathlib import Path

from optuna.storages import RDBStorage


@functools.cache
def _tables() -> bytes:
    """The file of a database of Optuna's without any study."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "study.db"
        storage = RDBStorage(f"sqlite:///{file}")
        storage.remove_session()
        storage.engine.dispose()
        return file.read_bytes()


def with_tables(file: Path) -> None:
    """Makes a database where there is none."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_tables())
