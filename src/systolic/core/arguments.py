"""Arguments from Python as the types of a function's signature: text becomes a path, a number, a choice or several words, a dict the fields of a record, and what can be none of its types is refused.

A type that is unknown here, such as a protocol, takes every value.
"""

import contextlib
import enum
import functools
import inspect
import numbers
import os
import re
import reprlib
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, ParamSpec, TypeVar

from systolic.core.errors import OptionError, OutOfRangeError, nearest
from systolic.core.option_words import as_parameters, command_line, is_in_bucket, path_text, spelled
from systolic.core.ranges import complaint, dashed, ranged

P = ParamSpec("P")
R = TypeVar("R")
Member = TypeVar("Member", bound=enum.Enum)

_SCALARS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "None",
}
"""Types of plain values, and what messages call them."""
NO_VALUE = object()
_LISTS = (Sequence, Iterable)
WRITTEN_HERE = frozenset(
    ("out", "csv", "save", "html", "perfetto", "study", "keep", "save_traffic")
)
"""Parameters of public functions, and options, whose path is written on this machine: a run alone is written into a bucket."""
_ENTRY = re.compile(r"^    \*{0,2}(\w+): ", re.MULTILINE)
"""The line of a docstring's Args with which a parameter's sentence begins."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Beside a parameter's type, ``Annotated[X, Alternative(Y, x_of)]``: another that Python may give, and what makes the parameter's of it."""

    kind: type
    make: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Wording:
    """Beside a parameter's type, ``Annotated[X, Wording("a slice or its name")]``: what messages say in place of the names of its types."""

    text: str


@dataclass(frozen=True, slots=True)
class OptionWords:
    """Beside a parameter's type: what the command line reads for it, where that is not what the type says."""

    kind: Any
    """The type of the option; None leaves the parameter to Python."""
    default: Any = NO_VALUE
    """Default of the option, where it is another than Python's."""
    repeated: bool = False
    """Whether the option is given once for each of its values."""
    name: str = ""
    """Name of the option, where it is another than the parameter's."""
    also: str = ""
    """Another name that the option is read under; ``-f`` is a short form."""
    metavar: str = ""
    """Value as the help shows it, beside ``default_text``."""
    default_text: str = ""
    """Default as the help shows it, for a None that stands for a derived value."""
    flat: bool = False
    """Whether the fields of a record are options by their own names: ``--temperature``."""


@dataclass(frozen=True, slots=True)
class TextWord:
    """Beside a positional parameter: the command line reads its word as text, a path in a bucket too, and calls it this."""

    name: str


@dataclass(frozen=True, slots=True)
class Required:
    """Beside a parameter without a default: what messages say it needs, as ``a slice; add --on v5e-16``."""

    text: str


@dataclass(frozen=True, slots=True)
class OutputPath:
    """Beside a parameter's type: the path is written, which the command line tries before the work begins."""


@dataclass(frozen=True, slots=True)
class Partner:
    """Beside a parameter's type: another parameter without which it has no effect; alone it is refused."""

    name: str


def check_local(name: str, path: Path | str) -> None:
    """Refuses a path in a bucket of what is written on this machine, where a folder ``gs:`` would come of it.

    Raises:
        OptionError: the path is in a bucket.
    """
    if is_in_bucket(path):
        raise OptionError(
            f"{name} is {path_text(path)}, and results are written on this machine; give a path here and copy it there"
        )


PYTHON = OptionWords(None)
"""A parameter that no word of a command line can give."""
WRITTEN = OutputPath()


