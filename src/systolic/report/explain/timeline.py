"""The median step of a profile as the page's time line draws it: lanes by core and unit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.profile import Profile, ProfiledOp
from systolic.profile.ceilings import MATRIX, MEMORY, VECTOR_MEMORY
from systolic.profile.intervals import Interval, missing, union
from systolic.profile.kinds import Activity
from systolic.profile.trace import DeviceOp, HostEvent
from systolic.sim.timeline import Resource

DEVICES = 4
"""Devices with lanes of their own; the others' steps are in the table."""
MAX_SPANS = 25_000
"""Spans in a page; the shortest are left out above it."""
UNITS = ("matrix units", "kernels", "vector units", "memory", "links", "host", "idle")
"""Lanes of a core, of which it is in one at a time."""
SPARSE, FLIGHT, LOOP = "SparseCore", "in flight", "host's loop"
"""Lanes beside it."""
_OF_UNIT = {MATRIX: "matrix units", MEMORY: "memory", VECTOR_MEMORY: "vector units"}
_OF_RESOURCE = {
    Resource.mxu: "matrix units",
    Resource.hbm: "memory",
    Resource.ici: "links",
    Resource.dcn: "links",
    Resource.host: "host",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSpan:
    """Something in a lane; seconds from the start of the step."""

    lane: str
    name: str
    start: float
    end: float
    kind: str
    opcode: str = ""
    place: str = ""
    """Source line, else the path of names."""
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def timeline(profile: Profile, colours: Mapping[str, int]) -> dict[str, Any]:
    """Spans as arrays over tables of strings, as :func:`systolic.report.forecast.tree.tree` writes those of a forecast.

    Args:
        profile: The profile; devices of the first one's host are shown in the first one's step, others in their own.
        colours: Kind of op to its colour; other kinds share the last.
    """
    shown = profile.devices[:DEVICES]
    lanes: list[str] = []
    beside: list[str] = []
    found: list[DrawnSpan] = []
    for one in shown:
        name = f"{one.trace.device} " if len(shown) > 1 else ""
        step = profile.step if one.trace.host == profile.trace.host else one.step
        lanes += [f"{name}{unit}" for unit in UNITS]
        beside += [f"{name}{lane}" for lane in (FLIGHT, SPARSE)]
        found += [
            replace(span, lane=f"{name}{span.lane}")
            for span in (*_core(one, step), *_beside(one, step))
        ]
    found += _loop(profile.trace.loop, profile.step)
    order = {lane: number for number, lane in enumerate([*lanes, *beside, LOOP])}
    spans, hidden, floor = _longest(found)
    texts: dict[str, int] = {}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    rows = [
        [
            text(span.name),
            text(span.opcode),
            round(span.start * 1e9, 1),
            round(span.seconds * 1e9, 1),
            order[span.lane],
            colours.get(span.kind, len(colours)),
            text(span.kind),
            text(span.place),
            text(""),
            round(span.flops),
            round(span.bytes),
        ]
        for span in spans
    ]
    return {
        "seconds": profile.seconds,
        "lanes": [{"name": lane, "beside": number >= len(lanes)} for lane, number in order.items()],
        "texts": list(texts),
        "spans": rows,
        "hidden": hidden,
        "floor": floor,
    }


def _longest(spans: Sequence[DrawnSpan]) -> tuple[list[DrawnSpan], int, float]:
    """The spans that are drawn in order, how many are not, and the length up to which."""
    lengths = sorted((span.seconds for span in spans), reverse=True)
    floor = lengths[MAX_SPANS] if len(lengths) > MAX_SPANS else 0.0
    kept = sorted((span for span in spans if span.seconds > floor), key=lambda span: span.start)
    return kept, sum(0 < seconds <= floor for seconds in lengths), floor


def _core(profile: Profile, step: Interval) -> Iterator[DrawnSpan]:
    ops = [(op, profile.describe(op)) for op in profile.within(profile.trace.ops, step)]
    for op, described in ops:
        if described.kind is not Activity.loop:
            yield _span(_lane(profile, op, described), op, described, step)
    low, _ = step
    for start, end in missing(union((op.start, op.end) for op, _ in ops), step):
        yield DrawnSpan(lane="idle", name="idle", start=start - low, end=end - low, kind="idle")


def _lane(profile: Profile, op: DeviceOp, described: ProfiledOp) -> str:
    rate = profile.rate(replace(described, raw=op, flight=profile.flight(op)))
    if described.kind is Activity.kernel and (rate is None or rate.unit != MATRIX):
        return "kernels"
    if rate is not None and rate.unit in _OF_UNIT:
        return _OF_UNIT[rate.unit]
    return _OF_RESOURCE.get(described.resource, "vector units")


def _span(lane: str, op: DeviceOp, described: ProfiledOp, step: Interval) -> DrawnSpan:
    low, high = step
    moved = described.traffic
    return DrawnSpan(
        lane=lane,
        name=op.name,
        opcode=described.opcode,
        start=max(op.start, low) - low,
        end=min(op.end, high) - low,
        kind=described.kind.value,
        place=described.source or described.op_name,
        flops=described.flops,
        bytes=moved.host or moved.link or moved.hbm or moved.vmem,
    )


def _beside(profile: Profile, step: Interval) -> Iterator[DrawnSpan]:
    for op in profile.within(profile.trace.sparse, step):
        yield _span(SPARSE, op, profile.describe(op), step)
    for begun, done in profile.pairs:
        if done.end > step[0] and begun.start < step[1]:
            whole = replace(done, name=begun.name, start=begun.start)
            yield _span(FLIGHT, whole, profile.describe(done), step)


def _loop(events: Sequence[HostEvent], step: Interval) -> Iterator[DrawnSpan]:
    """The outermost events of the host's thread."""
    low, high = step
    until = low
    for event in events:
        if event.end > until and event.start < high:
            start, end = max(event.start, until), min(event.end, high)
            until = event.end
            yield DrawnSpan(
                lane=LOOP, name=event.name, start=start - low, end=end - low, kind="host"
            )
