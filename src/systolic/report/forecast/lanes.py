"""A step unrolled into events: loops are repeated up to a cap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from systolic.core.units import plural
from systolic.sim.timeline import Resource, Span, Timeline

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
    found: dict[str, list[list[LaneEvent]]] = {lane: [] for lane in LANES}
    for event in events:
        rows = found.setdefault(event.span.lane, [])
        free = (row for row in rows if row[-1].start + row[-1].seconds <= event.start + TINY)
        row = rows[0] if rows and event.span.lane == "core" else next(free, None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return [(lane, row) for lane, rows in found.items() for row in rows]


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
