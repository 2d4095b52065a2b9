"""The order in which files of tests have their turn where there may be no time for all."""

from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path


def turns(files: Iterable[Path], turn: int) -> list[Path]:
    """The first file of each folder, then the second of each; another ``turn`` begins with another folder, and in each with another file."""
    folders: dict[Path, list[Path]] = {}
    for file in dict.fromkeys(files):
        folders.setdefault(file.parent, []).append(file)
    later = turn // max(len(folders), 1)
    rows = _rotated([_rotated(row, later) for row in folders.values()], turn)
    return [file for file in chain.from_iterable(zip_longest(*rows)) if file is not None]


def _rotated(row: list, by: int) -> list:
    by %= max(len(row), 1)
    return row[by:] + row[:by]
