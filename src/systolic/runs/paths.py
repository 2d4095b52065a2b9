"""Paths in a recipe's options, saved so that a run works from any folder and after a move."""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from systolic.runs.remote import mirror

DIRECTORY = "directory"
"""The entry of job.json with the run's absolute path when it was written."""


def mapped(value: Any, change: Callable[[Path], Path]) -> Any:
    """Maps all paths in a value, also inside mappings, lists, tuples and dataclasses."""
    if isinstance(value, Path):
        return change(value)
    if isinstance(value, Mapping):
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [mapped(part, change) for part in value]
    if type(value) is tuple:
        return tuple(mapped(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        after = {name: mapped(part, change) for name, part in before.items()}
        changed = {name: part for name, part in after.items() if part != before[name]}
        return replace(value, **changed) if changed else value
    return value


def named(value: Any) -> list[Path]:
    """All paths in options."""
    paths: list[Path] = []

    def keep(path: Path) -> Path:
        paths.append(path.resolve())
        return path

    mapped(value, keep)
    return paths


def absolute(value: Any) -> Any:
    """Options with absolute paths, for use in this process."""
    return mapped(value, Path.absolute)


def saved(value: Any, run: Path) -> Any:
    """Options for job.json: paths in the run are relative to it, all others absolute."""

    def change(path: Path) -> Path:
        whole = path.absolute()
        return whole.relative_to(run) if whole.is_relative_to(run) else whole

    run = run.absolute()
    return mapped(value, change)


def located(value: Any, run: Path, before: str | None) -> Any:
    """Options from job.json, with the paths of where the run is now.

    Args:
        value: As :func:`saved` made them.
        run: The run's directory.
        before: Its absolute path when job.json was written; None in a run of an older version, whose
            relative paths were those of the working directory.

    Returns:
        The value with absolute paths. One that is not there any more, where the run has moved, is
        looked for at the same place relative to the run.
    """
    if before is None:
        return absolute(value)
    run, old = run.absolute(), Path(before)

    def change(path: Path) -> Path:
        path = mirror.again(path)
        if not path.is_absolute():
            return run / path
        if path.exists() or run == old:
            return path
        beside = Path(os.path.normpath(run / os.path.relpath(path, old)))
        return beside if beside.exists() else path

    return mapped(value, change)
