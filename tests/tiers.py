"""Which tests each tier has, which of them a change calls for, in what order they run, and in how many processes."""

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).parent
SECONDS = TESTS / "seconds.json"
"""CPU seconds of each file of default tests, written by ``python benchmarks/suite.py files --record``."""
ROOT = TESTS.parent
SOURCES = ROOT / "src" / "systolic"
NAMED = re.compile(r"\b(?:systolic|tests)(?:\.\w+)+")
IMPORTED = re.compile(r"\bfrom ((?:systolic|tests)[\w.]*) import (\([^)]*\)|[^\n]*)")
UNKNOWN_SECONDS = 5.0
"""Seconds of a file that was not recorded."""
WORKER_BYTES = 4 << 30
"""Memory that a worker may come to need."""
TURNS = 10
"""Runs after which every file had its turn."""
EVERYTHING = (
    *(
        "pyproject.toml",
        "tests/conftest.py",
        "tests/compiles.py",
        "tests/forked.py",
        "tests/tiers.py",
    ),
    *("src/systolic/__init__.py", "src/systolic/core/"),
)
"""Paths whose changes all tests see."""
FEW = 4
"""So many files, and fewer, run in this process: starting others takes longer than the tests."""


def some(cases: Iterable[Any] | Mapping[str, Any], default: Collection[Any]) -> list[Any]:
    """Parameters of a test: cases, or values by name; those not among ``default`` (cases or names) are of the tier ``parity``.

    The default tier has one for each mechanism.
    """
    pairs = cases.items() if isinstance(cases, Mapping) else ((None, case) for case in cases)
    made = []
    for name, case in pairs:
        marks = () if (case if name is None else name) in default else pytest.mark.parity
        made.append(pytest.param(case, id=name, marks=marks))
    missing = [one for one in default if one not in cases]
    assert not missing, f"{missing} are no cases"
    return made


def longest_first(files: Iterable[Path]) -> list[Path]:
    """Files by their recorded seconds, so that no worker is left with a long one at the end."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())

    def cost(file: Path) -> float:
        name = file.relative_to(TESTS).as_posix() if file.is_relative_to(TESTS) else ""
        return seconds.get(name, UNKNOWN_SECONDS)

    return sorted(dict.fromkeys(files), key=cost, reverse=True)


def workers(targets: Sequence[str]) -> int:
    """Processes for these files and folders: one a core as far as memory goes, none besides this one for a few files."""
    files = {target.partition("::")[0] for target in targets}
    if files and len(files) <= FEW and all(Path(file).is_file() for file in files):
        return 0
    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 1
    return max(min(cores, psutil.virtual_memory().available // WORKER_BYTES), 1)


def due(files: Iterable[Path], changed: Iterable[str], turn: int) -> dict[Path, str]:
    """Files in the order in which CI runs them, each with why: its turn, a path of the change that calls for it, or nothing.

    A tenth has its turn and is first, so that ten runs see all; another one of it begins in the next ten, as time
    may end before the last. Then come files beside what changed: ``tests/a/b/test_c.py`` is beside ``src/systolic/a``, and what either
    imports; then those that a change reaches through more imports. A change of one of :data:`EVERYTHING` calls for all.
    """
    changed, files = list(changed), sorted(files)
    has_turn = [file for file in files if turn_of(file) == turn % TURNS]
    first = dict.fromkeys(_begun_at(has_turn, turn // TURNS), "its turn")
    beside, reached, rest = {}, {}, {}
    for file in _begun_at(files, turn):
        if file in first:
            continue
        folder = file.relative_to(TESTS).parts[0]
        under = [f"src/systolic/{one}/" for one in sorted({folder, *beneath(folder)})]
        calls = (f"tests/{folder}/", *under, *EVERYTHING)
        path = next((path for path in changed if path.startswith(calls)), None)
        if path is not None:
            beside[file] = path
        elif path := next((path for path in changed if reaches(path, file)), None):
            reached[file] = path
        else:
            rest[file] = ""
    return {**first, **beside, **reached, **rest}


def turn_of(file: Path) -> int:
    """The one of ten runs that sees a file, whatever files come and go beside it."""
    return zlib.crc32(file.relative_to(TESTS).as_posix().encode()) % TURNS


def _begun_at(files: list[Path], turn: int) -> list[Path]:
    at = turn % max(len(files), 1)
    return files[at:] + files[:at]


@lru_cache
def beneath(folder: str) -> frozenset[str]:
    """Packages whose changes a folder's tests see first: what these and the package of that name import."""
    places = (TESTS / folder, SOURCES / folder)
    names = [name for place in places for file in place.rglob("*.py") for name in named(file)]
    return frozenset(
        name.split(".")[1] for name in names if name.startswith("systolic.") and name.count(".")
    )


