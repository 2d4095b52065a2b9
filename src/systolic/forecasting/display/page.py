"""One HTML file for a forecast: opens without a network; memory, time line, costs and roofline."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import duration, gibibytes, si
from systolic.forecasting import Forecast
from systolic.forecasting.costs import (
    OpCost,
    by_op,
    by_place,
    clean,
    place_of,
    roll_up,
    seconds_by_place,
    short,
)
from systolic.forecasting.display import readings
from systolic.forecasting.display.comparison import for_page
from systolic.forecasting.memory import LiveBuffer
from systolic.report import figures, pages
from systolic.report.pages import (
    COLOURS,
    BarPart,
    Dot,
    Plot,
    PlotAxis,
    PlotLine,
    Tile,
    TreemapTile,
    fill,
)
from systolic.sim.timeline import Resource, Span, Timeline

PLACES = 14
OPS = 30
BUFFERS = 30
MAP_BOXES = 60
MAP_ASPECT = 3.4
"""Width over height of the memory map."""
MAP_LABEL = 1.2
"""Per cent of the map's area above which a box has a label."""


_STATE = re.compile(r"\.(\w+)\['([^']+)'\]$")
"""The end of a path into the state of training: ``.params['blocks/mlp/up']``."""
MAX_DOTS = 150
LEAST_SHARE = 2e-4
"""Ops below this share of the step are not drawn."""
LOWEST = 1e-6
"""Share of the peak at the lower edge; slower ops are drawn there."""
MAX_SPANS = 25_000
"""Spans in a page; the shortest are left out above it."""
BESIDE = {
    "dma": "memory copies",
    "ici": "chip links",
    "dcn": "slice network",
    "host": "host transfers",
}
"""Lanes that run beside the core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRow:
    """A line of a table of costs."""

    name: str
    hue: str
    share: float
    time: str
    runs: str
    resource: str
    resource_hue: str
    rate: str
    source: str
    short_source: str
    place: str
    priced_by: str


def write_page(forecast: Forecast, path: Path) -> None:
    """Writes the page, with what changed since an earlier forecast where there is one.

    Raises:
        RunError: the file can't be written.
    """
    write_atomically(path, render(forecast))


def render(forecast: Forecast) -> str:
    """Renders the page of a forecast."""
    timeline = forecast.timeline
    groups: Mapping[str, str] = {}
    costs: Sequence[OpCost] = []
    if timeline is not None:
        groups = roll_up(seconds_by_place(timeline), PLACES)
        costs = by_place(timeline, PLACES)
    shown = [cost.name for cost in costs[:COLOURS]]
    colours = {place: _colour(group, shown) for place, group in groups.items()}
    page = {
        "forecast": forecast,
        "against": None if forecast.against is None else for_page(forecast.against),
        "heading": f"{forecast.recipe} on {forecast.on.name}",
        "verdict": readings.verdict(forecast),
        "lead": _lead(forecast),
        "facts": facts(forecast),
        "tiles": tiles(forecast),
        "notes": readings.notes(forecast),
        "memory": memory(forecast),
        "refused": refused(forecast),
        "time": time(forecast),
        "places": rows(forecast, costs[:PLACES], {n: i for i, n in enumerate(shown)}),
        "more_places": _more(forecast, costs[PLACES:]),
        "ops": rows(forecast, by_op(timeline)[:OPS], colours) if timeline else [],
        "legend": [*enumerate(shown), (len(shown), "everything else")] if shown else [],
        "roofline": roofline(forecast, colours),
        "tree": None if timeline is None else tree(forecast, timeline, groups, shown),
        "percent": figures.percent,
        "plural": figures.plural,
        "duration": duration,
        "origin": readings.times(forecast),
        "memory_origin": readings.memory_origin(forecast).value,
    }
    return fill("forecast.html", page)


def _lead(forecast: Forecast) -> str:
    """Verdict and step time in a sentence."""
    text = readings.verdict(forecast).sentence
    if not forecast.step_seconds:
        return text
    bound = readings.words(forecast)[forecast.bound_by or "idle"]
    step = dict(readings.speed(forecast))["step"]
    return f"{text} {step[0].upper()}{step[1:]} a step, bound by {bound}."


def _more(forecast: Forecast, costs: Sequence[OpCost]) -> str:
    """Sum of the places without a row of their own."""
    if not costs or forecast.timeline is None:
        return ""
    seconds = sum(cost.seconds for cost in costs)
    share = figures.percent(seconds / forecast.timeline.seconds)
    return f"{figures.plural(len(costs), 'more place')}: {duration(seconds)}, {share}"


def _colour(group: str, shown: Sequence[str]) -> int:
    """Number of a group's colour; :data:`COLOURS` for everything else."""
    return shown.index(group) if group in shown else COLOURS


