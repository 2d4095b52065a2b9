"""From a typed function to its command line options, with errors of one line.

tyro turns signatures and dataclasses into options. It reports mistakes as boxes of several lines;
here they become one :class:`OptionError` that names the nearest option.
"""

import contextlib
import inspect
import io
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import tyro

from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import check_arguments

T = TypeVar("T")

CONFIG = (tyro.conf.AvoidSubcommands, tyro.conf.EnumChoicesFromValues)
"""One flat set of options a verb; enums by value."""

_LISTED = re.compile(r"^[│ ] ((?:-\w, )?--[a-z].*?)(?:  | │|$)", re.MULTILINE)
"""The options at the beginning of a line of the help; what stands behind them is prose."""
_OPTION = re.compile(r"--[a-z][\w.-]*\w")
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
        re.compile(r"Missing from (systolic .*?): (.*)"),
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
"""What tyro says, in the words of the other errors."""
_FRAME = re.compile(r"[│╭╮╰╯─]+|-{4,}")


def parse(function: Callable[..., T], args: Sequence[str], prog: str) -> T:
    """Calls ``function`` with its parameters read from ``args``; raises as :func:`arguments`."""
    return function(**arguments(function, args, prog))


def arguments(function: Callable[..., Any], args: Sequence[str], prog: str) -> dict[str, Any]:
    """The parameters of ``function`` by name, read from ``args``.

    Raises:
        OptionError: an unknown option (with the nearest known one), or a value that does not parse or
            is outside the :class:`~systolic.core.ranges.Range` of its parameter.
        SystemExit: after ``--help`` was printed.
    """
    captured: dict[str, Any] = {}

    def capture(*positional: Any, **named: Any) -> None:
        captured.update(signature.bind(*positional, **named).arguments)

    signature = _signature(function)
    capture.__signature__ = signature  # ty: ignore[missing-attribute]
    capture.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    capture.__doc__ = function.__doc__
    if "-h" in args or "--help" in args:
        tyro.cli(capture, args=["--help"], prog=prog, config=CONFIG)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            _, unknown = tyro.cli(
                capture, args=list(args), prog=prog, config=CONFIG, return_unknown_args=True
            )
    except SystemExit as stop:
        raise OptionError(f"{_one_line(complaint.getvalue())}; see {prog} --help") from stop
    if unknown:
        option = unknown[0].split("=")[0]
        kind = "option" if option.startswith("-") else "argument"
        raise OptionError(
            f"{prog} has no {kind} {option}{nearest(option, _options(capture))}; see {prog} --help"
        )
    check_arguments(function, captured, lambda name: f"--{name.replace('_', '-')}")
    return captured


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters as tyro is to see them.

    A verb's own switch is a plain ``--json``. A boolean that is on unless told otherwise, or part of a
    model, is a pair ``--model.qk-norm, --model.no-qk-norm``, of which the help describes the first.
    """
    signature = inspect.signature(function, eval_str=True)
    switched = [
        p.replace(annotation=Annotated[bool, tyro.conf.FlagCreatePairsOff])
        if p.annotation is bool and p.default is False
        else p
        for p in signature.parameters.values()
    ]
    return signature.replace(parameters=switched)


def _options(function: Callable[..., Any]) -> list[str]:
    """The options that the help text names; tyro has no lasting way to ask for them."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(function, args=["--help"], config=CONFIG)
    listed = " ".join(_LISTED.findall(text.getvalue()))
    return sorted(set(_OPTION.findall(listed)))


def _one_line(complaint: str) -> str:
    """The first paragraph of tyro's framed message, unframed."""
    words: list[str] = []
    for line in complaint.splitlines()[1:]:
        text = _FRAME.sub("", line).strip()
        if not text and words:
            break
        words.append(text)
    told = " ".join(words) or "the options do not parse"
    for pattern, reword in _REWORDED:
        if (found := pattern.search(told)) is not None:
            return reword(found)
    return told


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
