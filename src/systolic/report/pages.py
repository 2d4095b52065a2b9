"""Pages, self-contained files: their common parts and their charts, values here, drawn by ``charts.html``, ``.css`` and ``.js``.

A page's module says what a chart shows; this module scales and places it, and names its colours:

- :class:`Plot`, inside a :class:`Chart` where it has several views: lines and dots on two axes.
- :class:`BarPart`: a stacked bar with its legend.
- :class:`Lane`, in :class:`LaneChart`: spans of time in rows.
- :class:`TreemapTile`, from :func:`treemap`: sizes as areas.
- :class:`Mesh`: chips of a slice as cells of a grid.
- :class:`Coordinates`: lines across parallel axes.

The zoomable time line of a step is drawn from JSON by ``timeline.js`` with the same colours and tooltip.

Lines live in a box of 1000 x 300 units that the page stretches; all else is placed in per cent, so
that text keeps its size on any screen. Colours are classes of ``charts.css``, which hold a light and
a dark value each.

No library draws these: a page is one file that opens without a network, and a chart may add at most
300 kB to it. Of the libraries whose JavaScript comes in a package of PyPI, plotly 7.1 adds 4.8 MB and
bokeh 3.10 1.4 MB; pygal 3.1 loads its tooltips from a server and has neither a dark mode nor
text that keeps its size on a narrow screen; pictures of matplotlib don't answer to a pointer. These
assets add 16 kB to a page, and 11 kB more for a time line.
"""

import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

from systolic.core.units import si

WIDTH, HEIGHT = 1000, 300
BUCKETS = 300
"""Columns of a thinned raw curve; each keeps its lowest and its highest value."""
MIN_SMOOTHED = 30
"""Number of records below which curves are not smoothed."""
FEWEST = 8
"""Number of values from which an outlier counts as a spike."""

COLOURS = 9
"""Things on a page that have a colour of their own; all others share one."""
CROWDED = 40
"""Characters of an axis, gaps included, above which a narrow screen shows every other tick."""
GAP = 0.12
"""Gap between the cells of a mesh, as a share of a cell."""
MARK_GAP = 0.15
"""Least distance between marks on an axis in per cent: about a pixel."""

RESOURCES = {
    "mxu": "r0",
    "vpu": "r1",
    "hbm": "r2",
    "ici": "r3",
    "dcn": "r4",
    "host": "r5",
    "idle": "free",
}
"""Colour of each resource of a chip. They are muted: the bright colours belong to places in the model."""
MEMORY = {
    "parameters": "c0",
    "optimizer state": "c1",
    "saved activations": "c2",
    "gradients": "c3",
    "inputs": "c4",
    "collective buffers": "c5",
    "temporaries": "c7",
    "held outside the step": "c6",
    "program": "c8",
}
"""Colour of each kind of buffer."""
TIMES = {
    "step": "c0",
    "data_wait": "c1",
    "compile": "c3",
    "eval": "c2",
    "checkpoint": "c9",
    "start": "c7",
    "sample": "c5",
    "diagnose": "c8",
    "other": "cx",
    "trouble": "over",
}
"""Colour of each kind of a run's time and events."""

Points = Sequence[tuple[float, float]]


def hue(number: int) -> str:
    """Class of the colour of the ``number``-th of several things, from 0; ``cx`` for those beyond :data:`COLOURS`."""
    return f"c{number}" if 0 <= number < COLOURS else "cx"


class Scale(enum.Enum):
    """How an axis maps values to places."""

    linear = "linear"
    log = "log"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotAxis:
    """A range of values and its ticks as (value, label)."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    scale: Scale = Scale.linear

    def place(self, value: float) -> float:
        """Position of a value: 0 at ``low``, 1 at ``high``; clipped at 10 ranges outside."""
        low, high = self.low, self.high
        if self.scale is Scale.log:
            if value <= 0:
                return -10.0
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return min(max((value - low) / (high - low), -10.0), 10.0)

    def percent(self, value: float) -> float:
        """Position of a value in per cent of the axis."""
        return round(self.place(value) * 100, 2)

    def percents(self) -> list[tuple[float, str]]:
        """The ticks as (per cent of the axis, label)."""
        return [(round(self.place(value) * 100, 3), text) for value, text in self.ticks]

    @property
    def is_crowded(self) -> bool:
        """Whether the labels don't fit side by side on a narrow screen."""
        return sum(len(text) + 2 for _, text in self.ticks) > CROWDED


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotLine:
    """A line of a plot."""

    css: str
    """``raw``, ``smooth``, ``eval``, ``dots``, ``so-far``, ``front`` or ``roof``."""
    path: str
    """SVG path, of :func:`path` or :func:`dotted`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A dot of a plot, in per cent of its size."""

    left: float
    bottom: float
    text: str
    """Tooltip; its first line is its title."""
    css: str = "good"
    """``best`` (ringed), ``front``, ``good`` or ``broken`` (faint)."""
    hue: str = "c0"
    size: float | None = None
    """Diameter in pixels."""
    label: str = ""