def facts(forecast: Forecast) -> list[tuple[str, str]]:
    """Slice, layout and compiler."""
    on = forecast.on
    facts = [
        ("slice", f"{on.name}, {on.num_chips} × {on.chip.title or on.chip.name}"),
        ("layout", readings.axes_text(forecast)),
        ("a step", f"{si(forecast.units)} {forecast.unit}" if forecast.unit != "calls" else ""),
        ("model FLOPs", si(forecast.model_flops) if forecast.model_flops else ""),
        ("compiler", readings.compiler_text(forecast)),
        ("flags", " ".join(forecast.compiler.flags or [])),
    ]
    return [(name, text) for name, text in facts if text]


def tiles(forecast: Forecast) -> list[Tile]:
    """The key figures."""
    shown = [
        Tile(label=name, value=text, small=readings.interval(forecast) if name == "step" else "")
        for name, text in readings.speed(forecast)
    ]
    if need := forecast.need_bytes:
        share = figures.percent(need / forecast.capacity_bytes) if forecast.capacity_bytes else ""
        shown.append(Tile(label="peak memory", value=gibibytes(need), small=share))
    if forecast.timeline is not None:
        exposed = forecast.exposed_collective_seconds
        share = figures.percent(exposed / forecast.timeline.seconds)
        shown.append(Tile(label="waiting for chips", value=duration(exposed), small=share))
    return [*shown, *_bill(forecast)]


def _bill(forecast: Forecast) -> list[Tile]:
    bill, step = forecast.bill, forecast.step_seconds
    name, scale = readings.SCALES.get(forecast.unit, ("million calls", 1e6))
    shown = []
    if bill.usd_per_hour is not None:
        shown.append(Tile(label="price", value=f"${bill.usd_per_hour:,.2f}/h", small="on demand"))
        if step:
            usd = readings.figure(bill.usd_per(scale, forecast.units, step))
            shown.append(Tile(label=f"per {name}", value=f"${usd}"))
    if bill.watts is not None and step:
        kwh = readings.figure(bill.kwh_per(scale, forecast.units, step))
        shown.append(
            Tile(label=f"energy per {name}", value=f"{kwh} kWh", small=f"PUE {bill.pue:g}")
        )
    return shown


def time(forecast: Forecast) -> list[BarPart]:
    """Step time by resource."""
    words = readings.words(forecast)
    return [
        BarPart(
            hue=pages.RESOURCES[part.key],
            name=words[part.key],
            share=part.share,
            share_text=figures.percent(part.share),
            text=part.text,
        )
        for part in readings.time_parts(forecast)
    ]


def memory(forecast: Forecast) -> dict[str, Any] | None:
    """The peak by kind, as a map and as a table of buffers."""
    held = forecast.memory
    if held is None:
        return None
    parts = readings.memory_parts(forecast)
    free = max(forecast.capacity_bytes - held.peak_bytes, 0)
    scale = max(forecast.capacity_bytes, held.peak_bytes, 1)
    shown = [
        BarPart(
            hue=_memory_hue(part.name),
            name=part.name,
            share=part.share,
            share_text=figures.percent(part.value / held.peak_bytes),
            text=part.text,
        )
        for part in parts
    ]
    shown.append(
        BarPart(hue="free", name="free", share=free / scale, share_text="", text=gibibytes(free))
    )
    return {
        "parts": shown,
        "peak": gibibytes(held.peak_bytes),
        "capacity": gibibytes(forecast.capacity_bytes),
        "estimated": gibibytes(held.estimated_bytes),
        "differs": abs(held.estimated_bytes - held.peak_bytes) > 0.02 * held.peak_bytes,
        "tiles": _tiles(forecast),
        "buffers": [
            (_memory_hue(b.kind), gibibytes(b.bytes), b.kind, b.shape, _what(b), b.source)
            for b in held.buffers[:BUFFERS]
        ],
        "num_buffers": len(held.buffers),
    }


