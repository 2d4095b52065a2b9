"""Options of a verb from its public function and from the view that shows the result.

The function's signature says what can be asked for, its docstring what that means; the view's keyword
parameters say how the answer is shown and where it is written (``--json``, ``--html``). A parameter whose
types no word can give, such as a callback, is Python's alone. A parameter that both have is declared by the function.
"""

import enum
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from systolic.core.arguments import NO_VALUE, OptionWords, OutputPath, TextWord
from systolic.core.ranges import dashed

QUIET = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=False)
"""The option that every verb has beside those of its function and view."""
QUIET_LINE = "    quiet: Show no progress on stderr, only warnings and errors."
_SCALARS = (bool, int, float, str, Path)
_MARKUP = re.compile(r"``|:\w+:`~?|`")


class Options(NamedTuple):
    """Options of one form of a verb."""

    read: Callable[..., SimpleNamespace]
    """A function with a keyword parameter for each option."""
    of_function: Mapping[str, str]
    """Option to the function's parameter."""
    of_view: Mapping[str, str]
    """Option to the view's parameter."""
    written: frozenset[str]
    """Options whose path is written."""
    other_names: Mapping[str, str]
    """Another name of an option to its own, as they are typed."""

    def given_to_function(self, values: SimpleNamespace) -> dict[str, Any]:
        """Arguments of the function."""
        return {parameter: getattr(values, name) for name, parameter in self.of_function.items()}

    def given_to_view(self, values: SimpleNamespace) -> dict[str, Any]:
        """Arguments of the view."""
        return {parameter: getattr(values, name) for name, parameter in self.of_view.items()}


@lru_cache
def options_of(
    function: Callable[..., Any],
    view: Callable[..., Any],
    target: str = "",
    beside: Callable[..., Any] | None = None,
    *,
    positional: bool = False,
    words: tuple[str, ...] = (),
) -> Options:
    """Options of a verb's function and of its view, as keyword parameters with types that words can give.

    Args:
        function: The verb's function.
        view: What shows its result.
        target: Option that gives the function's first parameter; empty where a word without one does.
        beside: A function whose options are read, too, and given to nothing.
        positional: Whether words without an option give the function's positional parameters. The help then has all
            of the docstring before its arguments.
        words: Those of them that are words, where the others are options.
    """
    mine, shown = _parameters(function, positional=positional, words=words), _parameters(view)
    first = [_first(function, target)] if target else []
    others = [] if beside is None else list(_parameters(beside).values())
    merged = {one.name: one for one in (*first, *mine.values())}
    for one in (*others, *shown.values(), QUIET):
        merged.setdefault(one.name, one)

    def read(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)

    read.__signature__ = inspect.Signature(list(merged.values()))  # ty: ignore[missing-attribute]
    read.__annotations__ = {name: one.annotation for name, one in merged.items()}
    read.__doc__ = _documented(
        function, view, target, beside, whole=positional and not words, words=words
    )
    return Options(
        read=read,
        of_function={one.name: parameter for parameter, one in mine.items()},
        of_view={one.name: parameter for parameter, one in shown.items()},
        written=frozenset(
            name
            for name, one in merged.items()
            if any(isinstance(extra, OutputPath) for extra in _extras(one.annotation)[1])
        ),
        other_names={
            extra.also
            if extra.also.startswith("-")
            else f"--{dashed(extra.also)}": f"--{dashed(name)}"
            for name, one in merged.items()
            for extra in _extras(one.annotation)[1]
            if isinstance(extra, OptionWords) and extra.also
        },
    )


def _parameters(
    function: Callable[..., Any], *, positional: bool = False, words: Collection[str] = ()
) -> dict[str, inspect.Parameter]:
    """Parameter to the option that gives it, of those that words can give.

    A parameter by keyword is an option, and so is a positional one with :class:`OptionWords`; other positional ones
    are words of their own where ``positional`` says so, and left out elsewhere. Where ``words`` names some, these
    are words and all others options.
    """
    plain = inspect.unwrap(function)
    typed: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(plain).parameters.items():
        kind, extras = _extras(_resolved(parameter.annotation, plain.__globals__))
        given = next((extra for extra in extras if isinstance(extra, OptionWords)), None)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            is_word = name in words if words else positional and given is None
            if is_word:
                text = next((extra for extra in extras if isinstance(extra, TextWord)), None)
                extras = [*extras, tyro.conf.Positional]
                if text is not None:
                    kind, extras = str, [*extras, tyro.conf.arg(metavar=text.name)]
            elif given is None and not words:
                continue
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        given = given or OptionWords(_narrowed(kind))
        if given.kind is None:
            continue
        default = parameter.default if given.default is NO_VALUE else given.default
        if isinstance(default, enum.Enum) and given.kind is str:
            default = default.value
        if given.default_text:
            hint = f"(default: {given.default_text})"
            extras = [
                *extras,
                tyro.conf.arg(metavar=given.metavar, help_behavior_hint=hint),
            ]
        if given.repeated:
            extras = [*extras, tyro.conf.UseAppendAction]
        if given.flat:
            extras = [*extras, tyro.conf.arg(name="")]
        typed[name] = parameter.replace(
            name=given.name or name,
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[given.kind, *extras] if extras else given.kind,
            default=default,
        )
    return typed


