"""Functions that share parameters: one of them explains each, and the others take its sentence, type, range and default."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from systolic.core.arguments import _args_of, _sentences, explained_by
from tests.house.budget import ROOT
from tests.house.trees import tree


def brew(leaves: str, *args: int, minutes: int = 3, **more: int) -> None:
    """Brews.

    Args:
        leaves: Kind of tea,
            by its name.
        args: Cups.
        minutes: How long.
        more: Further cups.
    """


def test_sentences_stand_in_the_order_of_the_signature() -> None:
    @explained_by(brew)
    def strong(minutes: int = 3, *, milk: bool = False, leaves: str, **more: int) -> None:
        """Brews strong tea.

        Args:
            milk: With milk.
            more: None.

        Raises:
            ValueError: no water.
        """

    assert inspect.getdoc(strong) == (
        "Brews strong tea.\n\nArgs:\n    minutes: How long.\n    milk: With milk.\n    leaves: Kind of tea,\n"
        "        by its name.\n    more: None.\n\nRaises:\n    ValueError: no water."
    )


def test_a_docstring_without_arguments_gets_them() -> None:
    @explained_by(brew)
    def short(leaves: str) -> None:
        """Brews a cup."""

    @explained_by(brew)
    def refused(minutes: int) -> None:
        """Brews.

        Raises:
            ValueError: no water.
        """

    assert inspect.getdoc(short) == (
        "Brews a cup.\n\nArgs:\n    leaves: Kind of tea,\n        by its name."
    )
    assert inspect.getdoc(refused) == (
        "Brews.\n\nArgs:\n    minutes: How long.\n\nRaises:\n    ValueError: no water."
    )


def sharing() -> Iterator[tuple[str, str]]:
    """Modules and their functions that share parameters."""
    for path in (ROOT / "src/systolic").rglob("*.py"):
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef) and others(node):
                module = path.relative_to(ROOT / "src").with_suffix("")
                yield ".".join(module.parts), node.name


def others(node: ast.FunctionDef) -> list[str]:
    """Functions that explain the parameters of another."""
    return [
        argument.id
        for call in node.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "explained_by"
        for argument in call.args
        if isinstance(argument, ast.Name)
    ]


@pytest.mark.parametrize(("path", "name"), sorted(sharing()))
def test_a_shared_sentence_is_of_the_same_option(path: str, name: str) -> None:
    module = import_module(path)
    nodes = tree(Path(str(module.__file__))).body
    (node,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name]
    own = _sentences((ast.get_docstring(node) or "").partition("\n\nArgs:\n")[2])
    mine = inspect.signature(getattr(module, name)).parameters
    shared = _sentences(_args_of(getattr(module, name))).keys() - own.keys()
    assert shared
    for option in shared:
        other = next(
            function
            for function in map(module.__dict__.get, others(node))
            if function is not None and option in _sentences(_args_of(function))
        )
        theirs = inspect.signature(other).parameters[option]
        assert mine[option].annotation == theirs.annotation, option
        assert mine[option].default == theirs.default, option
