"""Command line options from dataclasses and from the signatures of a verb's function and view, with errors of one line.

tyro turns types into options. It reports mistakes as boxes of several lines; here they become one
:class:`OptionError` that names the nearest option. A verb with a recipe reads a line in two stages:
:func:`known` takes the verb's own options, and the recipe's are read from the words that are left.
"""

import contextlib
import enum
import inspect
import io
import re
import typing
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import tyro

from systolic.core.arguments import NO_VALUE, OptionWords, OutputPath, Required, TextWord
from systolic.core.errors import OptionError
from systolic.core.option_words import nearest_option, negated
from systolic.core.ranges import check_arguments, dashed

T = TypeVar("T")

CONFIG = (tyro.conf.AvoidSubcommands, tyro.conf.EnumChoicesFromValues)
"""One flat set of options for each verb; enums by value."""

STAND_IN = "systolic-verb"
"""For the words before the options, which may have a path: tyro would break it over lines."""
_NUMBER = {"INT": "a whole number", "FLOAT": "a number"}
_REWORDED: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = (
    (
        re.compile(r"parsing (--\S+): no type matching \{None\}\|(INT|FLOAT) .*from \['([^']*)'\]"),
        lambda m: f"{m[1]} is {m[3]!r}; it takes {_NUMBER[m[2]]}",
    ),
    (
        re.compile(r"parsing (--\S+): invalid literal for int\(\) [^']*'([^']*)'"),
        lambda m: f"{m[1]} is {m[2]!r}; it takes {_NUMBER['INT']}",
    ),
    (
        re.compile(r"parsing (--\S+): could not convert string to float: '([^']*)'"),
        lambda m: f"{m[1]} is {m[2]!r}; it takes {_NUMBER['FLOAT']}",
    ),
    (
        re.compile(rf"Missing from ({STAND_IN}): (.*)"),
        lambda m: f"{m[1]} needs {_needed(m[2])}",
    ),
    (
        re.compile(r"Missing value for argument '(--[^'/]+)[^']*'"),
        lambda m: f"{m[1]} needs a value; one that begins with a dash is written {m[1]}=VALUE",
    ),
    (
        re.compile(
            r"invalid choice '([^']*)' for argument '(--\S+)'\. Expected one of \(([^)]*)\)"
        ),
        lambda m: f"{m[2]} is {m[1]!r}; it takes {_choices(m[3])}",
    ),
)
"""Patterns of tyro's messages, each with the message in our words."""
_FRAME = re.compile(r"[│╭╮╰╯─]+|-{4,}")
_HELP = ("  -h, --help", "│ -h, --help")
_ARG = type(tyro.conf.arg())
_OF_SEVERAL = re.compile(r"(?:parsing|choice .* for argument|value for argument) '?(--[\w.-]+)")
_WORDS = re.compile(r"(?:from|arguments:|invalid choice) (\[.*\]|'[^']*')")
_NUMBERS = {int: "whole numbers", float: "numbers"}
QUIET = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=False)
"""The option that every verb has beside those of its function and view."""
QUIET_LINE = "    quiet: Show no progress on stderr, only warnings and errors."
_SCALARS = (bool, int, float, str, Path)
_MARKUP = re.compile(r"``|:\w+:`~?|`")


def parse(function: Callable[..., T], args: Sequence[str], prog: str) -> T:
    """Calls ``function`` with its parameters read from ``args``; of a class, an instance.

    Raises:
        OptionError: an unknown option (with the nearest known one), or a value that does not parse or
            is outside the :class:`~systolic.core.ranges.Range` of its parameter.
        SystemExit: after ``--help`` was printed.
    """
    if asks_help(args):
        print_help(function, prog)
    values, rest = known(function, args, prog)
    refuse_unknown(rest, option_names(function), prog)
    return function(**values)


