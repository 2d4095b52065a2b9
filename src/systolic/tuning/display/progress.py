"""Progress of a search on stderr: redrawn on a terminal, otherwise a line for each ended trial."""

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, TextIO

from rich.console import Group
from rich.text import Text

from systolic.core.units import duration, plural
from systolic.report import progress, terminal
from systolic.report.output import StderrReporter
from systolic.report.progress import LiveArea
from systolic.tuning.display import view
from systolic.tuning.results import StudyResult, TrialRow

RUNNING = 6
"""Most running trials that are listed."""
NAMES = 9
"""Columns of the names of rows."""


class StudyDisplay(LiveArea):
    """Context that shows a search; :meth:`see` takes its results so far.

    Args:
        stream: Stream to draw on.
        environ: Environment variables that describe the stream; this process's by default.
        width: Columns; the terminal's by default.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(stream, environ=environ, width=width)
        self._stream, self._began = stream, time.monotonic()
        self._told: set[int] | None = None
        self._before = 0

    def see(self, study: StudyResult) -> None:
        """Shows the study; a closed terminal does not end the search."""
        ended = {row.number: row for row in study.rows if row.state not in ("running", "waiting")}
        if self._told is None:
            self._told, self._before = set(ended), len(ended)
            if ended:
                terminal.say(self._stream, f"{study.name} continues: {view.counted(study)}")
        seconds = time.monotonic() - self._began
        spent = times(study, seconds, len(ended) - self._before)
        if self.drawn:
            self.draw(drawing(study, spent))
            return
        for number in sorted(set(ended) - self._told):
            terminal.say(self._stream, line(study, ended[number], spent))
        self._told |= set(ended)

    def begin(self, what: str) -> None:
        """Switches to another study."""
        self._told, self._began = None, time.monotonic()
        if not self.drawn:
            terminal.say(self._stream, what)


class StudyReporter(StderrReporter):
    """The reporter of a search: its trials, and those of its repeats."""

    def __init__(self, *, quiet: bool = False, json: bool = False) -> None:
        super().__init__(quiet=quiet, json=json)
        self._display: StudyDisplay | None = None

    def begin(self, title: str) -> None:
        """Opens the display with the search; the repeats are drawn in the same one."""
        if self._quiet:
            super().begin(title)
        elif self._display is None:
            self._display = StudyDisplay(sys.stderr)
            self._open.append(self._closing(self._display))
        else:
            self._display.begin(title)
            self._open.append(ExitStack())

    def update(self, state: Any) -> None:
        """Shows the results so far."""
        if self._display is not None and isinstance(state, StudyResult):
            self._display.see(state)


def times(study: StudyResult, seconds: float, ended: int) -> str:
    """Time since the start, and the time left at the rate of trials ended since: ``3 m 05 s, about 14 m left before the repeats``."""
    left = study.total - study.finished
    if not ended or left < 1:
        return duration(seconds)
    before = " before the repeats" if study.has_repeats else ""
    return f"{duration(seconds)}, about {duration(seconds / ended * left)} left{before}"


def line(study: StudyResult, row: TrialRow, spent: str) -> str:
    """Line of an ended trial: ``[ 7/40] trial 6: accuracy 98.6 %; optimizer.learning-rate 0.003; 3 m 05 s``."""
    width = len(str(study.total))
    text = view.objectives(study, row) if row.is_done else row.reason or row.state
    is_best = study.first_seed is None and row is study.best
    best = "  <- best so far" if is_best else ""
    place = f"[{study.finished:>{width}}/{study.total}]"
    parts = [
        f"{place} {study.title(row)}: {terminal.one_line(text, 160)}",
        view.settings_of(row),
        spent,
    ]
    return f"{'; '.join(filter(None, parts))}{best}"


def drawing(study: StudyResult, spent: str) -> Group:
    """Lines to redraw."""
    counted = Text(f"{study.finished}", style="bold")
    counted.append(f" of {plural(study.total, 'trial')}", "not bold")
    head = progress.bar(study.finished, study.total, counted, Text(spent, style="dim"))
    rows = [_row("", view.counted(study), "dim")]
    running = [row for row in study.rows if row.state == "running"]
    for place, row in enumerate(running[:RUNNING]):
        name = study.aims[0].name
        at = (
            f" (step {row.step}: {view.figure(study, name, row.figures.get(name))})"
            if row.step
            else ""
        )
        text = ": ".join(filter(None, (study.title(row), view.settings_of(row)))) + at
        rows.append(_row("" if place else "running", text, "dim"))
    best = study.best
    # The best of repeats is only the luckiest seed.
    if best is not None and study.first_seed is None:
        rows.append(_row("best", view.objectives(study, best), "bold green"))
        rows.append(_row("", view.settings_of(best), "green"))
    return Group(head, *rows)


def _row(name: str, text: str, style: str) -> Text:
    return progress.row(name, text, style, columns=NAMES)
