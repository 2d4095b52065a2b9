"""Roofline of a device: attainable and actual FLOP/s of ops over their intensity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systolic.core.units import duration, si
from systolic.forecasting import Forecast
from systolic.forecasting.costs import OpCost, by_op
from systolic.report import charts
from systolic.report.charts import COLOURS, Dot, Plot, PlotAxis, PlotLine

MAX_DOTS = 150
LEAST_SHARE = 2e-4
"""Ops below this share of the step are not drawn."""
LOWEST = 1e-6
"""Share of the peak at the lower edge; slower ops are drawn there."""


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
    y = charts.log_axis(10.0 ** math.floor(math.log10(min(*up, peak / 100))), peak * 2)
    edge = min(x.high, max(ridge, x.low))
    roof = charts.path([(x.low, x.low * hbm), (edge, peak), (x.high, peak)], x, y)
    dots = [
        charts.dot(
            x,
            y,
            a,
            b,
            _text(cost, a, b, cost.seconds / timeline.seconds),
            hue=charts.hue((colours or {}).get(cost.place, COLOURS)),
            size=_size(cost.seconds / timeline.seconds),
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
    return charts.log_axis(10.0**first, 10.0**last)


def _text(cost: OpCost, across: float, up: float, share: float) -> str:
    """``fusion dot: 133 TFLOP/s at 2 k FLOP/byte, 6 ms (50.0 % of the step), mlp``."""
    return f"{cost.opcode} {cost.name.split()[-1]}: {si(up, 'FLOP/s')} at {si(across)} FLOP/byte, {duration(cost.seconds)} ({share * 100:.1f} % of the step), {cost.place}"


def _size(share: float) -> float:
    """Diameter in pixels, by which the area grows with the share of the step, up to a quarter."""
    return round(6 + 40 * math.sqrt(min(share, 0.25)), 1)
