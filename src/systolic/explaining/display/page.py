"""One HTML file for a profile: opens without a network; causes, time line by core and unit, steps, all ops."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import duration, si
from systolic.explaining.display.text import overlap_remarks, profile_remark, program_remarks
from systolic.explaining.profiles import figures as figures_of
from systolic.explaining.step import Cause
from systolic.profile import Profile, ProfiledOp
from systolic.profile.ops import Activity
from systolic.profile.profile import MATRIX, MEMORY, VECTOR_MEMORY
from systolic.profile.table import DeviceRow, OpRow, ProfileTable
from systolic.profile.trace import DeviceOp, HostEvent, Interval, missing, union
from systolic.report import figures, pages
from systolic.report.figures import Tone, Verdict
from systolic.report.pages import COLOURS, BarPart, Tile, fill
from systolic.sim.timeline import Resource

MOST_ROWS = 1000
"""Most ops in the table; those that take longest are kept."""
MOST_STEPS = 200
"""Most steps that are drawn of a device."""
COLUMNS = (
    *("op", "kind", "program", "calls", "time", "share", "median", "p90", "FLOPs"),
    *("HBM", "VMEM", "host", "links", "rate", "of peak", "bound by", "memory", "source"),
)
"""Columns of the table of ops; FLOPs and bytes are of one run."""
WORDS = frozenset(("op", "kind", "program", "bound by", "memory", "source"))
"""Columns of words; those of numbers are aligned at the right."""
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
class TableCell:
    """A cell of the table: its text, and what it is sorted by."""

    text: str
    by: float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBar:
    """A step as a bar: its height of the longest, in per cent."""

    height: float
    text: str


def write_page(
    target: str,
    profile: Profile,
    table: ProfileTable,
    causes: Sequence[Cause],
    path: Path,
    notes: Sequence[str],
) -> None:
    """Writes the page.

    Raises:
        RunError: the file can't be written.
    """
    write_atomically(path, render(target, profile, table, causes, notes))


def render(
    target: str,
    profile: Profile,
    table: ProfileTable,
    causes: Sequence[Cause],
    notes: Sequence[str],
) -> str:
    """Renders the page of a profile."""
    summary = figures_of(profile)
    shown = [name for name, share in summary["shares"].items() if share and name != "idle"]
    shown = sorted(shown, key=lambda name: -summary["shares"][name])[:COLOURS]
    total = sum(row.seconds for row in table.ops) or 1.0
    rest = table.ops[MOST_ROWS:]
    page = {
        "heading": Path(target).name,
        "verdict": _verdict(causes),
        "lead": _lead(causes),
        "facts": facts(profile, table),
        "tiles": tiles(profile, table),
        "notes": [
            *overlap_remarks(summary),
            *program_remarks(table),
            *(f"not judged: {note}" for note in notes),
        ],
        "remark": profile_remark(summary),
        "causes": [_cause(cause) for cause in causes],
        "parts": [
            BarPart(
                hue=hue_of(name, shown),
                name=name,
                share=share,
                share_text=figures.percent(share),
                text=duration(share * summary["step_seconds"]),
            )
            for name, share in sorted(summary["shares"].items(), key=lambda item: -item[1])
            if share > 0
        ],
        "legend": [*enumerate(shown), (len(shown), "everything else")],
        "tree": timeline(profile, {name: number for number, name in enumerate(shown)}),
        "hidden_devices": max(len(profile.devices) - DEVICES, 0),
        "devices": [(row, _steps(row)) for row in table.devices],
        "most_steps": MOST_STEPS,
        "columns_of_ops": [(name, name in WORDS) for name in COLUMNS],
        "rows": [cells(row, total) for row in table.ops[:MOST_ROWS]],
        "rest": rest and f"{figures.plural(len(rest), 'more op')}: {duration(_sum(rest))}",
        "step": summary["step_seconds"],
        "percent": figures.percent,
        "plural": figures.plural,
        "duration": duration,
    }
    return fill("profile.html", page)


def hue_of(name: str, shown: Sequence[str]) -> str:
    """Class of a kind's colour."""
    if name == "idle":
        return "free"
    return pages.hue(shown.index(name) if name in shown else COLOURS)


def _sum(rows: Sequence[OpRow]) -> float:
    return sum(row.seconds for row in rows)


def _verdict(causes: Sequence[Cause]) -> Verdict:
    if not causes:
        return Verdict(word="no problem found", sentence="", tone=Tone.good)
    return Verdict(word=figures.plural(len(causes), "problem"), sentence="", tone=Tone.fair)


def _lead(causes: Sequence[Cause]) -> str:
    """The largest cause in a sentence."""
    if not causes:
        return ""
    first = causes[0]
    text = f"{first.title[0].upper()}{first.title[1:]}"
    if first.share is not None and first.seconds is not None:
        text += f": {first.share:.1%} of the step, {duration(first.seconds)}"
    return f"{text}." if first.work is None else f"{text}; {first.work.text}."


