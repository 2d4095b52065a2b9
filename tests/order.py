"""Which files of tests a change calls for, the order in which files have their turn, and how many workers run them."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path

import psutil

TESTS = Path(__file__).parent
SECONDS = TESTS / "seconds.json"
"""CPU seconds of each file of default tests, written by ``python benchmarks/suite.py --record``."""
UNKNOWN_SECONDS = 5.0
"""Seconds of a file that was not recorded."""
WORKER_BYTES = 4 << 30
"""Memory that a worker may come to need."""
TURNS = 10
"""Runs after which every file had its turn."""
BENEATH = {
    "models": ("steps", "job", "interop"),
    "steps": ("models", "job", "training"),
    "training": ("steps", "models", "job", "session", "artifact", "data"),
    "serving": ("steps", "models", "predicting", "session"),
    "interop": ("models", "artifact", "steps", "session"),
    "exporting": ("models", "steps", "interop", "artifact", "predicting", "session"),
    "session": ("steps", "models", "training", "serving", "planning", "forecasting", "tuning"),
    "tuning": ("session",),
    "cli": ("session", "recipes"),
}
"""Packages beside its own whose changes a folder's tests see."""
EVERYTHING = ("pyproject.toml", "tests/conftest.py", "tests/compiles.py", "src/systolic/core/")
"""Paths whose changes all tests see."""
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

    def cost(file: Path) -> float:
        return seconds.get(file.relative_to(TESTS).as_posix(), UNKNOWN_SECONDS)

    return sorted(dict.fromkeys(files), key=cost, reverse=True)


def workers(targets: Sequence[str]) -> int:
    """Processes for these files and folders: one a core as far as memory goes, none besides this one for a few files."""
    files = {target.partition("::")[0] for target in targets}
    if files and len(files) <= FEW and all(Path(file).is_file() for file in files):
        return 0
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 1
    return max(min(cores, psutil.virtual_memory().available // WORKER_BYTES), 1)


def chosen(files: Iterable[Path], changed: Iterable[str], turn: int) -> dict[Path, str]:
    """Files that a change calls for, each with the path that does; of the others every tenth, so that ten turns see all.

    ``tests/a/b/test_c.py`` tests ``src/systolic/a`` and what :data:`BENEATH` has for ``a``; a change of one of
    :data:`EVERYTHING` calls for all.
    """
    changed = list(changed)
    why = {}
    for number, file in enumerate(sorted(files)):
        folder = file.relative_to(TESTS).parts[0]
        under = [f"src/systolic/{one}/" for one in (folder, *BENEATH.get(folder, ()))]
        calls = (f"tests/{folder}/", *under, *EVERYTHING)
        path = next((path for path in changed if path.startswith(calls)), None)
        if path is not None:
            why[file] = path
        elif number % TURNS == turn % TURNS:
            why[file] = "its turn"
    return why


def with_parity() -> list[Path]:
    """Files that have tests of the tier ``parity``."""
    words = ("tests.tiers import", "mark.parity")
    return [
        file
        for file in sorted(TESTS.rglob("test_*.py"))
        if any(word in file.read_text() for word in words) and file != TESTS / "house/test_order.py"
    ]


def changed_since(base: str) -> list[str]:
    """Paths that differ from a commit, in the working tree too."""
    command = ["git", "diff", "--name-only", base]
    return subprocess.check_output(command, cwd=TESTS.parent, text=True).splitlines()


def main() -> None:
    """``python -m tests.order COMMIT TURN``: files of the tier ``parity`` to run since a commit, one a line; says why, and what is left out."""
    base, turn = sys.argv[1:]
    files = with_parity()
    why = chosen(files, changed_since(base), int(turn))
    for file in sorted(files):
        told = f"runs: {why[file]}" if file in why else "left out: nothing that it tests changed"
        print(f"{file.relative_to(TESTS.parent)} {told}", file=sys.stderr)
    print(*(file.relative_to(TESTS.parent) for file in why), sep="\n")


def _rotated(row: list, by: int) -> list:
    by %= max(len(row), 1)
    return row[by:] + row[:by]


if __name__ == "__main__":
    main()