def reaches(path: str, file: Path) -> bool:
    """Whether a test may see a change: it imports or names the module, through others too, or something beside that file of data."""
    changed, modules = ROOT / path, closure(file)
    if changed.suffix == ".py":
        return changed in modules
    recorded = TESTS / "recorded"
    if changed.is_relative_to(recorded):
        kept = re.compile(rf"recorded\W+{changed.relative_to(recorded).parts[0]}\b")
        return any(
            changed.parent == module.parent or kept.search(_text(module))
            for module in modules
            if TESTS in module.parents
        )
    beside = changed.parent
    return beside not in (ROOT, TESTS) and any(module.parent == beside for module in modules)


@cache
def closure(file: Path) -> frozenset[Path]:
    """Modules of ours that a file names, through others too."""
    found, left = {file}, [file]
    while left:
        for one in modules_of(left.pop()) - found:
            found.add(one)
            left.append(one)
    return frozenset(found)


@cache
def modules_of(file: Path) -> frozenset[Path]:
    """Modules of ours that a file names, with the packages above them."""
    found: set[Path] = set()
    for name in named(file):
        place = ROOT if name.startswith("tests") else ROOT / "src"
        for part in name.split("."):
            place /= part
            found |= {place / "__init__.py", place.with_suffix(".py")} & _sources()
    return frozenset(found)


@cache
def named(file: Path) -> frozenset[str]:
    """Dotted names of ours in a file, in what it imports and in strings that children run."""
    text = _text(file)
    found = set(NAMED.findall(text))
    for base, names in IMPORTED.findall(text):
        found |= {f"{base}.{name}" for name in re.findall(r"\w+", names)} | {base}
    return frozenset(found)


@cache
def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


@lru_cache
def _sources() -> frozenset[Path]:
    return frozenset(file for place in (SOURCES, TESTS) for file in place.rglob("*.py"))


def in_tier(tier: str) -> list[Path]:
    """Files that have tests of a tier."""
    words = {"slow": ("mark.slow",), "parity": ("tests.tiers import", "mark.parity")}[tier]
    return [
        file
        for file in sorted(TESTS.rglob("test_*.py"))
        if any(word in file.read_text() for word in words) and file != TESTS / "house/test_tiers.py"
    ]


def changed_since(base: str) -> list[str]:
    """Paths that differ from a commit, in the working tree too."""
    command = ["git", "diff", "--name-only", "--no-renames", base]
    return subprocess.check_output(command, cwd=ROOT, text=True).splitlines()


def main() -> None:
    """``python -m tests.tiers TIER COMMIT TURN``: files of a tier for CI to run since a commit, in order, one a line; tells why.

    Of ``parity`` those that neither the change nor the turn calls for are left out; of ``slow`` they are last.
    """
    tier, base, turn = sys.argv[1:]
    for file, why in due(in_tier(tier), changed_since(base), int(turn)).items():
        name = file.relative_to(ROOT)
        left = "left out" if tier == "parity" else "runs if time is left"
        told = f"runs: {why}" if why else f"{left}: nothing that it tests changed"
        print(f"{name} {told}", file=sys.stderr)
        if why or tier != "parity":
            print(name)


if __name__ == "__main__":
    main()
