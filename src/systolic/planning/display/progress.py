"""Progress of a search on stderr: a few redrawn lines on a terminal, otherwise a line per result."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from systolic.core.units import duration
from systolic.planning.display import readings
from systolic.planning.goal import days
from systolic.planning.plan import Trial, reason_of
from systolic.planning.search import SearchProgress, SearchStage
from systolic.report import figures, progress, terminal
from systolic.report.output import StderrReporter
from systolic.report.progress import LiveArea

RUNNING = 4
"""Most running compiles that are named."""
NAMES = 11
"""Columns of the names of rows."""


class SearchDisplay(LiveArea):
    """Context that shows a search; its :meth:`see` takes its progress."""

    def __init__(
        self, stream: TextIO, *, environ: Mapping[str, str] | None = None, width: int | None = None
    ) -> None:
        super().__init__(stream, environ=environ, width=width)
        self._stream = stream
        self._said = ""

    def see(self, search: SearchProgress) -> None:
        """Shows the progress; a closed terminal does not end the search."""
        if self.drawn:
            self.draw(drawing(search))
            return
        if search.latest is not None:
            terminal.say(self._stream, line(search, search.latest))
        elif search.stage is SearchStage.settling and stage(search) != self._said:
            terminal.say(self._stream, f"{_place(search)} {stage(search)}")
        self._said = stage(search)


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


def stage(search: SearchProgress) -> str:
    """Stage of the search as text."""
    words = {
        SearchStage.analysing: f"analysing {search.subject}",
        SearchStage.compiling: "compiling",
        SearchStage.settling: f"full compile of {search.subject}",
    }
    return words[search.stage]


def line(search: SearchProgress, trial: Trial) -> str:
    """Line of a result: ``[ 3/24, 41.2 s] v5e-16 fsdp 16 remat full: 340 ms, 52.1 % MFU, …``."""
    text = f"{_place(search)} {trial.candidate.name}: {result(trial)}"
    return f"{text}  <- best so far" if trial is search.best else text


def result(trial: Trial) -> str:
    """Result of a candidate as text."""
    forecast, total = trial.forecast, trial.total
    if forecast is None or total is None:
        return terminal.one_line(reason_of(trial), 160)
    parts = [readings.step(forecast.step_seconds or 0.0)]
    if forecast.mfu is not None:
        parts.append(f"{figures.percent(forecast.mfu)} MFU")
    parts += [readings.memory(trial), days(total.seconds)]
    if total.usd is not None:
        parts.append(readings.money(total.usd))
    text = ", ".join(parts)
    return f"{text}; {trial.broken}" if trial.broken else text


def drawing(search: SearchProgress) -> Group:
    """Lines to redraw."""
    counted = Text(f"{search.compiled}", style="bold")
    counted.append(f" of {search.of} compiled", "not bold")
    spent = Text(duration(search.seconds), style="dim")
    busy = list(search.running)
    if not busy:
        rows = [_row("now", stage(search), "dim")]
    else:
        rows = [
            _row("compiling" if not i else "", name, "dim") for i, name in enumerate(busy[:RUNNING])
        ]
        if len(busy) > RUNNING:
            rows.append(_row("", f"and {len(busy) - RUNNING} more", "dim"))
    best = search.best
    if best is not None:
        rows.append(_row("best", best.candidate.name, "bold green"))
        rows.append(_row("", result(best), "green"))
    return Group(progress.bar(search.compiled, search.of, counted, spent), *rows)


def _place(search: SearchProgress) -> str:
    width = len(str(search.of))
    return f"[{search.compiled:>{width}}/{search.of}, {duration(search.seconds)}]"


def _row(name: str, text: str, style: str) -> Text:
    return progress.row(name, text, style, columns=NAMES)
