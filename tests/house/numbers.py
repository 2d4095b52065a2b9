"""Finds numbers of hardware outside of the catalogue and of the simulator's tables."""

import ast
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.trees import tree

LARGE = 1e6
"""Numbers from here on are rates, sizes or clocks unless they convert units: powers of ten, joules in a kWh."""

PLAIN = (0, 1, -1)

HARDWARE = re.compile(
    r"(bytes|flops|ops|operations)_per_second|_hz$|^(vmem|smem|cmem|hbm|mxu|vpu|ici|dcn|pcie)_"
    r"|(^|_)(lanes|sublanes|watts|tdp|pue|efficiency|bandwidth|latency|clock)($|_)",
    re.IGNORECASE,
)
"""Names that a number of hardware has."""

PRICED = ("sim", "planning/analytic.py")
"""Where every number of a module is one that prices depend on."""

_FOLDED = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}


NUMBERED = (*(ast.Constant, ast.BoolOp, ast.Assign, ast.AnnAssign, ast.arguments, ast.keyword),)
"""Nodes that may hold a number of hardware."""


class Number(NamedTuple):
    """A number of hardware: where it stands, as ``path:name``, its line, and its value."""

    where: str
    line: int
    value: float


def numbers(package: Path, fields: frozenset[str]) -> list[Number]:
    """All numbers of hardware in the Python files of a package.

    Args:
        package: Its folder.
        fields: Names of a chip's fields: ``chip.FIELD or 25e9`` stands in for one.
    """
    found = set()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        text, body = path.read_text(), tree(path).body
        for statement in body:
            at = _top(statement)
            for node in ast.walk(statement):
                if isinstance(node, NUMBERED):
                    for number in (*_large(node, text), *_standing_in(node, fields), *_named(node)):
                        found.add(Number(f"{name}:{at}", number.lineno, _value(number) or 0.0))
        if name.startswith(PRICED):
            for statement in body:
                at = _target(statement)
                for number in _literals(statement) if at else ():
                    found.add(Number(f"{name}:{at}", number.lineno, _value(number) or 0.0))
    return sorted(found)


def _top(statement: ast.stmt) -> str:
    """Name of the constant, function or class that a statement at the top defines."""
    named = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return statement.name if named else _target(statement)


def _target(statement: ast.AST) -> str:
    """Name that a statement assigns to."""
    if isinstance(statement, ast.Assign):
        names = [n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        return ",".join(names)
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id
    return ""


def _value(node: ast.AST) -> float | None:
    """Value of a number, or of arithmetic of numbers."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            inner = _value(node.operand)
            return None if inner is None else -inner
        case ast.BinOp() if type(node.op) in _FOLDED:
            left, right = _value(node.left), _value(node.right)
            if left is None or right is None or (isinstance(node.op, ast.Pow) and right > 100):
                return None
            return _FOLDED[type(node.op)](left, right)
    return None


def _literals(node: ast.AST) -> list[ast.expr]:
    """Numbers in a statement's value that are neither 0 nor 1; one of arithmetic counts once."""
    found = []
    todo: list[ast.AST] = [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) else [node]
    while todo:
        at = todo.pop()
        if isinstance(at, ast.expr) and (value := _value(at)) is not None:
            if value not in PLAIN:
                found.append(at)
        elif at is not None:
            todo.extend(ast.iter_child_nodes(at))
    return found


def _large(node: ast.AST, text: str) -> Iterator[ast.expr]:
    """A number too large to be a count, unless it converts units or is a pattern of bits.

    Sizes are written as powers of two; those of hardware have a name that says so.
    """
    if not isinstance(node, ast.Constant) or (value := _value(node)) is None or value < LARGE:
        return
    converts = value in (3.6e6, *(10.0**n for n in range(6, 19)))
    if not converts and not (ast.get_source_segment(text, node) or "").startswith("0x"):
        yield node


def _standing_in(node: ast.AST, fields: frozenset[str]) -> Iterator[ast.expr]:
    """Numbers that stand in where a chip has none."""
    if not isinstance(node, ast.BoolOp) or not isinstance(node.op, ast.Or):
        return
    if any(isinstance(value, ast.Attribute) and value.attr in fields for value in node.values):
        for value in node.values[1:]:
            yield from _literals(value)


def _named(node: ast.AST) -> Iterator[ast.expr]:
    """Numbers that are given a name of hardware: assigned, as a default or as an argument."""
    pairs: list[tuple[str, ast.AST | None]] = []
    if isinstance(node, ast.Assign | ast.AnnAssign):
        pairs = [(name, node.value) for name in _target(node).split(",")]
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        last = positional[len(positional) - len(node.defaults) :]
        pairs = [(a.arg, d) for a, d in zip(last, node.defaults, strict=True)]
        pairs += [(a.arg, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    elif isinstance(node, ast.keyword):
        pairs = [(node.arg or "", node.value)]
    for name, value in pairs:
        if value is not None and HARDWARE.search(name):
            yield from _literals(value)
