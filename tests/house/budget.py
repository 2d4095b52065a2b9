"""Size budgets: ``python -m tests.house.budget`` prints the size of each layer and what is over.

Medians do not tell good code from messy code, tails do. So the limits are on the largest file, the
longest function and the longest list of parameters.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.house.trees import inner, tree

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")
LONGEST_FILE = 800
LONGEST_FUNCTION = 60
LONGEST_EXCEPTION = 100
MOST_PARAMETERS = 8

COMMAND = "the signature is the command line and the docstring its help"
WORDS = "a public call with the words of the command line"

LONG_FUNCTIONS: dict[str, str] = {
    "src/systolic/forecasting/function.py:forecast_function": WORDS,
    "src/systolic/models/splash.py:splash_attention": "one kernel: its blocks, masks and shardings are read together",
}
"""``path:function`` to the reason why it may have up to LONGEST_EXCEPTION lines."""

MANY_PARAMETERS: dict[str, str] = {
    "tests/training/tiny.py:job": COMMAND,
    "src/systolic/forecasting/serving/capacity.py:forecast_serving": "the options of systolic forecast --serve, for Python",
    "src/systolic/forecasting/function.py:forecast_function": WORDS,
}
"""``path:function`` to the reason why it may have more than MOST_PARAMETERS parameters."""

OPTIONS = "src/systolic/recipes/"
"""A recipe's signature is its command line and its docstring the help: not counted as code."""


Function = ast.FunctionDef | ast.AsyncFunctionDef


class Excess(NamedTuple):
    """Something over its budget."""

    where: str
    what: str
    size: int
    limit: int


def python_files(root: Path) -> list[Path]:
    """All Python files of the project, in order."""
    return sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def excesses(root: Path) -> list[Excess]:
    """Everything over its budget."""
    return _measured(root)[0]


def unused_exceptions(root: Path) -> list[str]:
    """Exceptions that nothing needs any more."""
    return sorted({*LONG_FUNCTIONS, *MANY_PARAMETERS} - _measured(root)[1])


@cache
def _measured(root: Path) -> tuple[list[Excess], set[str]]:
    """Everything over its budget, and the functions that need an exception."""
    found, needed = [], set()
    for path in python_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if (lines := text.count("\n")) > LONGEST_FILE:
            found.append(Excess(name, "lines", lines, LONGEST_FILE))
        for function, node in functions(tree(path)):
            found.extend(_of_function(f"{name}:{function}", node, name.startswith(OPTIONS)))
            is_long = _lines(node) > LONGEST_FUNCTION or _parameters(node) > MOST_PARAMETERS
            if is_long and not _is_command(node):
                needed.add(f"{name}:{function}")
    return found, needed


def functions(holder: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Qualified names and nodes of all functions, inner ones too."""
    for node in inner(holder):
        if isinstance(node, Function):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def layers(root: Path) -> dict[str, tuple[int, int]]:
    """Layer or folder to its number of files and lines."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in python_files(root):
        parts = path.relative_to(root).parts
        layer = parts[2] if parts[0] == "src" and len(parts) > 3 else parts[0]
        files, lines = sizes.get(layer, (0, 0))
        sizes[layer] = files + 1, lines + path.read_text().count("\n")
    return sizes


def _of_function(where: str, node: Function, is_recipe: bool) -> Iterator[Excess]:
    lines = _lines(node)
    is_recipe = is_recipe or _is_command(node)
    if is_recipe:
        lines -= node.body[min(1, len(node.body) - 1)].lineno - node.lineno
    limit = LONGEST_EXCEPTION if where in LONG_FUNCTIONS else LONGEST_FUNCTION
    if lines > limit:
        yield Excess(where, "lines", lines, limit)
    parameters = _parameters(node)
    if parameters > MOST_PARAMETERS and where not in MANY_PARAMETERS and not is_recipe:
        yield Excess(where, "parameters", parameters, MOST_PARAMETERS)


def _is_command(node: Function) -> bool:
    """Whether it is the public function of a verb, whose signature and docstring are its options as a recipe's are."""
    return any(ast.unparse(decorator) == "command_of" for decorator in node.decorator_list)


def _lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _parameters(node: Function) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def main() -> int:
    """Prints sizes and excesses; 1 when there is an excess."""
    for layer, (files, lines) in sorted(layers(ROOT).items(), key=lambda item: -item[1][1]):
        print(f"{layer:<12} {files:>4} files {lines:>7,} lines")
    over = excesses(ROOT)
    for excess in over:
        print(f"{excess.where}: {excess.size} {excess.what}, the limit is {excess.limit}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
