"""Seeded mutants of the package: small faults of one line each, which the tests of its own folder should see.

``python benchmarks/mutants.py make --out FILE`` writes them; ``run --mutants FILE --out RESULTS`` applies each to a copy of a
tree and runs the default tests of its folder there, which have to pass without one; ``table BEFORE AFTER`` compares two runs.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from tempfile import mkdtemp
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("sim", "hlo", "job", "chips", "steps", "models", "training", "runs", "serving/text"),
    *("formats", "planning", "launching"),
)
PER_PACKAGE = 5
PATIENCE_SECONDS = 1200
"""A mutant that keeps the tests busy for longer, as an endless loop does, counts as killed."""
FATES = {0: "survived", 1: "killed", 2: "killed"}
"""By the exit code of pytest: nothing failed, a test did, or a file could not be collected. Others say nothing about the tests."""
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
"""What stands for a comparison in a mutant."""


class Mutant(NamedTuple):
    """A line of a file and what stands for it.

    Attributes:
        file: Path from the root of the tree.
        line: The line as it is; ``occurrence`` counts equal lines from 0.
        changed: The line of the mutant.
        kind: ``comparison``, ``constant``, ``dropped`` or ``exchanged``.
    """

    package: str
    file: str
    line: str
    occurrence: int
    changed: str
    kind: str

    def applied(self, text: str) -> str | None:
        """The file with the fault; ``None`` if it no longer has the line."""
        lines = text.splitlines(keepends=True)
        places = [n for n, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if len(places) <= self.occurrence:
            return None
        lines[places[self.occurrence]] = self.changed + "\n"
        return "".join(lines)


def make(seed: int) -> list[Mutant]:
    """Mutants of each package, the kinds in turn."""
    chance = random.Random(seed)
    found = []
    for package in PACKAGES:
        files = sorted((ROOT / "src/systolic" / package).rglob("*.py"))
        every = [mutant for file in files for mutant in mutants(package, file)]
        kinds = sorted({one.kind for one in every})
        chance.shuffle(kinds)
        for number in range(PER_PACKAGE):
            of_kind = [one for one in every if one.kind == kinds[number % len(kinds)]]
            found.append(chance.choice(of_kind))
    return found


def mutants(package: str, file: Path) -> Iterator[Mutant]:
    """All mutants of a file's functions that compile and differ."""
    text = file.read_text()
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            for kind, start, end, new in _changes(node, lines):
                line = lines[start[0] - 1]
                # Columns of a syntax tree count bytes.
                raw = line.encode()
                changed = (raw[: start[1]] + new.encode() + raw[end[1] :]).decode()
                name = file.relative_to(ROOT).as_posix()
                occurrence = lines[: start[0] - 1].count(line)
                mutant = Mutant(package, name, line, occurrence, changed, kind)
                if changed != line and not _is_idle(line) and _compiles(mutant.applied(text)):
                    yield mutant


def _is_idle(line: str) -> bool:
    """Whether a change of the line may change nothing: an assertion for the type checker, or arguments in any order."""
    return line.lstrip().startswith("assert ") or any(word in line for word in ("max(", "min("))


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[str, tuple, tuple, str]]:
    """Kind, start and end of what is replaced on one line, and what stands there."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if (
            left.end_lineno == right.lineno
        ):
            start, end = (left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset)
            yield "comparison", start, end, f" {COMPARISONS[type(op)]} "
        case ast.Constant(value=bool(value)) if node.lineno == node.end_lineno:
            yield "constant", *_span(node), str(not value)
        case ast.Constant(value=int(value) | float(value)) if node.lineno == node.end_lineno:
            yield "constant", *_span(node), str(value + 1 if isinstance(value, int) else value * 2)
        case ast.Assign() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            if node.lineno == node.end_lineno:
                yield "dropped", *_span(node), "pass"
        case ast.Call(args=[first, second, *_]) if first.lineno == second.end_lineno:
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                line = lines[first.lineno - 1].encode()
                one = line[first.col_offset : first.end_col_offset].decode()
                two = line[second.col_offset : second.end_col_offset].decode()
                between = line[first.end_col_offset : second.col_offset].decode()
                start, end = (
                    (first.lineno, first.col_offset),
                    (second.lineno, second.end_col_offset),
                )
                yield "exchanged", start, end, f"{two}{between}{one}"


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _compiles(text: str | None) -> bool:
    try:
        compile(text or "", "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return bool(text)


def copy_of(tree: Path) -> Path:
    """A copy of a tree's code, tests and configuration."""
    made = Path(mkdtemp(prefix="mutants-"))
    for name in subprocess.check_output(["git", "ls-files"], cwd=tree, text=True).splitlines():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, made / name)
    return made


