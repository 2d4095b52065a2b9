"""Progress of commands on stderr: all that is redrawn in place, and its lines where nothing can be.

- :class:`LiveArea`: the last lines of a terminal, redrawn by rich: a :func:`bar` of rich.progress and
  a :func:`row` for each thing below it, or the panel of a run.
- :class:`ProgressLine`: a single line that ticks, for a job of unknown length. It writes ``\\r`` itself:
  rich's display hides the cursor, which a command that is killed would not bring back, and is
  imported only where something is drawn.

What a job says where nothing can be redrawn is its own: lines of results, or of stages.
"""

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from systolic.core.units import duration
from systolic.report import terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

BAR = 24
"""Columns of a bar."""
TICK_SECONDS = 0.2
HEARTBEAT_SECONDS = 60.0
"""Seconds between lines of one stage where a line can't be redrawn."""
COUNT = re.compile(r"\d[\d.,]*")
"""A number in a stage's text, which changes while the stage goes on."""


class LiveArea:
    """A context manager that redraws the last lines of a terminal; elsewhere it draws nothing.

    A closed terminal does not end the work.

    Args:
        stream: Where to.
        environ: Of the terminal; by default the process's.
        width: Columns; by default the terminal's.
        drawn: Whether the stream can be redrawn; by default found out.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
        drawn: bool | None = None,
    ) -> None:
        if drawn is None:
            environ = os.environ if environ is None else environ
            columns = width or shutil.get_terminal_size((100, 24)).columns
            drawn = terminal.can_redraw(stream, environ, columns)
        self.drawn = drawn
        """Whether the stream can be redrawn."""
        self._stream, self._width = stream, width
        self._live: Live | None = None
        self._is_closed = not drawn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def width(self) -> int:
        """Columns of the terminal now."""
        return self._width or shutil.get_terminal_size((100, 24)).columns

    @property
    def is_begun(self) -> bool:
        """Whether anything was drawn."""
        return self._live is not None

    def draw(self, lines: "RenderableType", log: "Sequence[Text]" = ()) -> None:
        """Shows ``lines`` in place of those before, and prints ``log`` above them, where it stays."""
        if self._is_closed:
            return
        try:
            live = self._begun(lines)
            live.update(lines, refresh=not log)
            if log:  # a print draws the area again below it: one print for all of them
                from rich.console import Group

                live.console.print(Group(*log))
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        """Removes the lines; nothing is drawn after it."""
        self._is_closed = True
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def _begun(self, lines: "RenderableType") -> "Live":
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            is_stderr = self._stream is sys.stderr
            console = Console(
                file=self._stream, force_terminal=True, width=self._width, highlight=False
            )
            self._live = Live(
                lines,
                console=console,
                auto_refresh=False,
                transient=True,
                # Only where both share the terminal: a print must not break the area, and what
                # is piped away must stay in the pipe.
                redirect_stdout=is_stderr and sys.stdout.isatty(),
                redirect_stderr=is_stderr,
            )
            self._live.start()
        return self._live


def bar(completed: float, total: float, *words: "Text", columns: int = BAR) -> "Table":
    """A bar with texts beside it.

    Args:
        completed: Of ``total``.
        total: The whole; a bar of nothing is empty.
        *words: Texts, a column each.
        columns: Width of the bar.
    """
    from rich.progress import BarColumn, Progress
    from rich.table import Column, Table

    painted = BarColumn(columns, complete_style="cyan", finished_style="green")
    bars = Progress(painted, auto_refresh=False)
    bars.add_task("", total=max(total, 1), completed=int(completed))
    line = Table.grid(*(Column(no_wrap=True) for _ in (bars, *words)), padding=(0, 2))
    line.add_row(bars.get_renderable(), *words)
    return line


def row(name: str, text: str, style: str, *, columns: int) -> "Text":
    """A row: a dim name of ``columns``, then a text in a style, on one line."""
    from rich.text import Text

    line = Text(f"{name:<{columns}}", style="dim", overflow="ellipsis", no_wrap=True)
    return line.append(terminal.printable(text), f"not dim {style}" if style != "dim" else "dim")


class ProgressLine:
    """A context manager; :meth:`say` shows a stage.

    Args:
        stream: Where lines go.
        title: What every line begins with.
        environ: Environment variables that say what the terminal can do.
        clock: Seconds of a clock.
        quiet_seconds: Seconds before anything is shown.
        beat_seconds: Seconds between lines of one stage where a line can't be redrawn.
    """

    def __init__(
        self,
        stream: TextIO,
        title: str,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet_seconds: float = 0.0,
        beat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._stream, self._title, self._clock = stream, title, clock
        self._quiet_seconds, self._beat_seconds = quiet_seconds, beat_seconds
        self._live = terminal.can_redraw(
            stream, os.environ if environ is None else environ, terminal.MIN_WIDTH
        )
        self._began = clock()
        self._logged = ("", self._began)
        self._stage = ""
        self._over = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._ticker is not None:
            self._ticker.join()
            if self._live and self._shows:
                self._write("\r\x1b[K")

    def say(self, stage: str) -> None:
        """Shows the present stage."""
        if not stage or stage == self._stage:
            return
        self._stage = stage
        if not self._live and self._shows:
            self._log()
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def _log(self) -> None:
        """In a log a stage that counts has a line when it begins, and one a minute."""
        words, now = COUNT.sub("", self._stage), self._clock()
        if words != self._logged[0] or now - self._logged[1] >= self._beat_seconds:
            self._logged = (words, now)
            terminal.say(self._stream, self._line(now))

    @property
    def _shows(self) -> bool:
        quiet = self._quiet_seconds
        return not quiet or self._clock() - self._began >= quiet

    def told(self, text: str, stream: TextIO, stage: str) -> None:
        """Prints a line that stays, on any stream, above the ticking line; then shows ``stage``.

        Without a ticking line the stage is not shown: the printed lines are progress enough.
        """
        if self._live:
            self._write("\r\x1b[K")
        print(text, file=stream, flush=True)
        if self._live:
            self.say(stage)

    def _tick(self) -> None:
        if self._quiet_seconds:
            self._over.wait(max(0.0, self._quiet_seconds - (self._clock() - self._began)))
        while not self._over.is_set() and self._live:
            self._write(f"\r\x1b[K{self._cut(self._line())}")
            self._over.wait(TICK_SECONDS)
        if self._quiet_seconds and not self._over.is_set():
            terminal.say(self._stream, self._line())
        while not self._over.wait(self._beat_seconds):
            terminal.say(self._stream, self._line())

    @staticmethod
    def _cut(line: str) -> str:
        """A line that wraps could not be removed."""
        return terminal.one_line(line, shutil.get_terminal_size((100, 24)).columns - 1)

    def _line(self, now: float | None = None) -> str:
        now = self._clock() if now is None else now
        return f"{self._title}: {self._stage}, {duration(now - self._began)}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._over.set()
