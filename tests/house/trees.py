"""Syntax trees of files, each made once for a file of tests, and walks through no more of them than is asked for."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_HOLD_STATEMENTS = ("body", "handlers", "orelse", "finalbody", "cases")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(errors="replace"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(tree(path)))


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """Statements directly inside of one, and the branches that hold some."""
    for name in _HOLD_STATEMENTS:
        part = node.__dict__.get(name)
        if isinstance(part, list):
            yield from part


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements of a module, at any depth of a function; expressions hold none."""
    todo = [node]
    while todo:
        at = todo.pop()
        yield at
        todo.extend(inner(at))