def _what(buffer: LiveBuffer) -> str:
    """Path of a parameter, or the op and place that make the buffer."""
    path = (buffer.op or buffer.name).replace("\\'", "'")
    if (state := _STATE.search(path)) is not None:
        return f"{state[1]} {state[2]}".removeprefix("params ")
    place = clean(buffer.layer) or short(buffer.source)
    return ", ".join(part for part in (path.split("/")[-1], place) if part)


def _memory_hue(kind: str) -> str:
    return pages.MEMORY.get(kind, pages.hue(COLOURS))


def _tiles(forecast: Forecast) -> list[TreemapTile]:
    """The largest buffers, with the rest of each kind as one."""
    assert forecast.memory is not None
    buffers = [b for b in forecast.memory.buffers if b.bytes > 0]
    entries = [(b.bytes, b.kind, _what(b), b.shape) for b in buffers[:MAP_BOXES]]
    rest: defaultdict[str, list[int]] = defaultdict(list)
    for buffer in buffers[MAP_BOXES:]:
        rest[buffer.kind].append(buffer.bytes)
    entries += [
        (sum(sizes), kind, f"{figures.plural(len(sizes), 'smaller buffer')}", "")
        for kind, sizes in rest.items()
    ]
    if code := forecast.memory.by_kind.get("program"):
        entries.append((code, "program", "the program itself", ""))
    entries.sort(key=lambda entry: -entry[0])
    boxes = pages.treemap([float(size) for size, *_ in entries], MAP_ASPECT)
    return [
        TreemapTile(
            box=box,
            hue=_memory_hue(kind),
            label=what if box.width * box.height > MAP_LABEL * 100 else "",
            text=", ".join(part for part in (gibibytes(size), kind, what, shape) if part),
        )
        for box, (size, kind, what, shape) in zip(boxes, entries, strict=True)
    ]


def refused(forecast: Forecast) -> dict[str, Any] | None:
    """Bytes needed and available, and the buffers that the compiler names."""
    rejected = forecast.rejected
    if rejected is None:
        return None
    need, have = rejected.need_bytes, forecast.capacity_bytes
    return {
        "need": gibibytes(need) if need else "more than that",
        "have": gibibytes(have),
        "share": have / need if need > have else 1.0,
        "buffers": [
            (gibibytes(b.bytes), b.kind, b.shape, b.op, b.source)
            for b in rejected.buffers[:BUFFERS]
        ],
        "remedies": list(rejected.remedies),
    }


def rows(forecast: Forecast, costs: Sequence[OpCost], colours: Mapping[str, int]) -> list[CostRow]:
    """Costs as lines of a table."""
    step = forecast.timeline.seconds if forecast.timeline else 1.0
    chip = forecast.on.chip
    peak = (chip.peak_bf16_flops_per_second or 0.0) / (chip.devices_per_chip or 1)
    return [
        CostRow(
            name=cost.name,
            hue=pages.hue(colours.get(cost.name, colours.get(cost.place, COLOURS))),
            share=cost.seconds / step,
            time=duration(cost.seconds),
            runs=f"{cost.runs:,}",
            resource=cost.resource.value,
            resource_hue=pages.RESOURCES[cost.resource.value],
            rate=_rate(cost, peak),
            source=cost.source,
            short_source="" if cost.short_source == cost.name else cost.short_source,
            place=cost.place,
            priced_by=", ".join(cost.priced_by),
        )
        for cost in costs
    ]


