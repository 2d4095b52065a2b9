"""Terminals: whether they can be redrawn, screens in colour or plain, sparklines, and text that is safe to print."""

import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
BAD = "×"
"""Column of a sparkline with a value that is not a number."""

MIN_CUT = 20
"""Columns from which a sparkline cuts its highest tenth."""

MIN_WIDTH = 60
"""Columns below which plain lines replace the live view."""

_NOTEBOOKS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
"""Notebook services whose cells show a terminal's output without moving the cursor back."""


class BoundedCurve:
    """A curve of bounded size: when it is full, neighbours are averaged and the stride doubles."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._stride = 1
        self._pending: list[float] = []
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Adds a value, in constant time on average."""
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.values.append(mean(self._pending))
        self._pending = []
        if len(self.values) >= self._capacity:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values = [mean(pair) for pair in pairs]
            self._stride *= 2


def mean(values: Iterable[float]) -> float:
    """The mean; NaN if any value is."""
    values = list(values)
    return sum(values) / len(values)


def sparkline(values: Iterable[float], width: int) -> str:
    """Values as one row of at most ``width`` blocks; NaN and infinity as ``×``.

    The highest tenth of a longer row is cut to one height, so that the start of a loss curve does
    not flatten the rest of it.
    """
    values = list(values)
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [v for v in means if math.isfinite(v)]
    finite.sort()
    highest = len(finite) * 9 // 10 if len(finite) >= MIN_CUT else -1
    low, high = (finite[0], finite[highest]) if finite else (0.0, 0.0)
    span = high - low
    top = len(BLOCKS) - 1

    def block(value: float) -> str:
        if not math.isfinite(value):
            return BAD
        return BLOCKS[round(min((value - low) / span, 1.0) * top) if span > 0 else 0]

    return "".join(map(block, means))


def can_redraw(stream: TextIO, environ: Mapping[str, str], width: int) -> bool:
    """Whether a stream is a terminal that can be redrawn in place, wide enough for the live view."""
    try:
        if not stream.isatty():
            return False
    except ValueError:
        return False
    if environ.get("TERM", "") in ("dumb", "unknown") or any(k in environ for k in _NOTEBOOKS):
        return False
    utf = (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    return utf and width >= MIN_WIDTH


def printable(text: str) -> str:
    """Text with control characters (escape sequences among them) replaced; newlines stay, tabs are spaces."""
    return "".join(c if c == "\n" or c.isprintable() else " " if c == "\t" else "·" for c in text)


def one_line(text: str, width: int = 120) -> str:
    """Text on one line of at most ``width`` characters, printable."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def say(stream: TextIO, line: str) -> None:
    """Writes one line in the stream's encoding; a closed stream is ignored, it must not end a run."""
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):
        return


def print_lines(
    lines: "Callable[[int], Sequence[Text]]",
    most: int,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    width: int | None = None,
    usual: int = 80,
) -> None:
    """Prints a screen.

    Args:
        lines: The screen by its number of columns.
        most: Columns of the widest screen.
        stream: Where to print; by default stdout.
        environ: Variables that describe the terminal; by default those of this process.
        width: Columns of the terminal; by default measured.
        usual: Columns where there is no terminal to measure.
    """
    stream = sys.stdout if stream is None else stream
    columns = width or shutil.get_terminal_size((usual, 24)).columns
    shown = lines(min(columns, most))
    if can_redraw(stream, os.environ if environ is None else environ, columns):
        from rich.console import Console

        console = Console(file=stream, force_terminal=True, width=columns, highlight=False)
        for line in shown:
            console.print(line, soft_wrap=True)
        return
    for line in plain(shown):
        say(stream, line)


def plain(shown: "Sequence[Text]") -> list[str]:
    """Lines without colour."""
    return [line.plain.rstrip() for line in shown]
