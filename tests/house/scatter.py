"""How scattered a tree is, against what it is to become: ``python -m tests.house.scatter [TREE] [--json | --record]``.

Beside the counts stand those of ``ratchets.json``, which no change may exceed: a change that lowers one records the new
number there with ``--record``, which never raises any. ``--record --anew`` takes today's numbers, for a change that
gives its reason.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from systolic.cli.main import VERBS
from tests.house.budget import ROOT
from tests.house.journeys import CHAT_CLASSES, JOURNEYS, definitions, files
from tests.house.trees import nodes, tree

RATCHETS = Path(__file__).with_name("ratchets.json")
PACKAGE = Path("src/systolic")
MOST_FILES = 25
"""Files of a folder, without those of folders in it."""
BAD_STARTS = ("Of", "What", "Where", "Those", "Told", "As")
"""First words of docstrings that begin with neither a noun nor a verb."""
EMPTY_NAMES = ("one", "found", "made", "asked", "given", "told")
"""Names that say nothing of what they name."""
DECLARING = {
    "train": ("train to the update", "training/display/view.py"),
    "plan": ("plan",),
    "forecast": ("forecast to the printed time",),
}
"""A verb to its journey, in whose files its options are declared, and to further files that declare them."""
THOUSAND = 1000
"""The ratchet of lines is in thousands, so that a fix of some lines passes."""
SLACK = 0.02
"""Share by which a count may lie below its ratchet before the ratchet has to be lowered."""
TARGETS = {
    "files": 480,
    "lines": 98_000,
    "option declarations, most": 1,
    "option declarations, mean": 1,
    **{f"files entered: {name}": 12 for name in JOURNEYS},
    "classes of a chat request": 7,
    "class names with two meanings": 0,
    "docstrings that begin badly": 0,
    "empty names per thousand": 10,
    "folders with too many files": 0,
    "constants below a def": 0,
}
"""A count to the number at which it is done."""


@cache
def counts(root: Path) -> Mapping[str, float]:
    """Everything that :data:`TARGETS` has a number for."""
    package = root / PACKAGE
    paths = sorted(package.rglob("*.py"))
    declared = [len(places) for places in declarations(package).values()]
    return {
        "files": len(paths),
        "lines": sum(path.read_text().count("\n") for path in paths),
        "option declarations, most": max(declared),
        "option declarations, mean": round(sum(declared) / len(declared), 2),
        **{f"files entered: {name}": len(files(places)) for name, places in JOURNEYS.items()},
        "classes of a chat request": len(CHAT_CLASSES),
        "class names with two meanings": len(shared_names(package)),
        "docstrings that begin badly": sum(bad_docstrings(package).values()),
        "empty names per thousand": round(1000 * empty_share(package), 1),
        "folders with too many files": len(large_folders(package)),
        "constants below a def": sum(len(low_constants(path)) for path in paths),
    }


@cache
def by_part(root: Path) -> Mapping[str, Mapping[str, int]]:
    """Counts that have their exceptions by package, or by name."""
    package = root / PACKAGE
    return {
        "docstrings that begin badly": dict(sorted(bad_docstrings(package).items())),
        "class names with two meanings": dict(sorted(shared_names(package).items())),
        "folders with too many files": dict(sorted(large_folders(package).items())),
    }


def declarations(package: Path) -> dict[tuple[str, str], list[str]]:
    """Options of train, plan and forecast, as (verb, option), to the places that declare one with a sentence.

    A declaration is a parameter that its function's docstring explains, or a field of a class ``…Options`` that the class's
    docstring or a string below it does. Neither a field of any other record is one, nor a namesake with none of the
    option's types: ``describe(flags: RunFlags)`` beside ``flags: str``.
    """
    options = {(verb, name): [] for verb in DECLARING for name in _options(verb, package)}
    for verb, (journey, *more) in DECLARING.items():
        types = _parameter_types(verb, package)
        for file in [*files(JOURNEYS[journey]), *more]:
            for where, name, own in _explained(package / file):
                known = types.get(name, own)
                if (verb, name) in options and _declares(where) and (own & known or not own):
                    options[verb, name].append(f"{file}:{where}")
    return options


def _declares(where: str) -> bool:
    """Whether a place is a function or a class of options, rather than a record."""
    return where.endswith("Options") or not where.lstrip("_")[0].isupper()


def _parameter_types(verb: str, package: Path) -> dict[str, set[str]]:
    """Types of the parameters of a verb's functions and views, by name."""
    types: dict[str, set[str]] = {}
    for form in VERBS[verb].forms:
        for path in (form.function, form.view):
            module, _, name = path.partition(":")
            file = package.parent / f"{module.replace('.', '/')}.py"
            node = definitions(file)[name]
            assert isinstance(node, ast.FunctionDef)
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                types.setdefault(argument.arg, set()).update(_types(argument.annotation, file))
    return types