def _rate(cost: OpCost, peak: float) -> str:
    """FLOPs against the peak, else bytes a second."""
    if not cost.seconds:
        return ""
    if cost.flops and peak:
        return f"{figures.percent(cost.flops / cost.seconds / peak)} of peak"
    return f"{si(cost.bytes / cost.seconds, 'B/s')}" if cost.bytes else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Plot in FLOP/byte and FLOP/s of one device: the roofs as a line, ops as dots."""

    plot: Plot
    peak_text: str
    hbm_text: str
    ridge_text: str
    num_hidden: int
    """Ops too short to be dots."""
    num_inside: int
    """Ops whose operands are all on the chip, which have no intensity."""

    @property
    def dots(self) -> Sequence[Dot]:
        """The ops, the largest first."""
        return self.plot.dots


def roofline(forecast: Forecast, colours: Mapping[str, int] | None = None) -> Roofline | None:
    """The roofline of a simulated step; None where the catalogue lacks a roof, or no op has FLOPs.

    Args:
        forecast: The forecast.
        colours: Number of the colour of each place; others share one.
    """
    chip, timeline = forecast.on.chip, forecast.timeline
    devices = chip.devices_per_chip or 1
    if timeline is None or not chip.peak_bf16_flops_per_second or not chip.hbm_bytes_per_second:
        return None
    peak = chip.peak_bf16_flops_per_second / devices
    hbm = chip.hbm_bytes_per_second / devices
    busy = [cost for cost in by_op(timeline) if cost.flops > 0]
    ops = [cost for cost in busy if cost.bytes > 0]
    shown = [cost for cost in ops if cost.seconds > LEAST_SHARE * timeline.seconds][:MAX_DOTS]
    if not shown:
        return None
    ridge = peak / hbm
    across = [cost.flops / cost.bytes for cost in shown]
    up = [max(cost.flops / cost.seconds, LOWEST * peak) for cost in shown]
    x = _decades(min(*across, ridge / 10), max(*across, ridge * 10))
    y = pages.log_axis(10.0 ** math.floor(math.log10(min(*up, peak / 100))), peak * 2)
    edge = min(x.high, max(ridge, x.low))
    roof = pages.path([(x.low, x.low * hbm), (edge, peak), (x.high, peak)], x, y)
    dots = [
        pages.dot(
            x,
            y,
            a,
            b,
            _text(cost, a, b, cost.seconds / timeline.seconds),
            hue=pages.hue((colours or {}).get(cost.place, COLOURS)),
            size=round(6 + 40 * math.sqrt(min(cost.seconds / timeline.seconds, 0.25)), 1),
        )
        for cost, a, b in zip(shown, across, up, strict=True)
    ]
    return Roofline(
        plot=Plot(
            x=x,
            y=y,
            lines=[PlotLine(css="roof", path=roof)],
            dots=sorted(dots, key=lambda dot: -(dot.size or 0.0)),
            x_name="FLOP per byte of device memory",
            y_name="FLOP/s",
        ),
        peak_text=f"{si(peak, 'FLOP/s')} bf16",
        hbm_text=f"{si(hbm, 'B/s')} device memory",
        ridge_text=f"{ridge:.0f} FLOP/byte",
        num_hidden=len(ops) - len(shown),
        num_inside=len(busy) - len(ops),
    )


def _decades(low: float, high: float) -> PlotAxis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return pages.log_axis(10.0**first, 10.0**last)


def _text(cost: OpCost, across: float, up: float, share: float) -> str:
    """``fusion dot: 133 TFLOP/s at 2 k FLOP/byte, 6 ms (50.0 % of the step), mlp``."""
    return f"{cost.opcode} {cost.name.split()[-1]}: {si(up, 'FLOP/s')} at {si(across)} FLOP/byte, {duration(cost.seconds)} ({share * 100:.1f} % of the step), {cost.place}"


def tree(
    forecast: Forecast, timeline: Timeline, groups: Mapping[str, str], shown: Sequence[str]
) -> dict[str, Any]:
    """Spans as arrays over tables of strings; times in nanoseconds from the enclosing span's start.

    A span is [name, opcode, start, duration, lane, colour, place, source, priced by, FLOPs, bytes],
    a loop has its iterations and one iteration's spans beyond that. Colours count ``shown``; the
    last one is everything else.

    Args:
        forecast: What the step is of.
        timeline: The step.
        groups: Each place to the group whose colour it has.
        shown: Groups with a colour of their own.
    """
    floor, hidden = _floor(timeline)
    tables = _Tables(groups, shown, floor)
    spans = tables.spans(timeline.spans)
    return {
        "seconds": timeline.seconds,
        "lanes": [
            {"name": name, "beside": beside} for name, beside in tables.named_lanes(forecast)
        ],
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
    return [each for span in spans for each in (span, *_all(span.inside))]


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

    def named_lanes(self, forecast: Forecast) -> list[tuple[str, bool]]:
        """(name, whether it runs beside the core) of each lane."""
        names, words = readings.lanes(forecast, BESIDE), readings.words(forecast)
        return [
            (words[name] if lane == "core" else names.get(lane, lane), lane != "core")
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
        row: list[Any] = [
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
            row += [span.repeat, self.spans(span.inside)]
        return row

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))
