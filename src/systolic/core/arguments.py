"""Arguments from Python as the types of a function's signature: text becomes a path, a choice or several words, and what can be none of its types is refused.

A type that is unknown here, such as a protocol, takes every value.
"""

import enum
import functools
import inspect
import numbers
import os
import reprlib
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar

from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import dashed

P = ParamSpec("P")
R = TypeVar("R")

_SCALARS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "None",
}
"""Types of plain values, and what messages call them."""
_NO_VALUE = object()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Beside a parameter's type, ``Annotated[X, Alternative(Y, x_of)]``: another that Python may give, and what makes the parameter's of it."""

    kind: type
    made: Callable[[Any], Any]


def with_types(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments are converted and checked by :func:`arguments`.

    Raises:
        OptionError: the function is called with a value that is none of its parameter's types.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.arguments.update(arguments(function, bound.arguments))
        return function(*bound.args, **bound.kwargs)

    return called


def arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for a function's parameters, of their types.

    Raises:
        OptionError: a value that is none of its parameter's types.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: argument(dashed(name), value, hints.get(name, Any)) for name, value in values.items()
    }


def argument(name: str, value: Any, hint: Any) -> Any:
    """A value of one of a hint's types.

    Raises:
        OptionError: it is of none; ``name`` is what the message calls it.
    """
    kinds, extras = _kinds(hint)
    for one in extras:
        if isinstance(one, Alternative) and isinstance(value, one.kind):
            return one.made(value)
    words = [_takes(kind) for kind in kinds]
    if not all(words) or any(_is(value, kind) for kind in kinds):
        return value
    for kind in kinds:
        if (made := _made(name, value, kind)) is not _NO_VALUE:
            return made
    near = ""
    if isinstance(value, str):
        near = nearest(value, [known for kind in kinds for known in _members(kind)])
    given = reprlib.repr(value).replace("\n", " ")
    raise OptionError(f"{name} is {given}{near}; it takes {' or '.join(words)}")


def _kinds(hint: Any) -> tuple[list[Any], list[Any]]:
    """Types of a hint, and what it is annotated with."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *extras = typing.get_args(hint)
        kinds, more = _kinds(inner)
        return kinds, [*extras, *more]
    if typing.get_origin(hint) in (typing.Union, UnionType):
        parts = [_kinds(part) for part in typing.get_args(hint)]
        return [k for kinds, _ in parts for k in kinds], [e for _, extras in parts for e in extras]
    return [hint], []


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type already; of a class that was imported twice, too."""
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_is(one, inner) for one in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float and type(value) is int:
        return False
    again = is_dataclass(value) and type(value).__qualname__ == kind.__qualname__
    return again or isinstance(value, kind)


def _made(name: str, value: Any, kind: Any) -> Any:
    """The value that a type makes of another; ``_NO_VALUE`` where it takes none such."""
    if typing.get_origin(kind) is tuple and isinstance(value, str | list | tuple):
        words = shlex.split(value.replace(",", " ")) if isinstance(value, str) else value
        return tuple(argument(name, one, typing.get_args(kind)[0]) for one in words)
    if kind is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real | enum.Enum):
        return _NO_VALUE
    if kind is int and isinstance(value, numbers.Real) and value == value // 1:
        return int(value)
    if kind is float and isinstance(value, numbers.Real):
        return float(value)
    if known := _members(kind):
        plain = str(value.value if isinstance(value, enum.Enum) else value)
        return known.get(plain) or known.get(plain.lower().replace("_", "-"), _NO_VALUE)
    return _NO_VALUE


def _members(kind: Any) -> dict[str, Any]:
    """Members of an enum by their text; {} of another type."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {str(one.value): one for one in kind}
    return {}


def _takes(kind: Any) -> str:
    """What an option of a type takes; empty for a type that is not checked."""
    if typing.get_origin(kind) is typing.Literal:
        return _listed(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        inner, *rest = typing.get_args(kind)
        words = _takes(inner) if rest == [Ellipsis] else ""
        return f"a list, each of it {words}" if words else ""
    if not isinstance(kind, type):
        return ""
    if members := _members(kind):
        return _listed(members)
    if is_dataclass(kind):
        inside = kind.__module__.startswith("systolic.job.")
        return f"a {'systolic.job' if inside else kind.__module__}.{kind.__name__}"
    return _SCALARS.get(kind, "")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)