def _types(annotation: ast.AST | None, file: Path) -> set[str]:
    """Alternatives of an annotation besides None; a file's own names for types count as what they stand for."""
    match annotation:
        case None | ast.Constant(value=None):
            return set()
        case ast.Constant(value=str(text)):
            return _types(ast.parse(text, mode="eval").body, file)
        case ast.BinOp(left=left, right=right):
            return _types(left, file) | _types(right, file)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return _types(kind, file)
        case ast.Name(id=name) if name in (own := _own_names(file)):
            return _types(own[name], file)
    assert annotation is not None
    return {ast.unparse(annotation)}


def _own_names(file: Path) -> dict[str, ast.AST]:
    """Names that a file gives to what stands right of an equals sign."""
    return {
        line.targets[0].id: line.value
        for line in tree(file).body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    }


def _options(verb: str, package: Path) -> set[str]:
    """Options of a verb: of its forms, or fields of the classes ``…Options`` in its file."""
    if forms := VERBS[verb].forms:
        known = [form.options for form in forms if not form.word]
        return {name for one in known for name in (*one.of_function, *one.of_view)}
    path = package / "cli" / f"{verb}.py"
    return {name for where, name, _ in _explained(path) if where.endswith("Options")}


def _explained(path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Functions and classes with the names that they explain, and their types."""
    for node in nodes(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        said = set(re.findall(r"^ +(\w+): ", ast.get_docstring(node) or "", re.MULTILINE))
        if isinstance(node, ast.ClassDef):
            for line, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    below = isinstance(following, ast.Expr)
                    if below or line.target.id in said:
                        yield node.name, line.target.id, _types(line.annotation, path)
        else:
            arguments = node.args
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                if argument.arg in said:
                    yield node.name, argument.arg, _types(argument.annotation, path)


def shared_names(package: Path) -> dict[str, int]:
    """Names of classes that several modules define, to how many; an underscore before a name makes it no other."""
    found = Counter(
        node.name.lstrip("_")
        for path in package.rglob("*.py")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    )
    return {name: number for name, number in found.items() if number > 1}


def bad_docstrings(package: Path) -> dict[str, int]:
    """Docstrings that begin with one of :data:`BAD_STARTS`, by package; those below fields and constants count too."""
    found: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        starts = Counter(text.partition(" ")[0] for text in docstrings(path))
        found[part_of(path, package)] += sum(starts[word] for word in BAD_STARTS)
    return {part: number for part, number in found.items() if number}


def docstrings(path: Path) -> Iterator[str]:
    """Strings that stand alone as statements."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text.strip()


def part_of(path: Path, package: Path) -> str:
    """The package's own folder that a file lies in."""
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else ""


def empty_share(package: Path) -> float:
    """Share of :data:`EMPTY_NAMES` among all names: of variables where they are set and read, and of parameters."""
    names: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Name):
                names[node.id] += 1
            elif isinstance(node, ast.arg):
                names[node.arg] += 1
    return sum(names[name] for name in EMPTY_NAMES) / max(names.total(), 1)


def large_folders(package: Path) -> dict[str, int]:
    """Folders with more than :data:`MOST_FILES` Python files, to how many."""
    found = Counter(path.parent.relative_to(package).as_posix() for path in package.rglob("*.py"))
    return {folder: number for folder, number in found.items() if number > MOST_FILES}


