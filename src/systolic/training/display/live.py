"""The view of a run in the terminal while it trains, on stderr: a panel redrawn in place with the log of events above it, or plain lines where the terminal can't."""

import atexit
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from systolic.core.units import plural
from systolic.report import figures, terminal
from systolic.report.progress import LiveArea, bar
from systolic.report.terminal import BoundedCurve, sparkline
from systolic.runs.metrics import (
    EvalRecord,
    EvaluatingRecord,
    EventRecord,
    LoggedRecord,
    StartRecord,
    TrainRecord,
    seen,
)
from systolic.training.display import plain
from systolic.training.display.plain import Plain

MAX_LINES = 40
"""Log lines kept between two drawings; more are counted instead of printed."""
MAX_WIDTH = 110
"""Columns of the panel on a wide terminal."""
_CURVES = ("loss", "learning_rate", "throughput", "grad_norm")
_ALARMS = frozenset(
    {"bad_step", "skip", "stop", "interrupt", "recompile", "data", "schedule", "skipped_file"}
)


class Live:
    """A watcher that draws the run on a terminal, or prints plain lines where it cannot draw.

    ``see`` only notes the record (microseconds); a thread redraws every ``redraw_seconds``.
    Lines appear when ``stream`` is no terminal, TERM is dumb, it is narrower than 60 columns or
    not Unicode, and in notebooks that don't move the cursor.
    """

    _view: "Screen | Plain"

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        width: int | None = None,
        redraw_seconds: float = 0.25,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        environ = os.environ if environ is None else environ
        columns = shutil.get_terminal_size().columns if width is None else width
        self._ticker: _Ticker | None = None
        self._closed = False
        if terminal.can_redraw(stream, environ, columns):
            self._view = Screen(stream=stream, clock=clock, width=width)
            self._ticker = _Ticker(self._view, redraw_seconds)
        else:
            self._view = Plain(stream=stream, clock=clock)

    def see(self, record: dict[str, Any]) -> None:
        """Notes a record; ignored after ``close``."""
        if self._closed:
            return
        self._view.see(record)
        if self._ticker is not None:
            self._ticker.start()

    def close(self) -> None:
        """Prints the remaining lines, restores the terminal and stops the timer; may be called twice."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.stop()
        self._view.close()


class _Ticker:
    """Calls ``screen.draw`` from its own thread, from the first record until stopped."""

    def __init__(self, screen: "Screen", seconds: float) -> None:
        self._screen = screen
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._loop, name="systolic-live", daemon=True)
        self._thread.start()
        # A run that dies without close() must not leave the terminal without a cursor.
        atexit.register(self._screen.close)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self._screen.close)

    def _loop(self) -> None:
        self._screen.draw()
        idle = 0
        while not self._stop.wait(self._seconds):
            idle += 1
            # Without a new record only the clocks on the screen change: once a second is enough.
            if self._screen.has_news or idle * self._seconds >= 1:
                self._screen.draw()
                idle = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Content of one drawing; more records may arrive while it is drawn."""

    start: StartRecord
    latest: TrainRecord | None
    latest_at: float
    began: float
    evaluation: EvalRecord | None
    evaluating: EvaluatingRecord | None
    """The evaluation in progress."""
    curves: dict[str, list[float]]


class Screen:
    """Records in, drawings out. ``see`` is cheap; ``draw`` does the work and may run in another thread."""

    def __init__(
        self, *, stream: TextIO, clock: Callable[[], float], width: int | None = None
    ) -> None:
        self._area = LiveArea(stream, width=width, drawn=True)
        self._clock = clock
        self._noting = threading.Lock()
        self._drawing = threading.Lock()
        self._start = StartRecord()
        self._latest: TrainRecord | None = None
        self._latest_at = self._began = clock()
        self._eval: EvalRecord | None = None
        self._evaluating: EvaluatingRecord | None = None
        self._curves = {name: BoundedCurve() for name in _CURVES}
        self._lines: list[Text] = []
        self._unsaid = 0
        self.has_news = False
        """Whether a record came since the last drawing."""

    def see(self, record: dict[str, Any]) -> None:
        """Notes a record for the next drawing; never waits for one."""
        with self._noting:
            self.has_news = True
            self._evaluating = None
            if record["kind"] == "end":
                return  # The summary shows it.
            now = seen(record)
            match now:
                case EvaluatingRecord():
                    self._evaluating = now
                    return
                case TrainRecord():
                    self._note_train(now)
                    return
                case StartRecord():
                    self._start = now
                    self._began = self._clock()
                case EvalRecord():
                    self._eval = now
            line = plain.line_of(now, self._start)
            if line and len(self._lines) < MAX_LINES:
                self._lines.append(Text(line, _style(now), overflow="ellipsis", no_wrap=True))
            elif line:
                self._unsaid += 1

    def panel(self) -> Panel:
        """The panel at this moment."""
        with self._noting:
            frame = Frame(
                start=self._start,
                latest=self._latest,
                latest_at=self._latest_at,
                began=self._began,
                evaluation=self._eval,
                evaluating=self._evaluating,
                curves={name: list(curve.values) for name, curve in self._curves.items()},
            )
            self.has_news = False
        return panel(frame, self._clock(), self._area.width)

    def take_lines(self) -> list[Text]:
        """Returns the new lines of the log, once; the last counts those without room."""
        with self._noting:
            lines, self._lines = self._lines, []
            unsaid, self._unsaid = self._unsaid, 0
        more = [Text(f"        and {plural(unsaid, 'more line')}", style="dim")] if unsaid else []
        return lines + more

    def draw(self) -> None:
        """Prints the new lines of the log and redraws the panel."""
        with self._drawing:
            self._area.draw(self.panel(), self.take_lines())

    def close(self) -> None:
        """Prints the rest of the log and removes the panel; the final summary follows on stdout."""
        with self._drawing:
            lines = self.take_lines()
            if self._area.is_begun or lines:
                self._area.draw(Text(""), lines)
            self._area.close()

    def _note_train(self, record: TrainRecord) -> None:
        self._latest = record
        self._latest_at = self._clock()
        throughput = figures.throughput(record)
        values = {
            "loss": math.nan if plain.is_bad(record) else record.loss,
            "learning_rate": record.learning_rate,
            "throughput": None if throughput is None else throughput[0],
            "grad_norm": record.grad_norm,
        }
        for name, value in values.items():
            if value is not None:
                self._curves[name].add(value)


