"""Results on stdout as JSON, and the command line's reporter: progress and warnings on stderr."""

import inspect
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from systolic.core.reporter import Reporter

if TYPE_CHECKING:
    from systolic.report.progress import ProgressLine


def print_json(value: Any) -> None:
    """One JSON object on stdout; numbers that JSON has no form for become null."""
    sys.stdout.write(json.dumps(_finite(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def or_json(show: Callable[..., None]) -> Callable[..., int]:
    """Decorator for a view: adds the option ``json``, which prints the answer's ``to_json`` instead; the view returns the exit code 0."""

    def shown(answer: Any, *, json: bool = False, **options: Any) -> int:
        if json:
            print_json(answer.to_json())
        else:
            show(answer, **options)
        return 0

    signature = inspect.signature(show)
    option = inspect.signature(shown).parameters["json"]
    shown.__signature__ = signature.replace(  # ty: ignore[missing-attribute]
        parameters=[*signature.parameters.values(), option], return_annotation=int
    )
    shown.__doc__ = f"{inspect.getdoc(show)}\n\nArgs:\n    json: Print one JSON object."
    return shown


def warn(text: str) -> None:
    """One line on stderr."""
    print(f"systolic: {text}", file=sys.stderr)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class StderrReporter(Reporter):
    """A line of progress for each piece of work, and warnings.

    Pieces of work within another keep the outer line.
    """

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        self._quiet, self._json = quiet, json
        self._open: list[ExitStack] = []
        self._line: ProgressLine | None = None

    def begin(self, title: str) -> None:
        """Opens a line of progress, unless there is one."""
        stack = ExitStack()
        self._open.append(stack)
        if self._line is None and not self._quiet:
            from systolic.report.progress import ProgressLine

            stack.callback(self._clear)
            self._line = stack.enter_context(ProgressLine(sys.stderr, title))

    def end(self) -> None:
        """Closes what the piece of work opened."""
        self._open.pop().close()

    def stage(self, text: str) -> None:
        """Shows it on the line of progress."""
        if self._line is not None:
            self._line.say(text)

    def update(self, state: Any) -> None:
        """Shown by the reporters of verbs that have such a state."""

    def warn(self, text: str) -> None:
        """Prints it, above the line of progress."""
        if self._line is not None:
            self._line.told(f"systolic: {text}", sys.stderr, "")
        else:
            print(f"systolic: {text}", file=sys.stderr)

    def _closing(self, shown: Any) -> ExitStack:
        """A stack that closes what it is given."""
        stack = ExitStack()
        stack.callback(shown.close)
        return stack

    def _clear(self) -> None:
        self._line = None