def run(mutant: Mutant, tree: Path) -> dict[str, Any]:
    """The fate of one mutant in a copy of a tree: ``killed`` with the first test that failed, ``survived``, ``absent`` or ``not run``."""
    file = tree / mutant.file
    whole = file.read_text()
    changed = mutant.applied(whole)
    result: dict[str, Any] = {**mutant._asdict(), "fate": "absent", "by": ""}
    if changed is None:
        return result
    file.write_text(changed)
    began = time.monotonic()
    try:
        done = tested(tree, mutant.package)
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        result["fate"] = FATES.get(done.returncode, "not run")
        result["by"] = failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        result |= {"fate": "killed", "by": "endless"}
    finally:
        file.write_text(whole)
    return result | {"seconds": round(time.monotonic() - began)}


def tested(tree: Path, package: str) -> subprocess.CompletedProcess[str]:
    """The default tests of a package's folder, up to the first that fails."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-x", "-q", f"tests/{package}"],
        cwd=tree,
        env={**_environment(), "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def check(tree: Path, packages: Iterable[str]) -> None:
    """Ends this program where tests fail without a mutant, which would count as killed."""
    for package in packages:
        done = tested(tree, package)
        if done.returncode != 0:
            sys.exit(f"tests/{package} fails in {tree} as it is:\n{done.stdout[-2000:]}")
        print(f"tests/{package} passes as it is", flush=True)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}


def run_all(mutants_file: Path, tree: Path, out: Path, workers: int) -> None:
    """Runs those that ``out`` lacks, and adds them to it one by one."""
    found = [Mutant(**one) for one in json.loads(mutants_file.read_text())]
    done = {_key(one) for one in _lines(out)}
    waiting = [one for one in found if _key(one._asdict()) not in done]
    trees: Queue[Path] = Queue()
    for _ in range(workers):
        trees.put(copy_of(tree))
    check(trees.queue[0], dict.fromkeys(mutant.package for mutant in waiting))

    def one(mutant: Mutant) -> dict[str, Any]:
        mine = trees.get()
        try:
            return run(mutant, mine)
        finally:
            trees.put(mine)

    with ThreadPoolExecutor(workers) as pool:
        for number, result in enumerate(pool.map(one, waiting), len(done) + 1):
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"{number}/{len(found)} {result['fate']}: {result['file']} {result['by']}",
                flush=True,
            )
    while not trees.empty():
        shutil.rmtree(trees.get(), ignore_errors=True)


def _key(one: dict[str, Any]) -> tuple:
    return one["file"], one["line"], one["occurrence"], one["changed"]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def table(before: Path, after: Path) -> str:
    """Killed mutants by package before and after, and those that survived both."""
    first, second = ({_key(one): one for one in _lines(file)} for file in (before, after))
    rows = ["| package | mutants | killed before | killed after |", "|---|---|---|---|"]
    for package in PACKAGES:
        both = [key for key in first if key in second and first[key]["package"] == package]
        had, has = (Counter(run[key]["fate"] for key in both)["killed"] for run in (first, second))
        rows.append(f"| {package} | {len(both)} | {had} | {has} |")
    for title, had, has in (
        ("Killed before and not after", "killed", "survived"),
        ("Survived both", "survived", "survived"),
    ):
        rows += ["", f"{title}:", ""]
        for key, one in first.items():
            if one["fate"] == had and second.get(key, {}).get("fate") == has:
                rows.append(
                    f"- `{one['file']}`: `{one['line'].strip()}` -> `{one['changed'].strip()}`"
                )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make")
    making.add_argument("--seed", type=int, default=29)
    making.add_argument("--out", type=Path, required=True)
    running = verbs.add_parser("run")
    running.add_argument("--mutants", type=Path, required=True)
    running.add_argument("--tree", type=Path, default=ROOT)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--workers", type=int, default=2)
    comparing = verbs.add_parser("table")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.verb == "make":
        made = [one._asdict() for one in make(given.seed)]
        given.out.write_text(json.dumps(made, indent=1) + "\n")
    elif given.verb == "run":
        run_all(given.mutants, given.tree, given.out, given.workers)
    else:
        print(table(given.before, given.after))


if __name__ == "__main__":
    main()
