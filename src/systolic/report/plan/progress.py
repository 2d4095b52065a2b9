"""Progress of a search on stderr: a few redrawn lines on a terminal, otherwise a line per result."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from systolic.core.units import duration
from systolic.planning.goal import days
from systolic.planning.plan import Trial, reason_of
from systolic.planning.search import SearchProgress, SearchStage
from systolic.report import figures, terminal
from systolic.report.area import LiveArea
from systolic.report.plan import readings
from systolic.report.stderr import StderrReporter

RUNNING = 4
"""Most running compiles that are named."""
BAR = 24


class SearchDisplay(LiveArea):
    """Context that shows a search; its :meth:`see` takes the progress."""

    def __init__(
        self, stream: TextIO, *, environ: Mapping[str, str] | None = None, width: int | None = None
    ) -> None:
        super().__init__(stream, environ=environ, width=width)
        self._stream = stream
        self._said = ""

    def see(self, progress: SearchProgress) -> None:
        """Shows the progress; a closed terminal does not end the search."""
        if self.drawn:
            self.draw(drawing(progress))
            return
        if progress.latest is not None:
            terminal.say(self._stream, line(progress, progress.latest))
        elif progress.stage is SearchStage.settling and stage(progress) != self._said:
            terminal.say(self._stream, f"{_place(progress)} {stage(progress)}")
        self._said = stage(progress)


class SearchReporter(StderrReporter):
    """The reporter of a search."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._display: SearchDisplay | None = None

    def begin(self, title: str) -> None:
        """Opens the display with the first piece of work."""
        super().begin(title)
        if not self._quiet and self._display is None:
            self._display = self._open[-1].enter_context(SearchDisplay(sys.stderr))

    def update(self, state: Any) -> None:
        """Shows the progress of a search."""
        if self._display is not None and isinstance(state, SearchProgress):
            self._display.see(state)


def stage(progress: SearchProgress) -> str:
    """Stage of the search as text."""
    words = {
        SearchStage.analysing: f"analysing {progress.subject}",
        SearchStage.compiling: "compiling",
        SearchStage.settling: f"full compile of {progress.subject}",
    }
    return words[progress.stage]


def line(progress: SearchProgress, one: Trial) -> str:
    """Line of a result: ``[ 3/24, 41.2 s] v5e-16 fsdp 16 remat full: 340 ms, 52.1 % MFU, …``."""
    text = f"{_place(progress)} {one.candidate.name}: {result(one)}"
    return f"{text}  <- best so far" if one is progress.best else text


def result(one: Trial) -> str:
    """Result of a candidate as text."""
    made, total = one.forecast, one.total
    if made is None or total is None:
        return terminal.one_line(reason_of(one), 160)
    parts = [readings.step(made.step_seconds or 0.0)]
    if made.mfu is not None:
        parts.append(f"{figures.percent(made.mfu)} MFU")
    parts += [readings.memory(one), days(total.seconds)]
    if total.usd is not None:
        parts.append(readings.money(total.usd))
    text = ", ".join(parts)
    return f"{text}; {one.broken}" if one.broken else text


def drawing(progress: SearchProgress) -> Group:
    """Lines to redraw."""
    head = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=max(progress.of, 1),
        completed=progress.compiled,
        width=BAR,
        complete_style="cyan",
        finished_style="green",
    )
    counted = Text(f"{progress.compiled}", style="bold")
    counted.append(f" of {progress.of} compiled", "not bold")
    head.add_row(bar, counted, Text(duration(progress.seconds), style="dim"))
    busy = list(progress.running)
    if not busy:
        rows = [_row("now", stage(progress), "dim")]
    else:
        rows = [
            _row("compiling" if not i else "", name, "dim") for i, name in enumerate(busy[:RUNNING])
        ]
        if len(busy) > RUNNING:
            rows.append(_row("", f"and {len(busy) - RUNNING} more", "dim"))
    best = progress.best
    if best is not None:
        rows.append(_row("best", best.candidate.name, "bold green"))
        rows.append(_row("", result(best), "green"))
    return Group(head, *rows)


def _place(progress: SearchProgress) -> str:
    width = len(str(progress.of))
    return f"[{progress.compiled:>{width}}/{progress.of}, {duration(progress.seconds)}]"


def _row(name: str, text: str, style: str) -> Text:
    line = Text(f"{name:<11}", style="dim", overflow="ellipsis", no_wrap=True)
    return line.append(terminal.printable(text), f"not dim {style}" if style != "dim" else "dim")
