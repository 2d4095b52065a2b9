"""The timeline of a step as compact JSON for the page: loops stay folded, so its size is the schedule's."""

from collections.abc import Mapping, Sequence
from typing import Any

from systolic.forecasting.costs import place_of
from systolic.report.forecast import readings
from systolic.sim.timeline import Resource, Span, Timeline

MAX_SPANS = 25_000
"""Spans in a page; the shortest are left out above it."""
BESIDE = {
    "dma": "memory copies",
    "ici": "chip links",
    "dcn": "slice network",
    "host": "host transfers",
}
"""Lanes that run beside the core."""


def tree(timeline: Timeline, groups: Mapping[str, str], shown: Sequence[str]) -> dict[str, Any]:
    """Spans as arrays over tables of strings; times in nanoseconds from the enclosing span's start.

    A span is [name, opcode, start, duration, lane, colour, place, source, priced by, FLOPs, bytes],
    a loop has its iterations and one iteration's spans beyond that. Colours count ``shown``; the
    last one is everything else.

    Args:
        timeline: The step.
        groups: Each place to the group whose colour it has.
        shown: Groups with a colour of their own.
    """
    floor, hidden = _floor(timeline)
    tables = _Tables(groups, shown, floor)
    spans = tables.spans(timeline.spans)
    return {
        "seconds": timeline.seconds,
        "lanes": [{"name": name, "beside": beside} for name, beside in tables.named_lanes()],
        "texts": list(tables.texts),
        "spans": spans,
        "hidden": hidden,
        "floor": floor,
    }


def _floor(timeline: Timeline) -> tuple[float, int]:
    """Seconds below which spans are left out, and their number."""
    lengths = sorted((span.seconds for span in _all(timeline.spans)), reverse=True)
    if len(lengths) <= MAX_SPANS:
        return 0.0, 0
    floor = lengths[MAX_SPANS]
    return floor, sum(length <= floor for length in lengths)


def _all(spans: Sequence[Span]) -> "list[Span]":
    return [one for span in spans for one in (span, *_all(span.inside))]


class _Tables:
    """Strings and lanes by number."""

    def __init__(self, groups: Mapping[str, str], shown: Sequence[str], floor: float) -> None:
        self.groups, self.floor = groups, floor
        self.colours = {name: number for number, name in enumerate(shown)}
        self.texts: dict[str, int] = {}
        order = [("core", resource.value) for resource in Resource]
        self.lanes = {
            key: number for number, key in enumerate([*order, *((b, "") for b in BESIDE)])
        }

    def named_lanes(self) -> list[tuple[str, bool]]:
        """(name, whether it runs beside the core) of each lane."""
        return [
            (readings.RESOURCES[name] if lane == "core" else BESIDE.get(lane, lane), lane != "core")
            for lane, name in self.lanes
        ]

    def spans(self, spans: Sequence[Span]) -> list[list[Any]]:
        return [
            self.span(span)
            for span in spans
            if span.seconds > self.floor or (span.inside and span.seconds > 0)
        ]

    def span(self, span: Span) -> list[Any]:
        place = place_of(span)
        key = ("core", span.resource.value) if span.lane == "core" else (span.lane, "")
        made: list[Any] = [
            self.text(span.name),
            self.text(span.opcode),
            round(span.start * 1e9, 1),
            round(span.seconds * 1e9, 1),
            self.lanes.setdefault(key, len(self.lanes)),
            self.colours.get(self.groups.get(place, place), len(self.colours)),
            self.text(place),
            self.text(span.source),
            self.text(span.price_source),
            round(span.flops),
            round(span.bytes),
        ]
        if span.inside:
            made += [span.repeat, self.spans(span.inside)]
        return made

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))