def panel(frame: Frame, now: float, width: int) -> Panel:
    """The drawing of a frame at a time (of the screen's clock, seconds) for a width in columns."""
    width = min(width, MAX_WIDTH)
    name = frame.start.name or "run"
    rest = plain.headline(frame.start).removeprefix(name).removeprefix(" · ")
    parts: list[RenderableType] = [Text(rest, style="dim", overflow="ellipsis", no_wrap=True)]
    if frame.latest is not None:
        parts += [
            _readings(frame.latest, frame.curves, width),
            _facts(frame.latest, frame.start.shares),
        ]
    else:
        waiting = figures.seconds(now - frame.began)
        parts.append(Text(f"getting ready: data, weights, compile … {waiting}", style="yellow"))
    if frame.evaluating is not None:
        text = f"evaluating {plain.evaluating_text(frame.evaluating)}"
        parts.append(Text(text, style="yellow", overflow="ellipsis", no_wrap=True))
    elif frame.evaluation is not None:
        parts.append(_evaluation(frame.evaluation, frame.start.shares))
    parts.append(_progress(frame, now, width))
    return Panel(
        Group(*parts),
        title=Text(name, style="bold cyan"),
        title_align="left",
        border_style="dim",
        box=box.ROUNDED,
        width=width,
    )


def _readings(latest: TrainRecord, curves: Mapping[str, list[float]], width: int) -> Table:
    rows = [
        (
            "loss",
            figures.figure(latest.loss),
            "bold red" if plain.is_bad(latest) else "bold",
        ),
        ("learning_rate", figures.rate(latest.learning_rate), ""),
        ("throughput", figures.throughput_text(latest), ""),
        ("grad_norm", figures.figure(latest.grad_norm), ""),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, style="cyan")
    for key, text, style in rows:
        if text != figures.MISSING:
            line = sparkline(curves[key], width - 44)
            table.add_row(figures.label(key), Text(text, style=style), line)
    return table


def _facts(latest: TrainRecord, shares: Collection[str]) -> Text:
    wait = latest.data_wait or 0.0
    text = Text(overflow="ellipsis", no_wrap=True)
    facts = [
        ("step", figures.seconds(latest.step_seconds), ""),
        ("forecast", figures.forecast_text(latest) or figures.MISSING, ""),
        ("MFU", figures.percent(latest.mfu), ""),
        ("data wait", figures.percent(latest.data_wait), _heat(wait)),
        ("memory", figures.memory(latest.memory_bytes), ""),
        *((figures.label(n), figures.metric(n, v, shares), "") for n, v in latest.terms.items()),
    ]
    for name, value, style in facts:
        if value != figures.MISSING:
            text.append("   " if text.plain else "").append(f"{name} ", style="dim")
            text.append(value, style=style)
    return text


def _evaluation(record: EvalRecord, shares: Collection[str]) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append(f"{record.split} at step {figures.count(record.step)}  ", style="dim")
    return text.append(figures.metrics_text(record.metrics, shares), style="green")


def _progress(frame: Frame, now: float, width: int) -> Table:
    steps, latest = frame.start.steps, frame.latest
    step = latest.step if latest is not None else frame.start.resumed_from or 0
    words = Text(figures.count(step), style="bold")
    words.append(f"/{figures.count(steps)}", style="dim")
    if latest is not None and latest.eta_seconds is not None:
        left = figures.seconds(latest.eta_seconds - (now - frame.latest_at))
        words.append(f"  {left} left", style="cyan")
    words.append(f"  {figures.seconds(now - frame.began)} so far", style="dim")
    return bar(step, steps or 1, words, columns=max(10, width - 8 - len(words.plain)))


def _style(record: LoggedRecord) -> str:
    if isinstance(record, EventRecord):
        return "yellow" if record.name in _ALARMS else "dim"
    return "green" if isinstance(record, EvalRecord) else ""


def _heat(share: float) -> str:
    return "bold red" if share > 0.3 else "yellow" if share > 0.1 else ""