def with_types(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments are converted and checked by :func:`arguments`.

    Raises:
        OptionError: the function is called with a value that is none of its parameter's types.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.arguments.update(arguments(function, bound.arguments, str))
        return function(*bound.args, **bound.kwargs)

    return called


def command_of(function: Callable[P, R]) -> Callable[P, R]:
    """Variant of :func:`with_types` for the public function of a verb: messages call its parameters by their names, and from the command line by their options."""
    names = inspect.signature(function).parameters

    def spell(text: str) -> str:
        return text if command_line() else as_parameters(text, names)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with spelled(spell):
            bound = _bound(function, args, kwargs)
            taken = arguments(function, bound.arguments, lambda name: f"--{dashed(name)}")
            bound.arguments.update(taken)
            for name in WRITTEN_HERE & bound.arguments.keys():
                if isinstance(path := bound.arguments[name], str | Path):
                    check_local(f"--{dashed(name)}", path)
            _check_partners(function, bound.arguments)
            return function(*bound.args, **bound.kwargs)

    return called


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments of a call by their names.

    Raises:
        TypeError: the function takes no such arguments; names the parameter that may be meant.
    """
    signature = inspect.signature(function)
    called = function.__name__ if inspect.isfunction(function) else "the function"
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        if not unknown:
            raise TypeError(f"{called}(): {error}") from error
        name, hints = unknown[0], _signature(function)[0]
        holders = [
            f"; give {parameter}={_takes(kind).removeprefix('a ')}({name}=…)"
            for parameter, hint in hints.items()
            for kind in _kinds(hint)[0]
            if isinstance(kind, type)
            and is_dataclass(kind)
            and name in {f.name for f in fields(kind)}
        ]
        near = holders[0] if holders else nearest(name, signature.parameters)
        raise TypeError(f"{called}() takes no {name}{near}") from error


def _check_partners(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuses an argument that has no effect without another.

    Raises:
        OptionError: for the first that is not at its default, where its partner is.
    """
    hints, defaults = _signature(function)
    for name, value in values.items():
        for extra in _kinds(hints.get(name, Any))[1]:
            if not isinstance(extra, Partner) or value == defaults[name]:
                continue
            default = defaults[extra.name]
            if values.get(extra.name, default) == default:
                option, partner = f"--{dashed(name)}", f"--{dashed(extra.name)}"
                given = option if value is True else f"{option} is {value}, which"
                raise OptionError(
                    f"{given} has no effect without {partner}; give {partner}, or leave {option} out"
                )


def explained_by(*others: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for a function that shares parameters with ``others``, whose docstrings alone explain them.

    A parameter that the function's own Args leave out gets the sentence of the same name of the first that has one;
    all stand in the order of the signature.
    """

    def explained(function: Callable[P, R]) -> Callable[P, R]:
        doc = inspect.getdoc(function)
        if doc is None:  # python -OO
            return function
        head, args, rest = doc.partition("\n\nArgs:\n")
        section, blank, tail = rest.partition("\n\n")
        if not args:
            head, blank, tail = doc.partition("\n\nRaises:\n")
            blank, tail = (blank and "\n\n"), (blank and f"Raises:\n{tail}")
        sections = [*(_args_of(other) for other in reversed(others)), section]
        sentences = {name: line for part in sections for name, line in _sentences(part).items()}
        names = [name for name in inspect.signature(function).parameters if name in sentences]
        lines = "\n".join(sentences[name] for name in names)
        function.__doc__ = f"{head}\n\nArgs:\n{lines}{blank}{tail}"
        return function

    return explained


def _args_of(function: Callable[..., Any]) -> str:
    """The section Args of a function's docstring."""
    return (inspect.getdoc(function) or "").partition("\n\nArgs:\n")[2].partition("\n\n")[0]


def _sentences(section: str) -> dict[str, str]:
    """Lines of a section Args by the parameters that they explain."""
    starts = list(_ENTRY.finditer(section))
    bounds = [*(entry.start() for entry in starts), len(section)]
    return {
        entry[1]: section[start:end].rstrip("\n")
        for entry, (start, end) in zip(starts, pairwise(bounds), strict=True)
    }


def arguments(
    function: Callable[..., Any], values: Mapping[str, Any], spell: Callable[[str], str] = dashed
) -> dict[str, Any]:
    """Values for a function's parameters, of their types; ``spell`` is how messages write a parameter's name.

    Raises:
        OptionError: a value that is none of its parameter's types.
        OutOfRangeError: a number out of the range beside its type.
    """
    hints, defaults = _signature(function)
    converted = {
        name: argument(spell(name), value, hints.get(name, Any), defaults.get(name))
        for name, value in values.items()
    }
    for name, value in converted.items():
        limit = ranged(hints.get(name, Any))
        if limit is not None and (problem := complaint(f"--{dashed(name)}", limit, value)):
            raise OutOfRangeError(problem)
    return converted


@functools.lru_cache(maxsize=64)
def _signature(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hints and defaults of parameters. A hint that only type checkers resolve is left out, and takes every value."""
    hints: dict[str, Any] = {}
    plain = inspect.unwrap(function)
    where = plain.__globals__ if inspect.isfunction(plain) else {}
    for name, hint in plain.__annotations__.items():
        annotated = SimpleNamespace(__annotations__={name: hint})
        try:
            hints |= typing.get_type_hints(annotated, where, include_extras=True)
        except NameError:
            continue
    parameters = inspect.signature(function).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in parameters.items():
        if parameter.kind in several:
            hints.pop(name, None)
    return hints, {name: parameter.default for name, parameter in parameters.items()}


def argument(name: str, value: Any, hint: Any, default: Any = None) -> Any:
    """A value of one of a hint's types; a dict changes the fields of ``default``, or of a record by default.

    Raises:
        OptionError: it is of none; ``name`` is what the message calls it.
    """
    kinds, extras = _kinds(hint)
    for extra in extras:
        if isinstance(extra, Alternative) and isinstance(value, extra.kind):
            return extra.make(value)
    words = [_takes(kind) for kind in kinds]
    if not all(words) or any(_is(value, kind) for kind in kinds):
        return value
    wording = next((extra.text for extra in extras if isinstance(extra, Wording)), "")
    for kind in kinds:
        with contextlib.suppress(OptionError) if wording else contextlib.nullcontext():
            if (converted := _made(name, value, kind)) is not NO_VALUE:
                return converted
        if (converted := _record(name, value, kind, default)) is not NO_VALUE:
            return converted
    near = ""
    if isinstance(value, str):
        near = nearest(value, [known for kind in kinds for known in _members(kind)])
    shown = reprlib.repr(value).replace("\n", " ")
    if inspect.isfunction(value):
        shown = f"the function {value.__name__}, not what it returns"
    raise OptionError(f"{name} is {shown}{near}; it takes {wording or _alternatives(kinds, words)}")


def _alternatives(kinds: Iterable[Any], words: Iterable[str]) -> str:
    """``text or a systolic.Slice, or a list of these``."""
    alone = {w: k for k, w in zip(kinds, words, strict=True) if typing.get_origin(k) not in _LISTS}
    lists = [kind for kind, word in zip(kinds, words, strict=True) if word not in alone]
    same = [kind for kind in lists if set(map(_takes, _inner(kind))) == set(alone)]
    if _SCALARS[Path] in alone:
        alone.pop(_SCALARS[str], None)
    choices = [*alone, *(_takes(kind) for kind in lists if kind not in same)]
    return " or ".join(choices) + (", or a list of these" if same else "")


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
        return isinstance(value, tuple) and all(_is(part, inner) for part in value)
    if typing.get_origin(kind) in _LISTS:
        inner = _inner(kind)
        plain = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        if not inner or not isinstance(value, Sequence):
            return plain
        return plain and all(any(_is(part, each) for each in inner) for part in value)
    if typing.get_origin(kind) is Mapping:
        return isinstance(value, Mapping)
    if typing.get_origin(kind) is Callable:
        return callable(value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float and type(value) is int:
        return False
    again = is_dataclass(value) and type(value).__qualname__ == kind.__qualname__
    return again or isinstance(value, kind)


def _made(name: str, value: Any, kind: Any) -> Any:
    """The value that a type makes of another; ``NO_VALUE`` where it takes none such."""
    if isinstance(value, PurePath) and typing.get_origin(kind) in (tuple, *_LISTS):
        return _made(name, [value], kind)
    if typing.get_origin(kind) is tuple and isinstance(value, str | list | tuple):
        words = shlex.split(value.replace(",", " ")) if isinstance(value, str) else value
        return tuple(argument(name, word, typing.get_args(kind)[0]) for word in words)
    if typing.get_origin(kind) in _LISTS and isinstance(value, str | list | tuple) and _inner(kind):
        words = [value] if isinstance(value, str) else value
        return [argument(name, word, typing.get_args(kind)[0]) for word in words]
    if kind is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real | enum.Enum):
        return NO_VALUE
    if kind is int and isinstance(value, numbers.Real) and value == value // 1:
        return int(value)
    if kind is float and isinstance(value, numbers.Real):
        return float(value)
    if kind is bool and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), NO_VALUE)
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            return NO_VALUE
    if known := _members(kind):
        plain = str(value.value if isinstance(value, enum.Enum) else value)
        return known.get(plain) or known.get(plain.lower().replace("_", "-"), NO_VALUE)
    return NO_VALUE


def _record(name: str, value: Any, kind: Any, default: Any) -> Any:
    """The record with the fields of a dict, or of the kind that text names; ``NO_VALUE`` where a type takes neither."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return NO_VALUE
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (
        NameError
    ):  # of a result, whose module loads the types of its fields later: the function checks it
        return value if isinstance(value, Mapping) else NO_VALUE
    known = [known_field.name for known_field in fields(kind) if known_field.init]
    if isinstance(value, str) and any(map(_members, _kinds(hints.get("kind"))[0])):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        return NO_VALUE
    try:
        base = default if isinstance(default, kind) else kind()
    except TypeError:  # it has fields without a default
        return NO_VALUE
    changed = {}
    for key, setting in value.items():
        field = str(key).replace("-", "_")
        if field not in known:
            raise OptionError(
                f"{name} has {key!r}{nearest(field, known)}; its fields are {', '.join(map(dashed, known))}"
            )
        changed[field] = argument(
            f"{name}.{dashed(field)}", setting, hints[field], getattr(base, field)
        )
    return replace(base, **changed)


def _inner(kind: Any) -> list[Any]:
    """Types of a list's elements; empty where one of them is not checked."""
    inner, _ = _kinds(*typing.get_args(kind))
    return inner if all(map(_takes, inner)) else []


def _members(kind: Any) -> dict[str, Any]:
    """Members of an enum by their text; {} of another type."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {str(choice.value): choice for choice in kind}
    return {}


def _takes(kind: Any) -> str:
    """Wording of what an option of a type takes; empty for a type that is not checked."""
    if typing.get_origin(kind) is typing.Literal:
        return _listed(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        inner, *rest = typing.get_args(kind)
        words = _takes(inner) if rest == [Ellipsis] else ""
        return f"a list, each of it {words}" if words else ""
    if typing.get_origin(kind) in _LISTS:
        words = " or ".join(map(_takes, _inner(kind)))
        return f"a list, each of it {words}" if words else "a list"
    if typing.get_origin(kind) in (Mapping, Callable):
        return "a dict" if typing.get_origin(kind) is Mapping else "a function"
    if not isinstance(kind, type):
        return ""
    if members := _members(kind):
        return _listed(members)
    if is_dataclass(kind):
        inside = kind.__module__.startswith("systolic.job.")
        package = kind.__module__.partition(".")[0]
        public = kind.__name__ in vars(sys.modules[package]).get("__all__", ())
        home = package if public else "systolic.job" if inside else kind.__module__
        return f"a {home}.{kind.__name__}"
    return _SCALARS.get(kind, "")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def member(kind: type[Member], value: Member | str, option: str) -> Member:
    """The member of an enum, or of its value.

    Raises:
        OptionError: a word that is none of its values.
    """
    names = [choice.value for choice in kind]
    if isinstance(value, str) and value not in names:
        raise OptionError(
            f"{option} is {value!r}{nearest(value, names)}; it takes {', '.join(names)}"
        )
    return kind(value)