def _first(function: Callable[..., Any], option: str) -> inspect.Parameter:
    """The function's first parameter as an option; without a name of one it is given by words alone."""
    plain = inspect.unwrap(function)
    parameter = next(iter(inspect.signature(plain).parameters.values()))
    hint, extras = _extras(_resolved(parameter.annotation, plain.__globals__))
    words = [extra.kind for extra in extras if isinstance(extra, OptionWords)]
    kind = words[0] if words else _narrowed(hint)
    annotation = kind if option else Annotated[kind, tyro.conf.Positional]  # ty: ignore[invalid-type-form]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return parameter.replace(name=option or parameter.name, kind=keyword, annotation=annotation)


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's first parameter as a word, which help and messages call by its name in capitals."""
    parameter = next(iter(inspect.signature(inspect.unwrap(function)).parameters.values()))
    shown = tyro.conf.arg(metavar=parameter.name.upper())
    kind = Annotated[str, tyro.conf.Positional, shown]
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)]


def _resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """An annotation that is text as a type; Any where only a type checker knows its names."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(names))
    except NameError:
        return Any


def _extras(hint: Any) -> tuple[Any, list[Any]]:
    """A hint's type, and what it is annotated with."""
    if typing.get_origin(hint) is Annotated:
        kind, *extras = typing.get_args(hint)
        return kind, extras
    return hint, []


def _narrowed(kind: Any) -> Any:
    """The part of a type that words can give; None for a type that none can.

    Of a path and text a word is a path, of a choice and text a choice; of a choice and a number it is text,
    which the function reads.
    """
    if typing.get_origin(kind) not in (typing.Union, UnionType):
        return kind if _is_words(kind) or (isinstance(kind, type) and is_dataclass(kind)) else None
    kinds = [part for part in typing.get_args(kind) if _is_words(part)]
    choices = [part for part in kinds if _is_choice(part)]
    numbers = [part for part in kinds if part in (int, float)]
    if Path in kinds or (choices and not numbers):
        kinds = [part for part in kinds if part is not str]
    elif str in kinds:
        kinds = [part for part in kinds if part in (str, NoneType)]
    if not [part for part in kinds if part is not NoneType]:
        return None
    return typing.Union[tuple(kinds)]  # noqa: UP007  of a list


def _is_words(kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return all(part is ... or _is_words(part) for part in typing.get_args(kind))
    return kind in (*_SCALARS, NoneType) or _is_choice(kind)


def _is_choice(kind: Any) -> bool:
    is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
    return is_enum or typing.get_origin(kind) is Literal


def _documented(
    function: Callable[..., Any],
    view: Callable[..., Any],
    target: str,
    beside: Callable[..., Any] | None,
    *,
    whole: bool,
    words: Collection[str],
) -> str:
    """The function's docstring as plain text, with the arguments of both; without ``whole`` only its first paragraph."""
    summary = (inspect.getdoc(function) or "").partition("Args:\n" if whole else "\n\n")[0]
    summary = summary.partition("\n\nRaises:")[0].rstrip()
    mine = _arguments(function, words=words)
    if target:
        first = next(iter(inspect.signature(function).parameters))
        mine = [re.sub(rf"^    {first}:", f"    {target}:", line) for line in mine]
    others = () if beside is None else _arguments(beside, without=_parameters(function))
    shown = _arguments(view, without=[*_parameters(function), target])
    return _MARKUP.sub("", "\n".join([summary, "", "Args:", *mine, *others, *shown, QUIET_LINE]))


def _arguments(
    function: Callable[..., Any], without: Collection[str] = (), words: Collection[str] = ()
) -> Sequence[str]:
    """Lines of the docstring's section of arguments, by the names of their options."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    names = {parameter: one.name for parameter, one in _parameters(function, words=words).items()}
    names |= {parameter: f"{parameter}-of-both" for parameter in without}
    return [
        re.sub(r"^    (\w+):", lambda m: f"    {names.get(m[1], m[1])}:", line)
        for line in section.partition("\n\n")[0].splitlines()
    ]