class Limit(NamedTuple):
    """A dashed line across a plot: ``x`` or ``y``, its place in per cent and its name."""

    axis: str
    place: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Lines and dots on one pair of axes."""

    x: PlotAxis
    y: PlotAxis
    lines: Sequence[PlotLine] = ()
    dots: Sequence[Dot] = ()
    marks: Sequence[float] = ()
    """Per cent along x of values that are not numbers."""
    limits: Sequence[Limit] = ()
    words: Sequence[str] = ()
    """Names of equal columns in place of the ticks of x."""
    x_name: str = ""
    y_name: str = ""
    view: str = ""
    """Name of the switch between a chart's plots."""
    beyond: int = 0
    """Number of values beyond the axes, drawn on their edge."""

    @property
    def line(self) -> str:
        """Path of the first line; empty without one."""
        return self.lines[0].path if self.lines else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendKey:
    """An entry of a legend."""

    text: str
    mark: str = "dot"
    """``dot`` of the colour ``hue``, ``ring``, or the ``css`` of a line."""
    hue: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A titled figure with one or more plots, in which the pointer reads values off."""

    key: str
    """Column of the page's table of values."""
    title: str
    unit: str
    plots: Sequence[Plot]
    legend: Sequence[LegendKey]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPart:
    """A part of a stacked bar, and its line in the legend."""

    hue: str
    name: str
    share: float
    """Share of the bar, 0 to 1."""
    share_text: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """A span in a lane, in per cent of the axis."""

    left: float
    width: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Spans of one kind."""

    hue: str
    name: str
    spans: Sequence[LaneSpan]
    num_hidden: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneChart:
    """Lanes above one axis of time."""

    lanes: Sequence[Lane]
    axis: PlotAxis
    breaks: Sequence[float] = ()
    """Per cent along the axis at which dashed lines cross the lanes."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle in per cent of the map."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TreemapTile:
    """A rectangle of a treemap."""

    box: Rectangle
    hue: str
    label: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a mesh, or a block of neighbours of one colour."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    """Number of its group; :data:`COLOURS` for those without a colour."""
    text: str
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Cells in a box of ``width`` x ``height`` units, of which one is at most a pixel."""

    title: str
    """Read out in place of the drawing."""
    width: float
    height: float
    cells: Sequence[Cell]
    planes: Sequence[tuple[float, float, str]]
    """Position and name of each plane of cells."""


class CoordinateAxis(NamedTuple):
    """Per cent from the left, name, short name, labels of the lowest and the highest value."""

    left: float
    name: str
    word: str
    low: str
    high: str


class CoordinateLine(NamedTuple):
    """SVG path, class (``t0``, the darkest, to ``t4``), tooltip."""

    path: str
    css: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Parallel axes with a line for each of several things."""

    axes: Sequence[CoordinateAxis]
    lines: Sequence[CoordinateLine]


def linear_axis(low: float, high: float, num_ticks: int = 5) -> PlotAxis:
    """An axis from ``low`` to ``high`` with ticks at 1, 2 or 5 times a power of ten."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / num_ticks
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
    return PlotAxis(low=low, high=high, ticks=tuple((v, tick(v, step)) for v in values))


def log_axis(low: float, high: float) -> PlotAxis:
    """A logarithmic axis; ticks at 1, 2, 5 per decade, fewer over many decades."""
    if not high > low * 1.05:
        low, high = low / 1.5, high * 1.5
    decades = math.log10(high / low)
    inside: list[float] = []
    # From few marks to many, until there are enough to read the scale by.
    for marks in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        inside = [m * 10.0**p for p in powers for m in marks if low <= m * 10.0**p <= high]
        if len(inside) >= 4:
            break
    if decades > 8:
        inside = inside[:: math.ceil(len(inside) / 6)]
    if len(inside) < 2:
        ticks = linear_axis(low, high).ticks
    else:
        ticks = tuple((v, tick(v, 10 ** math.floor(math.log10(v)) / 2)) for v in inside)
    return PlotAxis(low=low, high=high, ticks=ticks, scale=Scale.log)


