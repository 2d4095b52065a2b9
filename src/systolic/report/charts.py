"""Curves for drawing: smoothed, thinned, on axes with round ticks, as SVG paths.

A plot's lines live in a box of 1000 x 300 units that the page stretches; axis labels are placed in
per cent, so that text keeps its size on any screen.
"""

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from systolic.core.units import si

WIDTH, HEIGHT = 1000, 300
BUCKETS = 300
"""Columns of a thinned raw curve; each keeps its lowest and its highest value."""
MIN_SMOOTHED = 30
"""Number of records below which curves are not smoothed."""

FEWEST = 8
"""Number of values from which an outlier counts as a spike."""

Points = Sequence[tuple[float, float]]


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

    def percents(self) -> list[tuple[float, str]]:
        """The ticks as (per cent of the axis, label)."""
        return [(round(self.place(value) * 100, 3), text) for value, text in self.ticks]


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


def dots(points: Points, x: PlotAxis, y: PlotAxis) -> str:
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
