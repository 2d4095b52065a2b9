"""A run as plain lines: for pipes, log files, notebooks and dumb terminals."""

import math
from collections.abc import Callable
from typing import Any, TextIO

from systolic.chips.flags import described
from systolic.report import figures, terminal
from systolic.runs.metrics import (
    EvalRecord,
    EvaluatingRecord,
    EventRecord,
    LoggedRecord,
    SampleRecord,
    StartRecord,
    TrainRecord,
    loss_of,
    seen,
)

EVERY_SECONDS = 60.0
"""Time between lines: a log of a day has 1,440."""


class Plain:
    """A watcher that prints one line at a time, at a limited rate.

    A train record is printed when it is the first or the last, when the loss is not a number, or when
    ``every_seconds`` have passed since the last line. Evaluations that take longer say so at the same pace.
    """

    def __init__(
        self, *, stream: TextIO, clock: Callable[[], float], every_seconds: float = EVERY_SECONDS
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._every_seconds = every_seconds
        self._start = StartRecord()
        self._last: float | None = None
        self._spoke = clock()
        self._was_bad = False
        self._closed = False

    def see(self, record: dict[str, Any]) -> None:
        """Prints a record, or skips it."""
        if self._closed:
            return
        if record["kind"] == "end":
            return  # The summary shows it.
        now = seen(record)
        match now:
            case StartRecord():
                self._start, due = now, True
            case EvaluatingRecord():
                due = self._clock() - self._spoke >= self._every_seconds
            case TrainRecord():
                due = self._is_due(now)
            case _:
                due = True
        line = line_of(now, self._start) if due else ""
        if line:
            self._spoke = self._clock()
            terminal.say(self._stream, line)

    def close(self) -> None:
        """Stops printing."""
        self._closed = True

    def _is_due(self, record: TrainRecord) -> bool:
        now, bad = self._clock(), is_bad(record)
        due = (
            self._last is None
            or now - self._last >= self._every_seconds
            or record.step == self._start.steps
            or (bad and not self._was_bad)
        )
        self._was_bad = bad
        if due:
            self._last = now
        return due


def is_bad(record: TrainRecord) -> bool:
    """Whether a train record's loss is NaN or infinite (``null`` where JSON has no NaN)."""
    return not math.isfinite(loss_of(record))


def line_of(record: LoggedRecord, start: StartRecord) -> str:
    """Formats a record of the session that ``start`` began as one line; ``""`` for one of a later version's kind."""
    match record:
        case StartRecord():
            return f"start   {headline(record)}"
        case TrainRecord():
            return _train_line(record, start)
        case EvalRecord():
            text = figures.metrics_text(record.metrics, start.shares)
            spent = f"{figures.seconds(record.seconds)}{part_text(record)}"
            return f"eval    step {record.step}, {record.split}: {text} ({spent})"
        case EvaluatingRecord():
            return f"eval    step {record.step}, {evaluating_text(record)}"
        case EventRecord():
            return f"event   {event_text(record)}"
        case SampleRecord():
            return f"sample  {terminal.one_line(record.text, 100)}"
    return ""


def evaluating_text(record: EvaluatingRecord) -> str:
    """Progress of an evaluation: ``validation: 12 of 32 batches``."""
    of = f" of {record.of}" if record.of else ""
    return f"{record.split}: {record.batches}{of} {_batches(record.of or record.batches)}"


def _batches(number: int) -> str:
    return "batch" if number == 1 else "batches"


def part_text(record: EvalRecord) -> str:
    """``, 32 of 187 batches`` after an evaluation of a part of its split; ``""`` after one of all."""
    batches, of = record.batches, record.of
    if batches is None or batches == of:
        return ""
    return f", {batches}{f' of {of}' if of else ''} {_batches(of or batches)}"


def headline(start: StartRecord) -> str:
    """The start record on one line: name, parameters, devices, batch, steps."""
    parts = [start.name or "run", parameters_text(start), start.devices, start.precision]
    parts += [described(start.flags)] if start.flags else []
    if start.batch:
        parts.append(f"batch {figures.count(start.batch)}")
    if start.steps:
        parts.append(f"{figures.count(start.steps)} step{'' if start.steps == 1 else 's'}")
    if start.resumed_from is not None:
        parts.append(f"resumed from step {figures.count(start.resumed_from)}")
    return terminal.one_line(" · ".join(filter(None, parts)), 200)


def parameters_text(start: StartRecord) -> str:
    """``134 M parameters``, or of adapters ``4.88 M parameters trained, of 134 M``; "" where it is unknown."""
    trained, total = start.num_parameters, start.total_parameters
    if trained is None:
        return ""
    beside = "" if total in (None, trained) else f" trained, of {figures.si(total)}"
    return f"{figures.si(trained)} parameters{beside}"


def event_text(event: EventRecord) -> str:
    """An event as ``step 100: checkpoint (1.2 s), detail``."""
    text = f"step {event.step}: {figures.label(event.name)}"
    if event.seconds:
        text += f" ({figures.seconds(event.seconds)})"
    if event.detail:
        text += f", {event.detail}"
    return terminal.one_line(text, 200)


def _train_line(record: TrainRecord, start: StartRecord) -> str:
    steps = start.steps
    place = f"{record.step:>{len(str(steps))}}/{steps}" if steps else str(record.step)
    parts = [
        f"step {place}",
        f"loss {figures.figure(record.loss)}",
        *(figures.metrics_text({name: v}, start.shares) for name, v in record.terms.items()),
        f"lr {figures.rate(record.learning_rate)}",
        figures.throughput_text(record),
    ]
    if forecast := figures.forecast_text(record):
        parts.append(f"step {figures.seconds(record.step_seconds)} (forecast {forecast})")
    if record.mfu is not None:
        parts.append(f"MFU {figures.percent(record.mfu)}")
    parts.append(f"data wait {figures.percent(record.data_wait)}")
    if record.memory_bytes is not None:
        parts.append(figures.memory(record.memory_bytes))
    if record.eta_seconds:
        parts.append(f"{figures.seconds(record.eta_seconds)} left")
    return "train   " + "  ".join(parts)