def known(
    function: Callable[..., Any], args: Sequence[str], prog: str, *, pairs: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Parameters of ``function`` by name, and the words of ``args`` that are none of its options.

    Args:
        function: Its parameters are the options.
        args: Words of a command line.
        prog: The words before them, in messages.
        pairs: Whether each switch has a ``--no-`` form, one that is off by default too.

    Raises:
        OptionError: an option is missing, does not parse or is out of its range.
    """
    capture, captured = _capture(function, pairs=pairs)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            _, unknown = tyro.cli(
                capture,
                args=list(args),
                prog=STAND_IN,
                config=CONFIG,
                return_unknown_args=True,
                add_help=False,
            )
    except SystemExit as stop:
        message = _one_line(complaint.getvalue(), _options(function, "")).replace(STAND_IN, prog)
        for name, needs in _required(function).items():
            if message.startswith(f"{prog} needs {name} "):
                raise OptionError(f"{prog} needs {needs.text}") from stop
        raise OptionError(f"{message}; see {prog} --help") from stop
    check_arguments(function, captured, lambda name: f"--{dashed(name)}")
    return captured, unknown


def refuse_unknown(rest: Sequence[str], names: Collection[str], prog: str, takes: str = "") -> None:
    """Refuses words that are no option of a command.

    Args:
        rest: The words.
        names: Options of the command.
        prog: Its words before them.
        takes: What the command takes, for a word that is near none of ``names``.

    Raises:
        OptionError: for the first of ``rest``, with the nearest of ``names``.
    """
    if not rest:
        return
    option = rest[0].split("=")[0]
    what = "option" if option.startswith("-") else "argument"
    near = nearest_option(option, names) or (takes and f"; {takes}")
    raise OptionError(f"{prog} has no {what} {option}{near}; see {prog} --help")


def is_unknown(word: str, names: Container[str]) -> bool:
    """Whether a word is an option, as ``--steps=3``, that is not among ``names``."""
    return word.startswith("--") and word.partition("=")[0].replace("_", "-") not in names


def stray(rest: Sequence[str], words: Sequence[str]) -> list[str]:
    """Values of ``rest``, the words left of a line, that belong to none of its options.

    The option before such a word was taken out with its own value, as in ``--names a --run x b``; read
    from ``rest`` alone, ``b`` would be another of the names.

    Args:
        rest: What :func:`known` left, in order.
        words: The whole line.
    """
    values, at = [], 0
    for word in rest:
        # A switch leaves the value of --json=x as a word that the line does not have.
        place = words.index(word, at) if word in words[at:] else -1
        if not word.startswith("--") and (place != at or not at):
            values.append(word)
        at = at if place < 0 else place + 1
    return values


def asks_help(args: Sequence[str]) -> bool:
    """Whether a command line asks for help; nothing else in it is then read."""
    return "-h" in args or "--help" in args


def print_help(function: Callable[..., Any], prog: str) -> NoReturn:
    """Prints the options of a function or class and ends the command.

    Raises:
        SystemExit: always.
    """
    tyro.cli(_capture(function)[0], args=["--help"], prog=prog, config=CONFIG)
    raise SystemExit(0)


def print_verb_help(forms: str, *kinds: Callable[..., Any]) -> int:
    """Prints what ``systolic VERB --help`` shows: the forms of the command, then the options of each form.

    Args:
        forms: Lines such as ``systolic forecast RECIPE --on SLICE [options]``, and what the words in capitals stand for.
        kinds: Classes of options; where there are several, each is titled with its docstring's summary.
    """
    print(forms)
    for kind in kinds:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            print_help(kind, "systolic")
        _, _, described = text.getvalue().rstrip().partition("\n\n")
        summary, _, options = described.partition("\n\n")
        lines = [line for line in options.splitlines() if not line.startswith(_HELP)]
        print("\n".join(["", *([summary, ""] if len(kinds) > 1 else []), *lines]))
    return 0


def option_names(function: Callable[..., Any], *, pairs: bool = False) -> set[str]:
    """Options of a function or class as they are typed: ``--model.layers``, ``--json``; ``pairs`` as for :func:`known`."""
    return set(_options(function, "", pairs=pairs))


def _options(function: Callable[..., Any], prefix: str, *, pairs: bool = False) -> dict[str, Any]:
    """Option to its annotated type, None for the ``--no-`` form of a switch."""
    hints = typing.get_type_hints(function, include_extras=True)
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        plain = typing.get_args(hint)[0] if extras else hint
        typed = f"{prefix}{dashed(name)}"
        if isinstance(plain, type) and is_dataclass(plain):
            flat = any(isinstance(extra, _ARG) and extra.name == "" for extra in extras)
            options |= _options(plain, prefix if flat else f"{typed}.")
        elif tyro.conf.Positional not in extras:
            options[f"--{typed}"] = hint
            if plain is bool and (pairs or prefix or parameter.default):
                options[f"--{negated(typed)}"] = None
    return options


def _required(function: Callable[..., Any]) -> dict[str, Required]:
    """Option, as it is typed, to what the command says where it is missing."""
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        f"--{dashed(name)}": extra
        for name, hint in hints.items()
        if typing.get_origin(hint) is Annotated
        for extra in typing.get_args(hint)[1:]
        if isinstance(extra, Required)
    }


def _capture(
    function: Callable[..., Any], *, pairs: bool = False
) -> tuple[Callable[..., None], dict[str, Any]]:
    """A stand-in for ``function`` that tyro may call, and the arguments that it was called with."""
    captured: dict[str, Any] = {}

    def capture(*positional: Any, **named: Any) -> None:
        captured.update(signature.bind(*positional, **named).arguments)

    signature = _signature(function, pairs=pairs)
    capture.__signature__ = signature  # ty: ignore[missing-attribute]
    capture.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    capture.__doc__ = function.__doc__
    return capture, captured


def _signature(function: Callable[..., Any], *, pairs: bool) -> inspect.Signature:
    """The signature that tyro reads.

    Without ``pairs`` a boolean parameter that is off by default is a plain switch, ``--json``. Any other boolean is a pair,
    ``--model.qk-norm, --model.no-qk-norm``, of which the help describes the first. ``from_`` is ``--from``.
    """

    def typed(p: inspect.Parameter) -> inspect.Parameter:
        if p.name.endswith("_"):
            named = tyro.conf.arg(name=dashed(p.name))
            p = p.replace(annotation=Annotated[p.annotation, named])
        if (
            not pairs
            and p.default is False
            and bool in (p.annotation, *typing.get_args(p.annotation)[:1])
        ):
            return p.replace(annotation=Annotated[p.annotation, tyro.conf.FlagCreatePairsOff])
        return p

    signature = inspect.signature(function, eval_str=True)
    return signature.replace(parameters=[typed(p) for p in signature.parameters.values()])


def _one_line(complaint: str, options: Mapping[str, Any]) -> str:
    """The first paragraph of tyro's framed message, unframed; ``options`` are the types by option."""
    words: list[str] = []
    for line in complaint.splitlines()[1:]:
        text = _FRAME.sub("", line).strip()
        if not text and words:
            break
        words.append(text)
    message = " ".join(words) or "the options do not parse"
    if (several := _several(message, options)) is not None:
        return several
    for pattern, reword in _REWORDED:
        if (match := pattern.search(message)) is not None:
            return reword(match)
    return message


def _several(message: str, options: Mapping[str, Any]) -> str | None:
    """Wording of what an option of several values takes, where tyro refuses its words; None of another option."""
    named = _OF_SEVERAL.search(message)
    kind = named and _tuple_kind(options.get(named[1]))
    if not (named and kind):
        return None
    option, parts = named[1], [part for part in typing.get_args(kind) if part is not ...]
    quoted = _WORDS.search(message)
    words = re.findall(r"'([^']*)'", quoted[1]) if quoted else []
    split = [word for each in words for word in each.split(",") if word]
    example = f": {option} {' '.join(split)}" if len(split) > len(words) else ""
    if len(parts) > 1:
        example = f": {option} {' '.join(map(_placeholder, parts))}"
        what = f"{len(parts)} values"
    else:
        what = _NUMBERS.get(parts[0]) or (example and "values")
    if not what:
        return None
    head = f"{option} is {' '.join(words)!r}; it takes" if words else f"{option} takes"
    return f"{head} {what} with spaces between{example}"


def _placeholder(kind: Any) -> str:
    """The word that stands for a value of a type: ``INT``."""
    return kind.__name__.upper() if isinstance(kind, type) else "VALUE"


def _tuple_kind(hint: Any) -> Any:
    """The tuple that an option takes, by itself or beside None; None of another option."""
    hint, _ = _extras(hint)
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    return next((kind for kind in kinds if typing.get_origin(kind) is tuple), None)


def _needed(listed: str) -> str:
    """``--path PATH The folder. (required) --to PATH …`` as ``--path PATH and --to PATH``."""
    names = []
    for part in filter(str.strip, listed.split("(required)")):
        first, *rest = part.split()
        names.append(f"{first} {rest[0]}" if first.startswith("--") and rest else first)
    return " and ".join(names)


def _choices(listed: str) -> str:
    """``'b', 'None', 'a'`` as ``a or b``."""
    names = sorted(set(re.findall(r"'([^']*)'", listed)) - {"None"})
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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

    The function's signature says what can be asked for, its docstring what that means; the view's keyword
    parameters say how the answer is shown and where it is written (``--json``, ``--html``). A parameter whose
    types no word can give, such as a callback, is Python's alone. A parameter that both have is declared by the function.

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
    merged = {option.name: option for option in (*first, *mine.values())}
    for option in (*others, *shown.values(), QUIET):
        merged.setdefault(option.name, option)

    def read(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)

    read.__signature__ = inspect.Signature(list(merged.values()))  # ty: ignore[missing-attribute]
    read.__annotations__ = {name: option.annotation for name, option in merged.items()}
    read.__doc__ = _documented(
        function, view, target, beside, whole=positional and not words, words=words
    )
    return Options(
        read=read,
        of_function={option.name: parameter for parameter, option in mine.items()},
        of_view={option.name: parameter for parameter, option in shown.items()},
        written=frozenset(
            name
            for name, option in merged.items()
            if any(isinstance(extra, OutputPath) for extra in _extras(option.annotation)[1])
        ),
        other_names={
            extra.also
            if extra.also.startswith("-")
            else f"--{dashed(extra.also)}": f"--{dashed(name)}"
            for name, option in merged.items()
            for extra in _extras(option.annotation)[1]
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
        option_words = next((extra for extra in extras if isinstance(extra, OptionWords)), None)
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            is_word = name in words if words else positional and option_words is None
            if is_word:
                text = next((extra for extra in extras if isinstance(extra, TextWord)), None)
                extras = [*extras, tyro.conf.Positional]
                if text is not None:
                    kind, extras = str, [*extras, tyro.conf.arg(metavar=text.name)]
            elif option_words is None and not words:
                continue
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        option_words = option_words or OptionWords(_narrowed(kind))
        if option_words.kind is None:
            continue
        default = parameter.default if option_words.default is NO_VALUE else option_words.default
        if isinstance(default, enum.Enum) and option_words.kind is str:
            default = default.value
        if option_words.default_text:
            hint = f"(default: {option_words.default_text})"
            extras = [
                *extras,
                tyro.conf.arg(metavar=option_words.metavar, help_behavior_hint=hint),
            ]
        if option_words.repeated:
            extras = [*extras, tyro.conf.UseAppendAction]
        if option_words.flat:
            extras = [*extras, tyro.conf.arg(name="")]
        typed[name] = parameter.replace(
            name=option_words.name or name,
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[option_words.kind, *extras] if extras else option_words.kind,
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
    names = {
        parameter: option.name for parameter, option in _parameters(function, words=words).items()
    }
    names |= {parameter: f"{parameter}-of-both" for parameter in without}
    return [
        re.sub(r"^    (\w+):", lambda m: f"    {names.get(m[1], m[1])}:", line)
        for line in section.partition("\n\n")[0].splitlines()
    ]
