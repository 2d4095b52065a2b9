"""One HTML file for a forecast: opens without a network; memory, time line, costs and roofline."""

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
    roll_up,
    seconds_by_place,
    short,
)
from systolic.forecasting.memory import LiveBuffer
from systolic.report import charts, figures
from systolic.report.charts import COLOURS, BarPart, TreemapTile
from systolic.report.forecast import readings
from systolic.report.forecast.op_table import Against
from systolic.report.forecast.roofline import roofline
from systolic.report.forecast.tree import tree
from systolic.report.pages import Tile, fill

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


def write_page(forecast: Forecast, path: Path, against: Against | None = None) -> None:
    """Writes the page, with what changed since another forecast where there is one.

    Raises:
        RunError: the file can't be written.
    """
    write_atomically(path, render(forecast, against))


def render(forecast: Forecast, against: Against | None = None) -> str:
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
        "against": against,
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
        "tree": None if timeline is None else tree(timeline, groups, shown),
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
    found = [
        ("slice", f"{on.name}, {on.num_chips} × {on.chip.title or on.chip.name}"),
        ("layout", readings.axes_text(forecast)),
        ("a step", f"{si(forecast.units)} {forecast.unit}" if forecast.unit != "calls" else ""),
        ("model FLOPs", si(forecast.model_flops) if forecast.model_flops else ""),
        ("compiler", readings.compiler_text(forecast)),
        ("flags", " ".join(forecast.compiler.get("flags") or [])),
    ]
    return [(name, text) for name, text in found if text]


def tiles(forecast: Forecast) -> list[Tile]:
    """The key figures."""
    found = [
        Tile(label=name, value=text, small=readings.interval(forecast) if name == "step" else "")
        for name, text in readings.speed(forecast)
    ]
    if need := readings.needed(forecast):
        share = figures.percent(need / forecast.capacity_bytes) if forecast.capacity_bytes else ""
        found.append(Tile(label="peak memory", value=gibibytes(need), small=share))
    if forecast.timeline is not None:
        exposed = forecast.exposed_collective_seconds
        share = figures.percent(exposed / forecast.timeline.seconds)
        found.append(Tile(label="waiting for chips", value=duration(exposed), small=share))
    return [*found, *_bill(forecast)]


def _bill(forecast: Forecast) -> list[Tile]:
    bill, step = forecast.bill, forecast.step_seconds
    name, scale = readings.SCALES.get(forecast.unit, ("million calls", 1e6))
    found = []
    if bill.usd_per_hour is not None:
        found.append(Tile(label="price", value=f"${bill.usd_per_hour:,.2f}/h", small="on demand"))
        if step:
            usd = readings.figure(bill.usd_per(scale, forecast.units, step))
            found.append(Tile(label=f"per {name}", value=f"${usd}"))
    if bill.watts is not None and step:
        kwh = readings.figure(bill.kwh_per(scale, forecast.units, step))
        found.append(
            Tile(label=f"energy per {name}", value=f"{kwh} kWh", small=f"PUE {bill.pue:g}")
        )
    return found


def time(forecast: Forecast) -> list[BarPart]:
    """Step time by resource."""
    words = readings.words(forecast)
    return [
        BarPart(
            hue=charts.RESOURCES[part.key],
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
    if (found := _STATE.search(path)) is not None:
        return f"{found[1]} {found[2]}".removeprefix("params ")
    place = clean(buffer.layer) or short(buffer.source)
    return ", ".join(part for part in (path.split("/")[-1], place) if part)


def _memory_hue(kind: str) -> str:
    return charts.MEMORY.get(kind, charts.hue(COLOURS))


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
    boxes = charts.treemap([float(size) for size, *_ in entries], MAP_ASPECT)
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
    told = forecast.rejected
    if told is None:
        return None
    need, have = int(told.get("need_bytes") or 0), forecast.capacity_bytes
    return {
        "need": gibibytes(need) if need else "more than that",
        "have": gibibytes(have),
        "share": have / need if need > have else 1.0,
        "buffers": [
            (gibibytes(b["bytes"]), b["kind"], b["shape"], b["op"], b["source"])
            for b in told.get("buffers") or []
        ][:BUFFERS],
        "remedies": [str(text) for text in told.get("remedies") or []],
    }


def rows(forecast: Forecast, costs: Sequence[OpCost], colours: Mapping[str, int]) -> list[CostRow]:
    """Costs as lines of a table."""
    step = forecast.timeline.seconds if forecast.timeline else 1.0
    chip = forecast.on.chip
    peak = (chip.peak_bf16_flops_per_second or 0.0) / (chip.devices_per_chip or 1)
    return [
        CostRow(
            name=cost.name,
            hue=charts.hue(colours.get(cost.name, colours.get(cost.place, COLOURS))),
            share=cost.seconds / step,
            time=duration(cost.seconds),
            runs=f"{cost.runs:,}",
            resource=cost.resource.value,
            resource_hue=charts.RESOURCES[cost.resource.value],
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