def low_constants(path: Path) -> list[str]:
    """Names that a module sets below its first function or class, and that need nothing which is made there."""
    above, below = set[str](), set[str]()
    low: list[str] = []
    for node in tree(path).body:
        names = {
            name.id
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                below.add(node.name)
            case _ if not below:
                above |= names
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                read = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                if read & (above & names | below):
                    below |= names
                else:
                    low += names
            case _:
                below |= names | {
                    alias.asname or alias.name
                    for held in ast.walk(node)
                    if isinstance(held, ast.Import | ast.ImportFrom)
                    for alias in held.names
                }
    return low


def start_seconds(root: Path, repeats: int = 5) -> float:
    """Median time of ``systolic --help``, in a new process each."""
    command = [sys.executable, "-m", "systolic", "--help"]
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run(command, cwd=root / "src", stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def kept() -> dict[str, Any]:
    """The ratchets: ``counts`` by name, and ``parts`` of those that are kept by package or name."""
    return json.loads(RATCHETS.read_text())


def over(root: Path) -> Iterator[str]:
    """What is worse than its ratchet, or so much better that the ratchet has to be lowered."""
    ratchets = kept()
    for name, now in counts(root).items():
        limit = max(ratchets["counts"][name], TARGETS[name])
        if now > limit:
            yield f"{name}: {now:g}, and at most {limit:g} are allowed"
        elif now < (1 - SLACK) * ratchets["counts"][name]:
            yield f"{name}: {now:g}, and the ratchet is {limit:g}; lower it: python -m tests.house.scatter --record"
    for name, parts in by_part(root).items():
        for part, now in parts.items():
            limit = ratchets["parts"][name].get(part, 0)
            if now > limit:
                yield f"{name}, {part or 'the package itself'}: {now}, and at most {limit} are allowed"


def record(root: Path, *, anew: bool) -> None:
    """Writes the ratchets: the smaller of what they were and what is, or ``anew`` what is."""
    counted = counts(root)
    thousands = ceil(counted["lines"] / THOUSAND) * THOUSAND
    now: dict[str, Any] = {"counts": {**counted, "lines": thousands}, "parts": by_part(root)}
    if not anew:
        before = kept()
        now["counts"] = _smaller(now["counts"], before["counts"])
        now["parts"] = {
            name: _smaller(parts, before["parts"][name]) for name, parts in now["parts"].items()
        }
    RATCHETS.write_text(json.dumps(now, indent=1) + "\n")


def _smaller(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Counts that are there in both, each the smaller; what is new is none of the exceptions."""
    return {name: min(number, before[name]) for name, number in now.items() if name in before}


def rows(root: Path) -> Iterable[str]:
    """The table: today's count, the ratchet, the target; what is declared most often; exceptions by package or name."""
    ratchets, start = kept()["counts"], start_seconds(root)
    yield f"{'':<46} {'now':>9} {'at most':>9} {'goal':>9}"
    for name, now in counts(root).items():
        yield f"{name:<46} {now:>9,g} {ratchets[name]:>9,g} {TARGETS[name]:>9,g}"
    yield f"{'start of the command, seconds (median of 5)':<46} {start:>9.3f}"
    most = sorted(declarations(root / PACKAGE).items(), key=lambda item: -len(item[1]))[:5]
    for (verb, option), places in most:
        yield f"  {verb} --{option.replace('_', '-')} is declared in {', '.join(places)}"
    for name, parts in by_part(root).items():
        yield f"{name}: {', '.join(f'{part} {number}' for part, number in parts.items())}"


def main() -> None:
    """Prints the table, or writes the ratchets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="folder of a checkout")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="lower the ratchets")
    parser.add_argument("--anew", action="store_true", help="with --record: raise them, too")
    options = parser.parse_args()
    root = options.tree.resolve()
    if options.record:
        record(root, anew=options.anew)
    elif options.json:
        print(json.dumps({"counts": counts(root), "parts": by_part(root)}, indent=1))
    else:
        print("\n".join(rows(root)))


if __name__ == "__main__":
    main()