def facts(profile: Profile, table: ProfileTable) -> list[tuple[str, str]]:
    """Devices, hosts and files."""
    summary = figures_of(profile)
    known = [
        ("devices", f"{summary['devices']} × {summary['device']}"),
        ("hosts", ", ".join(summary["hosts"])),
        ("programs", ", ".join(row.name for row in table.programs[:4])),
        ("file", str(profile.trace.path)),
    ]
    return [(name, text) for name, text in known if text]


def tiles(profile: Profile, table: ProfileTable) -> list[Tile]:
    """The key figures."""
    summary = figures_of(profile)
    shares = summary["shares"]
    steps = figures.plural(summary["steps"], "step")
    by = summary["simulated_by"]
    small = f"simulated by {by}" if by else f"median of {steps}"
    result = [
        Tile(label="step", value=duration(summary["step_seconds"]), small=small),
        Tile(
            label="bound by",
            value=table.devices[0].bound_by,
            small=figures.percent(shares[table.devices[0].bound_by]),
        ),
    ]
    waits = (Activity.host.value, Activity.collective.value, "idle")
    for name in waits:
        if shares.get(name):
            seconds = duration(shares[name] * summary["step_seconds"])
            result.append(Tile(label=name, value=seconds, small=figures.percent(shares[name])))
    return result


def _cause(cause: Cause) -> dict[str, object]:
    return {
        "title": cause.title,
        "share": "" if cause.share is None else figures.percent(cause.share),
        "width": min(cause.share or 0.0, 1.0),
        "seconds": "" if cause.seconds is None else duration(cause.seconds),
        "work": "" if cause.work is None else cause.work.text,
        "evidence": cause.evidence,
        "advice": cause.advice,
    }


def _steps(row: DeviceRow) -> list[StepBar]:
    longest = max(row.steps, default=0.0) or 1.0
    return [
        StepBar(height=round(100 * seconds / longest, 1), text=f"step {n}: {duration(seconds)}")
        for n, seconds in enumerate(row.steps[:MOST_STEPS], 1)
    ]


def brief(seconds: float) -> str:
    """Seconds as ``1.2 s``, ``3.4 ms``, ``5.6 µs`` or ``7.8 ns``: ops are shorter than steps."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def cells(row: OpRow, total: float) -> list[TableCell]:
    """The cells of an op, as :data:`COLUMNS` names them."""
    op, rate = row.op, row.rate
    moved = op.traffic

    def size(value: float, unit: str = "B") -> TableCell:
        return TableCell(text=si(value, unit) if value else "", by=value)

    def time(value: float) -> TableCell:
        return TableCell(text=brief(value), by=value)

    share, speed = row.share, row.per_second
    return [
        TableCell(text=op.raw.name, by=op.raw.name),
        TableCell(text=op.kind.value, by=op.kind.value),
        TableCell(text=row.program, by=row.program),
        TableCell(text=f"{row.calls:g}", by=row.calls),
        time(row.seconds),
        TableCell(text=figures.percent(row.seconds / total), by=row.seconds),
        time(row.median),
        time(row.late),
        size(op.flops, "FLOP"),
        size(moved.hbm),
        size(moved.vmem),
        size(moved.host),
        size(moved.link),
        TableCell(text=si(speed, f"{rate.measure}/s") if rate and speed else "", by=speed or 0.0),
        TableCell(text="" if share is None else figures.percent(share), by=share or 0.0),
        TableCell(text=rate.unit if rate else "", by=rate.unit if rate else ""),
        TableCell(text=moved.space, by=moved.space),
        TableCell(text=op.source or op.op_name, by=op.source or op.op_name),
    ]


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
    """Spans as arrays over tables of strings, as :func:`systolic.forecasting.display.page.tree` writes those of a forecast.

    Args:
        profile: The profile; devices of the first one's host are shown in the first one's step, others in their own.
        colours: Kind of op to its colour; other kinds share the last.
    """
    shown = profile.devices[:DEVICES]
    lanes: list[str] = []
    beside: list[str] = []
    drawn: list[DrawnSpan] = []
    for device in shown:
        name = f"{device.trace.device} " if len(shown) > 1 else ""
        step = profile.step if device.trace.host == profile.trace.host else device.step
        lanes += [f"{name}{unit}" for unit in UNITS]
        beside += [f"{name}{lane}" for lane in (FLIGHT, SPARSE)]
        drawn += [
            replace(span, lane=f"{name}{span.lane}")
            for span in (*_core(device, step), *_beside(device, step))
        ]
    drawn += _loop(profile.trace.loop, profile.step)
    order = {lane: number for number, lane in enumerate([*lanes, *beside, LOOP])}
    spans, hidden, floor = _longest(drawn)
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