def tick(value: float, step: float) -> str:
    """Label of a tick, with no more digits than its step needs."""
    if abs(value) < step * 1e-6:
        return "0"
    if max(abs(value), step) >= 1e4:
        return si(value, digits=4)
    if step < 1e-3:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}"


def half_window(num_points: int) -> int:
    """Records to either side that smoothing averages over: a hundredth of them, 5 at least."""
    return max(5, num_points // 100)


def median_around(points: Points, index: int) -> float:
    """The median around a point, as many records before as after it: a falling curve keeps its place.

    A median, because one spike must not lift a hundred records around it.

    Near the start the window shrinks; near the end it is cut.
    """
    half = min(half_window(len(points)), index)
    window = points[index - half : index + half + 1]
    return statistics.median(y for _, y in window)


def smooth(points: Points, num: int = BUCKETS) -> list[tuple[float, float]]:
    """At most ``num`` points of the smoothed curve; values that are not finite are skipped."""
    finite = [p for p in points if math.isfinite(p[1])]
    return [(finite[i][0], median_around(finite, i)) for i in evenly(len(finite), num)]


def thin(points: Points, buckets: int = BUCKETS) -> list[tuple[float, float]]:
    """At most two points a bucket, its lowest and its highest; a NaN in a bucket is kept as a gap."""
    if len(points) <= 2 * buckets:
        return list(points)
    thinned: list[tuple[float, float]] = []
    for i in range(buckets):
        part = points[len(points) * i // buckets : len(points) * (i + 1) // buckets]
        finite = [p for p in part if math.isfinite(p[1])]
        if finite:
            ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            thinned += sorted(ends)
        if len(finite) < len(part):
            thinned.append((part[-1][0], math.nan))
    return thinned


def evenly(length: int, num: int) -> list[int]:
    """At most ``num`` indices below ``length``, evenly spread, the first and the last among them."""
    if length <= num:
        return list(range(length))
    return [round(i * (length - 1) / (num - 1)) for i in range(num)]


def path(points: Points, x: PlotAxis, y: PlotAxis) -> str:
    """An SVG path in the box; it breaks where a value is not finite. A point alone is a dot."""
    parts: list[str] = []
    pen_down = False
    for px, py in points:
        if not math.isfinite(py) or (y.scale is Scale.log and py <= 0):
            pen_down = False
            continue
        place = f"{x.place(px) * WIDTH:.1f} {(1 - y.place(py)) * HEIGHT:.1f}"
        parts.append(f"L{place}" if pen_down else f"M{place}h0")
        pen_down = True
    return "".join(parts)


def dotted(points: Points, x: PlotAxis, y: PlotAxis) -> str:
    """An SVG path of lines without length: round caps make them dots however the box is stretched."""
    return "".join(path([point], x, y) for point in points)


def span_of(values: Sequence[float]) -> tuple[float, float, int]:
    """Lowest and highest value to show and how many lie above: rare spikes don't flatten a curve."""
    ordered = sorted(v for v in values if math.isfinite(v))
    if not ordered:
        return 0.0, 1.0, 0
    low, high = ordered[0], ordered[-1]
    # At least one value may be rare; of very few, none is known to be.
    common = ordered[min(len(ordered) - 2, int(len(ordered) * 0.99))] if len(ordered) > 1 else low
    if len(ordered) < FEWEST or high - low <= 4 * (common - low) or common == low:
        return low, high, 0
    high = common + 0.25 * (common - low)
    return low, high, sum(v > high for v in ordered)


def dot(plot_x: PlotAxis, plot_y: PlotAxis, x: float, y: float, text: str, **style: Any) -> Dot:
    """A dot at a value; one below or above the y axis lies on its edge.

    Args:
        plot_x: Horizontal axis.
        plot_y: Vertical axis.
        x: Value on it.
        y: Value on it.
        text: Tooltip.
        **style: Other fields of :class:`Dot`.
    """
    bottom = round(min(max(plot_y.place(y), 0.0), 1.0) * 100, 2)
    return Dot(left=plot_x.percent(x), bottom=bottom, text=text, **style)


def across(places: Points) -> str:
    """SVG path through (share of the width, share of the height) points."""
    return "".join(
        f"{'L' if number else 'M'}{x * WIDTH:.1f} {(1 - y) * HEIGHT:.1f}"
        for number, (x, y) in enumerate(places)
    )


def spread(marks: Iterable[float]) -> list[float]:
    """Marks in per cent, in order, thinned so that each pixel has at most one."""
    kept: list[float] = []
    for mark in marks:
        if not kept or mark - kept[-1] >= MARK_GAP:
            kept.append(mark)
    return kept


def treemap(sizes: Sequence[float], aspect: float) -> list[Rectangle]:
    """A rectangle for each size (all above 0, the largest first), whose areas are in their proportion.

    Squarified, after Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000.

    Args:
        sizes: What the areas stand for.
        aspect: Width of the map over its height.
    """
    total = sum(sizes)
    if not total:
        return []
    left, top, width, height = 0.0, 0.0, aspect, 1.0
    boxes: list[Rectangle] = []
    todo = [size / total * aspect for size in sizes]
    while todo:
        side = min(width, height)
        row = [todo[0]]
        while len(row) < len(todo) and _worst([*row, todo[len(row)]], side) <= _worst(row, side):
            row.append(todo[len(row)])
        depth = sum(row) / side
        at = 0.0
        for part in row:
            length = part / depth
            if width >= height:
                boxes.append(_rectangle(left, top + at, depth, length, aspect))
            else:
                boxes.append(_rectangle(left + at, top, length, depth, aspect))
            at += length
        if width >= height:
            left, width = left + depth, width - depth
        else:
            top, height = top + depth, height - depth
        todo = todo[len(row) :]
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of sides in a row of areas along a side."""
    depth = sum(row) / side
    return max(max(part / depth / depth, depth * depth / part) for part in row)


def _rectangle(left: float, top: float, width: float, height: float, aspect: float) -> Rectangle:
    return Rectangle(
        round(left / aspect * 100, 3),
        round(top * 100, 3),
        round(width / aspect * 100, 3),
        round(height * 100, 3),
    )


def separated(cells: Sequence[Cell], side: float) -> list[Cell]:
    """Cells of a mesh with gaps between them; ``side`` is the height of a cell."""
    gap = GAP * side
    return [
        replace(
            cell,
            x=round(cell.x + gap / 2, 2),
            y=round(cell.y + gap / 2, 2),
            width=round(cell.width - gap, 2),
            height=round(cell.height - gap, 2),
        )
        for cell in cells
    ]


def merged(cells: Sequence[Cell]) -> list[Cell]:
    """Merges neighbours of a colour along rows or columns, whichever leaves fewer, to keep large pages small."""
    by_row = _joined(cells)
    by_column = _joined([_transposed(cell) for cell in cells])
    if len(by_row) <= len(by_column):
        return by_row
    return [_transposed(cell) for cell in by_column]


def _joined(cells: Sequence[Cell]) -> list[Cell]:
    blocks: list[Cell] = []
    for cell in sorted(cells, key=lambda cell: (cell.y, cell.x)):
        last = blocks[-1] if blocks else cell
        touches = last.y == cell.y and abs(last.x + last.width - cell.x) < 1e-6
        if blocks and touches and last.colour == cell.colour:
            blocks[-1] = replace(last, width=last.width + cell.width)
        else:
            blocks.append(replace(cell, text="", label=""))
    return blocks


def _transposed(cell: Cell) -> Cell:
    return replace(cell, x=cell.y, y=cell.x, width=cell.height, height=cell.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    small: str = ""
    is_alarming: bool = False


def columns(num_tiles: int) -> tuple[int, int]:
    """Columns of the key figures on a wide page and on one of half the width, for rows as even as possible."""
    if num_tiles <= 5:
        return max(num_tiles, 1), max(num_tiles, 1)
    wide = max((3, 4, 5), key=lambda count: (-(-num_tiles % count), count))
    middle = max((2, 3, 4), key=lambda count: (-(-num_tiles % count), count))
    return wide, middle


def is_even(num_tiles: int) -> bool:
    """Whether all rows of key figures are full."""
    return num_tiles % columns(num_tiles)[0] == 0


@dataclass(frozen=True, slots=True)
class OptionText:
    """Text whose options are not broken after their dashes: ``--repeats``."""

    text: str

    def __html__(self) -> str:
        words = (
            f'<span class="word">{escape(word)}</span>' if word.startswith("--") else escape(word)
            for word in self.text.split(" ")
        )
        return " ".join(words)


def fill(template: str, page: Mapping[str, Any]) -> str:
    """Renders a page.

    Args:
        template: File in the assets.
        page: Values for the template; for ``base.html`` heading, verdict, lead, facts and tiles.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("systolic.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"hue": hue, "unbroken": OptionText}
    grid = columns(len(page["tiles"]))
    return templates.get_template(template).render({**page, "columns": grid})
