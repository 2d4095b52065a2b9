"""Folder of a study: whether it is one, and how many results its ``study.json`` holds."""

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from systolic.core.errors import TakenError

DATABASE = "study.db"
DEFINITION = "trials.json"
RESULTS = "study.json"
KEYS = {"recipe", "search"}
"""Entries that the JSON files of a study have."""


class _SavedRow(Struct):
    state: str


class _SavedResults(Struct):
    """``study.json``, as far as it says how many trials have a result."""

    trials: list[_SavedRow]


def check_free(folder: Path) -> None:
    """Checks that trials would not mix with files of another kind: a run's, a project's.

    Raises:
        TakenError: the folder has files, and none of them is a study's.
    """
    if not folder.is_dir() or (folder / DATABASE).exists() or not any(folder.iterdir()):
        return
    definition = folder / DEFINITION
    # Opening the study reports a definition that is damaged.
    damaged = definition.is_file() and _read(definition) is None
    records = [_read(folder / name) or {} for name in (DEFINITION, RESULTS)]
    if not damaged and not any(record.keys() >= KEYS for record in records):
        raise TakenError(
            f"--study {folder} has files and is no study (it has no {DATABASE}, {DEFINITION} or {RESULTS} of one); give a new or an empty folder"
        )


def num_results(folder: Path) -> int:
    """Number of trials with a result in the folder's ``study.json``; 0 without a readable one."""
    try:
        results = msgspec.convert(_read(folder / RESULTS), _SavedResults)
    except msgspec.ValidationError:
        return 0
    return sum(row.state == "done" for row in results.trials)


def _read(file: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None for a file that can't be read, and an empty one for other JSON."""
    try:
        record = json.loads(file.read_text())
    except (ValueError, OSError):
        return None
    return record if isinstance(record, dict) else {}
