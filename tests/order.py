"""The order in which files of tests have their turn, and how many workers run them."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path

import psutil

SECONDS = Path(__file__).with_name("seconds.json")
"""CPU seconds of each file of default tests, written by ``python benchmarks/suite.py --record``."""
UNKNOWN_SECONDS = 5.0
"""Seconds of a file that was not recorded."""
WORKER_BYTES = 4 << 30
"""Memory that a worker may come to need."""
FEW = 4
"""So many files, and fewer, run in this process: starting others takes longer than the tests."""


def turns(files: Iterable[Path], turn: int) -> list[Path]:
    """The first file of each folder, then the second of each; another ``turn`` begins with another folder, and in each with another file."""
    folders: dict[Path, list[Path]] = {}
    for file in dict.fromkeys(files):
        folders.setdefault(file.parent, []).append(file)
    later = turn // max(len(folders), 1)
    rows = _rotated([_rotated(row, later) for row in folders.values()], turn)
    return [file for file in chain.from_iterable(zip_longest(*rows)) if file is not None]


def longest_first(files: Iterable[Path]) -> list[Path]:
    """Files by their recorded seconds, so that no worker is left with a long one at the end."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    root = SECONDS.parent

    def cost(file: Path) -> float:
        return seconds.get(file.relative_to(root).as_posix(), UNKNOWN_SECONDS)

    return sorted(dict.fromkeys(files), key=cost, reverse=True)


def workers(targets: Sequence[str]) -> int:
    """Processes for these files and folders: one a core as far as memory goes, none besides this one for a few files."""
    files = {target.partition("::")[0] for target in targets}
    if files and len(files) <= FEW and all(Path(file).is_file() for file in files):
        return 0
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 1
    return max(min(cores, psutil.virtual_memory().available // WORKER_BYTES), 1)


def _rotated(row: list, by: int) -> list:
    by %= max(len(row), 1)
    return row[by:] + row[:by]
