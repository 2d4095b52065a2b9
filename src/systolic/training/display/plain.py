"""A run as plain lines: for pipes, log files, notebooks and dumb terminals."""

import math
from collections.abc import Callable
from typing import Any, TextIO

from systolic.chips.flags import described
from systolic.report import figures, terminal

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
        self._steps: int | None = None
        self._last: float | None = None
        self._spoke = clock()
        self._was_bad = False
        self._closed = False

    def see(self, record: dict[str, Any]) -> None:
        """Prints a record, or skips it."""
        if self._closed:
            return
        kind = record.get("kind")
        if kind == "start":
            self._steps = record.get("steps")
        if kind == "evaluating":
            due = self._clock() - self._spoke >= self._every_seconds
        else:
            due = kind != "train" or self._is_due(record)
        line = line_of(record, self._steps) if due else ""
        if line:
            self._spoke = self._clock()
            terminal.say(self._stream, line)

    def close(self) -> None:
        """Stops printing."""
        self._closed = True

    def _is_due(self, record: dict[str, Any]) -> bool:
        now, bad = self._clock(), is_bad(record)
        due = (
            self._last is None
            or now - self._last >= self._every_seconds
            or (record.get("step") or 0) == self._steps
            or (bad and not self._was_bad)
        )
        self._was_bad = bad
        if due:
            self._last = now
        return due


def is_bad(record: dict[str, Any]) -> bool:
    """Whether a train record's loss is NaN or infinite (``null`` where JSON has no NaN)."""
    loss = figures.number(record.get("loss"))
    return loss is None or not math.isfinite(loss)


def line_of(record: dict[str, Any], steps: int | None) -> str:
    """Formats a record as one line; ``""`` for the end, which the summary shows."""
    kind = record.get("kind")
    if kind == "start":
        return f"start   {headline(record)}"
    if kind == "train":
        return _train_line(record, steps)
    if kind == "eval":
        text = figures.metrics_text(record.get("metrics") or {})
        spent = figures.seconds(record.get("seconds"))
        part = part_text(record)
        return f"eval    step {record.get('step')}, {record.get('split')}: {text} ({spent}{part})"
    if kind == "evaluating":
        return f"eval    step {record.get('step')}, {evaluating_text(record)}"
    if kind == "event":
        return f"event   {event_text(record)}"
    if kind == "sample":
        return f"sample  {terminal.one_line(str(record.get('text') or ''), 100)}"
    return ""


def evaluating_text(record: dict[str, Any]) -> str:
    """Progress of an evaluation: ``validation: 12 of 32 batches``."""
    of = f" of {record['of']}" if record.get("of") else ""
    return f"{record.get('split')}: {record.get('batches')}{of} {_batches(record.get('of') or record.get('batches'))}"


def _batches(number: Any) -> str:
    return "batch" if number == 1 else "batches"


def part_text(record: dict[str, Any]) -> str:
    """``, 32 of 187 batches`` after an evaluation of a part of its split; ``""`` after one of all."""
    batches, of = record.get("batches"), record.get("of")
    if batches is None or batches == of:
        return ""
    return f", {batches}{f' of {of}' if of else ''} {_batches(of or batches)}"


def headline(start: dict[str, Any]) -> str:
    """The start record on one line: name, parameters, devices, batch, steps."""
    parts = [str(start.get("name") or "run")]
    if sizes := parameters_text(start):
        parts.append(sizes)
    parts += [str(start[key]) for key in ("devices", "precision") if start.get(key)]
    parts += [described(start["flags"])] if start.get("flags") else []
    if start.get("batch"):
        parts.append(f"batch {figures.count(start['batch'])}")
    if start.get("steps"):
        parts.append(f"{figures.count(start['steps'])} step{'' if start['steps'] == 1 else 's'}")
    if start.get("resumed_from") is not None:
        parts.append(f"resumed from step {figures.count(start['resumed_from'])}")
    return terminal.one_line(" · ".join(parts), 200)


def parameters_text(start: dict[str, Any]) -> str:
    """``134 M parameters``, or of adapters ``4.88 M parameters trained, of 134 M``; "" where it is unknown."""
    trained = figures.number(start.get("num_parameters"))
    if trained is None:
        return ""
    total = figures.number(start.get("total_parameters"))
    beside = "" if total in (None, trained) else f" trained, of {figures.si(total)}"
    return f"{figures.si(trained)} parameters{beside}"


def event_text(event: dict[str, Any]) -> str:
    """An event as ``step 100: checkpoint (1.2 s), detail``."""
    text = f"step {event.get('step')}: {figures.label(str(event.get('name') or 'event'))}"
    if event.get("seconds"):
        text += f" ({figures.seconds(event['seconds'])})"
    if event.get("detail"):
        text += f", {event['detail']}"
    return terminal.one_line(text, 200)


def _train_line(record: dict[str, Any], steps: int | None) -> str:
    step = str(record.get("step"))
    place = f"{step:>{len(str(steps))}}/{steps}" if steps else step
    parts = [
        f"step {place}",
        f"loss {figures.figure(record.get('loss'))}",
        *(
            f"{figures.label(name)} {figures.metric(name, v)}"
            for name, v in figures.terms(record).items()
        ),
        f"lr {figures.rate(record.get('learning_rate'))}",
        figures.throughput_text(record),
    ]
    if forecast := figures.forecast_text(record):
        parts.append(f"step {figures.seconds(record.get('step_seconds'))} (forecast {forecast})")
    if record.get("mfu") is not None:
        parts.append(f"MFU {figures.percent(record['mfu'])}")
    parts.append(f"data wait {figures.percent(record.get('data_wait'))}")
    if record.get("memory_bytes") is not None:
        parts.append(figures.memory(record["memory_bytes"]))
    if record.get("eta_seconds"):
        parts.append(f"{figures.seconds(record['eta_seconds'])} left")
    return "train   " + "  ".join(parts)
