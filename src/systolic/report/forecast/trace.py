"""A step as Chrome trace JSON, which Perfetto and chrome://tracing open: a thread a lane.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.forecasting import Forecast
from systolic.forecasting.costs import place_of
from systolic.report.forecast.lanes import LANES, LaneEvent, tracks, unroll
from systolic.sim.timeline import Timeline

CAP = 20_000
"""Events in a trace; loops are cut above it, and the trace says so."""
MICROSECONDS = 1e6


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
    unrolled = unroll(timeline, cap)
    title = f"{forecast.recipe} on {forecast.on.name}, one device ({forecast.origin.value})"
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}
    ]
    for tid, (lane, row) in enumerate(tracks(unrolled.events), 1):
        common = {"ph": "M", "pid": 1, "tid": tid}
        events.append({**common, "name": "thread_name", "args": {"name": LANES.get(lane, lane)}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [_event(event, tid) for event in row]
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


def _event(event: LaneEvent, tid: int) -> dict[str, Any]:
    span = event.span
    loop = event.iterations > 0
    args: dict[str, Any] = {"op": span.name, "opcode": span.opcode}
    if loop:
        args["iterations"] = span.repeat
        if event.iterations < span.repeat:
            args["shown"] = event.iterations
    else:
        args["bound by"] = span.resource.value
        args["priced by"] = span.price_source
    facts = {"layer": span.layer, "source": span.source, "flops": span.flops, "bytes": span.bytes}
    args |= {name: value for name, value in facts.items() if value}
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": f"{span.name} × {span.repeat:g}" if loop and span.repeat > 1 else _name(event),
        "cat": span.resource.value,
        "ts": round(event.start * MICROSECONDS, 3),
        "dur": round(event.seconds * MICROSECONDS, 3),
        "args": args,
    }


def _name(event: LaneEvent) -> str:
    """Name of an event: waits by what they wait for, ops by their place."""
    span = event.span
    place = place_of(span)
    told = span.opcode if span.opcode.startswith("wait ") else span.name
    return told if ".py:" in place or place.startswith("unnamed") else f"{place} {told}"
