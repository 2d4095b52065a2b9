"""Command line options from dataclasses and signatures, with errors of one line.

tyro turns types into options. It reports mistakes as boxes of several lines; here they become one
:class:`OptionError` that names the nearest option. A verb with a recipe reads a line in two stages:
:func:`known` takes the verb's own options, and the recipe's are read from the words that are left.
"""

import contextlib
import inspect
import io
import re
import typing
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from systolic.core.arguments import Required
from systolic.core.errors import OptionError
from systolic.core.ranges import check_arguments, dashed
from systolic.core.spelling import nearest_option

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
    function: Callable[..., Any], args: Sequence[str], prog: str
) -> tuple[dict[str, Any], list[str]]:
    """Parameters of ``function`` by name, and the words of ``args`` that are none of its options.

    Raises:
        OptionError: an option is missing, does not parse or is out of its range.
    """
    capture, captured = _capture(function)
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
        message = _one_line(complaint.getvalue()).replace(STAND_IN, prog)
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
    found, at = [], 0
    for word in rest:
        # A switch leaves the value of --json=x as a word that the line does not have.
        place = words.index(word, at) if word in words[at:] else -1
        if not word.startswith("--") and (place != at or not at):
            found.append(word)
        at = at if place < 0 else place + 1
    return found


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


_HELP = ("  -h, --help", "│ -h, --help")


def option_names(function: Callable[..., Any]) -> set[str]:
    """Options of a function or class as they are typed: ``--model.layers``, ``--json``."""
    return set(_options(function, ""))


def _options(function: Callable[..., Any], prefix: str) -> dict[str, Any]:
    """Option to its annotated type, None for the ``--no-`` form of a switch."""
    hints = typing.get_type_hints(function, include_extras=True)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        plain = typing.get_args(hint)[0] if extras else hint
        typed = f"{prefix}{dashed(name)}"
        if isinstance(plain, type) and is_dataclass(plain):
            flat = any(isinstance(one, _ARG) and one.name == "" for one in extras)
            found |= _options(plain, prefix if flat else f"{typed}.")
        elif tyro.conf.Positional not in extras:
            found[f"--{typed}"] = hint
            if plain is bool and (prefix or parameter.default):
                part, dot, last = typed.rpartition(".")
                found[f"--{part}{dot}no-{last}"] = None
    return found


_ARG = type(tyro.conf.arg())


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


def _capture(function: Callable[..., Any]) -> tuple[Callable[..., None], dict[str, Any]]:
    """A stand-in for ``function`` that tyro may call, and the arguments that it was called with."""
    captured: dict[str, Any] = {}

    def capture(*positional: Any, **named: Any) -> None:
        captured.update(signature.bind(*positional, **named).arguments)

    signature = _signature(function)
    capture.__signature__ = signature  # ty: ignore[missing-attribute]
    capture.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    capture.__doc__ = function.__doc__
    return capture, captured


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature that tyro reads.

    A boolean parameter that is off by default is a plain switch, ``--json``. Any other boolean is a pair,
    ``--model.qk-norm, --model.no-qk-norm``, of which the help describes the first. ``from_`` is ``--from``.
    """

    def typed(p: inspect.Parameter) -> inspect.Parameter:
        if p.name.endswith("_"):
            named = tyro.conf.arg(name=dashed(p.name))
            p = p.replace(annotation=Annotated[p.annotation, named])
        if p.default is False and bool in (p.annotation, *typing.get_args(p.annotation)[:1]):
            return p.replace(annotation=Annotated[p.annotation, tyro.conf.FlagCreatePairsOff])
        return p

    signature = inspect.signature(function, eval_str=True)
    return signature.replace(parameters=[typed(p) for p in signature.parameters.values()])


def _one_line(complaint: str) -> str:
    """The first paragraph of tyro's framed message, unframed."""
    words: list[str] = []
    for line in complaint.splitlines()[1:]:
        text = _FRAME.sub("", line).strip()
        if not text and words:
            break
        words.append(text)
    message = " ".join(words) or "the options do not parse"
    for pattern, reword in _REWORDED:
        if (found := pattern.search(message)) is not None:
            return reword(found)
    return message


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
