"""A step as Chrome trace JSON, which Perfetto and chrome://tracing open: a thread a lane, loops unrolled up to a cap.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import plural
from systolic.forecasting import Forecast
from systolic.forecasting.costs import place_of
from systolic.forecasting.display import readings
from systolic.sim.timeline import Resource, Span, Timeline

CAP = 20_000
"""Events in a trace; loops are cut above it, and the trace says so."""
MICROSECONDS = 1e6
LANES = {
    "core": "TensorCore",
    "dma": "copies between memories",
    "ici": "links between chips",
    "dcn": "network between slices",
    "host": "host transfers",
}
"""Lanes in the order they are shown, in words."""


TINY = 1e-12
"""Tolerance in seconds for rounding of event times."""


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """An op, or an op that holds others, at its place in the step; in seconds."""

    span: Span
    start: float
    seconds: float
    """For a loop, of all iterations."""
    iterations: int = 0
    """Unrolled iterations of a loop; 0 for an op."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unrolled:
    """Events in order of their starts, and the number left out."""

    events: Sequence[LaneEvent]
    total: int
    """Events of the whole step."""
    iterations: int | None
    """Unrolled iterations of each loop; None for all."""

    @property
    def note(self) -> str:
        """Note on what was left out."""
        if self.iterations is None:
            return f"all {plural(self.total, 'event')} of the step"
        first = "iteration" if self.iterations == 1 else f"{self.iterations} iterations"
        return (
            f"{len(self.events):,} of {plural(self.total, 'event')}: of each loop the first {first}"
        )


def unroll(timeline: Timeline, cap: int) -> Unrolled:
    """The events of a step, at most about ``cap``: loops lose their last iterations."""
    total = _count(timeline.spans, None)
    most = None
    if total > cap:
        low, high = 1, max(_repeats(timeline.spans), default=1)
        while low < high:
            middle = (low + high + 1) // 2
            if _count(timeline.spans, middle) <= cap:
                low = middle
            else:
                high = middle - 1
        most = low
    events = sorted(_events(timeline.spans, 0.0, most), key=lambda e: (e.start, -e.seconds))
    return Unrolled(events=events, total=total, iterations=most)


def tracks(events: Sequence[LaneEvent]) -> list[tuple[str, list[LaneEvent]]]:
    """Events by lane; transfers of one lane that overlap (on several axes) are on tracks of their own."""
    by_lane: dict[str, list[list[LaneEvent]]] = {lane: [] for lane in LANES}
    for event in events:
        rows = by_lane.setdefault(event.span.lane, [])
        free = (row for row in rows if row[-1].start + row[-1].seconds <= event.start + TINY)
        row = rows[0] if rows and event.span.lane == "core" else next(free, None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return [(lane, row) for lane, rows in by_lane.items() for row in rows]


def busy(span: Span) -> Resource:
    """Resource that takes most of a span or loop."""
    if not span.inside:
        return span.resource
    spent: dict[Resource, float] = {}
    for inner in span.inside:
        if inner.lane == "core":
            kind = busy(inner)
            spent[kind] = spent.get(kind, 0.0) + inner.seconds
    return max(spent, key=lambda kind: spent[kind], default=Resource.idle)


def _taken(span: Span, most: int | None) -> int:
    """Whole iterations to show; the fraction of a mean has none of its own."""
    whole = int(span.repeat)
    return whole if most is None else min(whole, most)


def _count(spans: Sequence[Span], most: int | None) -> int:
    return sum(
        1 + (_taken(span, most) * _count(span.inside, most) if span.inside else 0)
        for span in spans
        if span.seconds > 0
    )


def _repeats(spans: Sequence[Span]) -> Iterator[int]:
    for span in spans:
        if span.inside:
            yield int(span.repeat)
            yield from _repeats(span.inside)


def _events(spans: Sequence[Span], origin: float, most: int | None) -> Iterator[LaneEvent]:
    for span in spans:
        if span.seconds <= 0:
            continue
        start = origin + span.start
        if not span.inside:
            yield LaneEvent(span, start, span.seconds)
            continue
        taken = _taken(span, most)
        yield LaneEvent(span, start, span.seconds, taken)
        turn = span.seconds / span.repeat
        for index in range(taken):
            yield from _events(span.inside, start + index * turn, most)


def write_trace(forecast: Forecast, path: Path) -> None:
    """Writes the trace of a forecast; a name that ends in .gz is compressed.

    Raises:
        RunError: the file can't be written.
    """
    assert forecast.timeline is not None
    text = json.dumps(trace(forecast, forecast.timeline), separators=(",", ":"))
    data = text.encode()
    write_atomically(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def trace(forecast: Forecast, timeline: Timeline, cap: int = CAP) -> dict[str, Any]:
    """The trace as JSON values; times in microseconds from the start of the step."""
    unrolled, names = unroll(timeline, cap), readings.lanes(forecast, LANES)
    short = readings.short_names(forecast)
    title = f"{forecast.recipe} on {forecast.on.name}, one device ({forecast.origin.value})"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}
    ]
    for tid, (lane, row) in enumerate(tracks(unrolled.events), 1):
        common = {"ph": "M", "pid": 1, "tid": tid}
        events.append({**common, "name": "thread_name", "args": {"name": names.get(lane, lane)}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [_event(event, tid, short) for event in row]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "recipe": forecast.recipe,
            "slice": forecast.on.name,
            "origin": forecast.origin.value,
            "step_seconds": forecast.step_seconds,
            "events": unrolled.note,
            "notes": list(forecast.notes),
        },
    }


def _event(event: LaneEvent, tid: int, short: Mapping[str, str]) -> dict[str, Any]:
    span = event.span
    loop = event.iterations > 0
    args: dict[str, Any] = {"op": span.name, "opcode": span.opcode}
    if loop:
        args["iterations"] = span.repeat
        if event.iterations < span.repeat:
            args["shown"] = event.iterations
    else:
        args["bound by"] = short.get(span.resource.value, span.resource.value)
        args["priced by"] = span.price_source
    facts = {"layer": span.layer, "source": span.source, "flops": span.flops, "bytes": span.bytes}
    args |= {name: value for name, value in facts.items() if value}
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": f"{span.name} × {span.repeat:g}" if loop and span.repeat > 1 else _name(event),
        "cat": short.get(span.resource.value, span.resource.value),
        "ts": round(event.start * MICROSECONDS, 3),
        "dur": round(event.seconds * MICROSECONDS, 3),
        "args": args,
    }


def _name(event: LaneEvent) -> str:
    """Name of an event: waits by what they wait for, ops by their place."""
    span = event.span
    place = place_of(span)
    op = span.opcode if span.opcode.startswith("wait ") else span.name
    return op if ".py:" in place or place.startswith("unnamed") else f"{place} {op}"
