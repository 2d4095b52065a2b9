"""Charts of a run's page: its curves and how each is drawn."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from systolic.report import charts, figures
from systolic.report.charts import Chart, LegendKey, Plot, PlotAxis, PlotLine, Points
from systolic.runs.metrics import TrainRecord, loss_of
from systolic.runs.record import RunRecord

TABLE_ROWS = 400
"""Records in the page for the hover read-out; more are sampled evenly."""

MAX_EVALS = 200
"""Evaluations drawn; more are sampled evenly."""

MAX_TERMS = 8
"""Most charts of terms that the task reports beside the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Source of one chart."""

    key: str
    title: str
    unit: str
    value: Callable[[TrainRecord], float | None]
    """Value of a train record, in the unit of the axis; ``None`` if absent."""
    text: Callable[[TrainRecord], str]
    """Text of the value for the read-out."""
    metric: str | None = None
    """Name of the quantity in evaluations."""
    scale: float = 1.0
    """Factor from evaluations' values to the unit of the axis."""


def all_charts(run: RunRecord) -> list[Chart]:
    """The charts that the run has numbers for, the loss first."""
    shown = [_loss_chart(run)] if run.train or _eval_points(run, "loss") else []
    for series in _all_series(run):
        points = points_of(run, series.value)
        if any(math.isfinite(y) for _, y in points):
            shown.append(_simple_chart(run, series, points))
    return shown


def hidden_terms(run: RunRecord) -> list[str]:
    """Names of the task's terms beyond those that are drawn."""
    return _terms(run)[MAX_TERMS:]


def points_of(run: RunRecord, value: Callable[[TrainRecord], float | None]) -> Points:
    """(step, value) of each train record that has the value; a NaN is kept."""
    pairs = ((float(r.step), value(r)) for r in run.train)
    return [(x, y) for x, y in pairs if y is not None]


def hover_table(run: RunRecord) -> dict[str, Any]:
    """Columns by chart key for the read-out under the pointer, and the evaluations."""
    rows = [run.train[i] for i in charts.evenly(len(run.train), TABLE_ROWS)]
    columns = {
        "step": [figures.count(r.step) for r in rows],
        "loss": [figures.figure(loss_of(r)) for r in rows],
    }
    for series in _all_series(run):
        columns[series.key] = [series.text(r) for r in rows]
    if len(run.train) >= charts.MIN_SMOOTHED:
        finite = [p for p in points_of(run, loss_of) if math.isfinite(p[1])]
        places = {step: i for i, (step, _) in enumerate(finite)}
        indices = [places.get(float(r.step)) for r in rows]
        medians = [None if i is None else charts.median_around(finite, i) for i in indices]
        columns["smooth"] = [figures.figure(m) for m in medians]
    return {
        "x": [r.step for r in rows],
        "columns": columns,
        "evals": [[x, f"{y:.4f}"] for x, y in _thinned_evals(run, "loss")],
    }


def _all_series(run: RunRecord) -> list[Series]:
    """All series but the loss: the task's terms, then those of every run."""
    unit = next((rate[1] for r in run.train if (rate := figures.throughput(r))), "")
    return [
        *(_term_series(name, run.start.shares) for name in _terms(run)[:MAX_TERMS]),
        Series(
            key="learning_rate",
            title="Learning rate",
            unit="",
            value=lambda r: r.learning_rate,
            text=lambda r: figures.rate(r.learning_rate),
        ),
        Series(
            key="grad_norm",
            title="Gradient norm",
            unit="",
            value=lambda r: r.grad_norm,
            text=lambda r: figures.figure(r.grad_norm),
        ),
        Series(
            key="throughput",
            title="Throughput",
            unit=unit,
            value=lambda r: (figures.throughput(r) or (None,))[0],
            text=figures.throughput_text,
        ),
        Series(
            key="data_wait",
            title="Data wait",
            unit="% of the time",
            value=lambda r: _scaled(r.data_wait, 100),
            text=lambda r: figures.percent(r.data_wait),
        ),
    ]


def _terms(run: RunRecord) -> list[str]:
    return list(dict.fromkeys(name for record in run.train for name in record.terms))


def _term_series(name: str, shares: Collection[str]) -> Series:
    is_share = figures.is_share(name, shares)
    scale = 100.0 if is_share else 1.0
    return Series(
        key=f"term-{name}",
        title=figures.label(name).capitalize(),
        unit="%" if is_share else "",
        value=lambda r: _scaled(r.terms.get(name), scale),
        text=lambda r: figures.metric(name, r.terms.get(name), shares),
        metric=name,
        scale=scale,
    )


def _scaled(value: Any, scale: float) -> float | None:
    plain = figures.number(value)
    return None if plain is None else plain * scale


def _eval_points(run: RunRecord, metric: str, scale: float = 1.0) -> Points:
    """(step, value) of the evaluations while training, without the test at the end."""
    pairs = (
        (float(r.step), _scaled(r.metrics.get(metric), scale))
        for r in run.evals
        if r.split != "test"
    )
    return [(x, y) for x, y in pairs if y is not None and math.isfinite(y)]


def _thinned_evals(run: RunRecord, metric: str, scale: float = 1.0) -> Points:
    points = _eval_points(run, metric, scale)
    return [points[i] for i in charts.evenly(len(points), MAX_EVALS)]


def _x_axis(points: Points) -> PlotAxis:
    last = max((x for x, _ in points), default=0.0)
    return charts.linear_axis(0.0, max(last, 1.0), num_ticks=5)


def _plot(view: str, x: PlotAxis, y: PlotAxis, raw: Points, evals: Points) -> Plot:
    """Raw and smoothed training values and the evaluations, from the left edge of the axis on."""
    inside = [p for p in raw if p[0] >= x.low]
    shown = [p for p in evals if p[0] >= x.low]
    is_smoothed = len(raw) >= charts.MIN_SMOOTHED
    faint = charts.path(charts.thin(inside), x, y)
    lines = [PlotLine(css="raw" if is_smoothed else "smooth", path=faint)]
    if is_smoothed:
        later = [p for p in charts.smooth(raw) if p[0] >= x.low]
        lines.append(PlotLine(css="smooth", path=charts.path(later, x, y)))
    lines.append(PlotLine(css="eval", path=charts.path(shown, x, y)))
    lines.append(PlotLine(css="dots", path=charts.dotted(shown, x, y)))
    marks = charts.spread(x.percent(px) for px, py in inside if not math.isfinite(py))
    return Plot(view=view, x=x, y=y, lines=lines, marks=marks)


def _loss_chart(run: RunRecord) -> Chart:
    raw, evals = points_of(run, loss_of), _thinned_evals(run, "loss")
    both = [*raw, *evals]
    x = _x_axis(both)
    low, high, num_above = charts.span_of([y for _, y in both])
    plots = [_plot("linear", x, _padded(low, high), raw, evals)]
    positive = [y for _, y in both if math.isfinite(y) and y > 0]
    if positive:
        y = charts.log_axis(min(positive) * 0.97, max(positive) * 1.03)
        plots.append(_plot("log", x, y, raw, evals))
    late = [y for px, y in both if px >= x.high / 2]
    if sum(map(math.isfinite, late)) >= 10:
        low, high, _ = charts.span_of(late)
        later = charts.linear_axis(x.high / 2, x.high, num_ticks=5)
        plots.append(_plot("second half", later, _padded(low, high), raw, evals))
    return Chart(
        key="loss",
        title="Loss",
        unit="",
        plots=tuple(plots),
        legend=_legend(raw, evals),
        note=_loss_note(raw, len(_eval_points(run, "loss")), num_above),
    )


def _legend(raw: Points, evals: Points) -> list[LegendKey]:
    legend = [LegendKey(mark="smooth", text="training")]
    if len(raw) >= charts.MIN_SMOOTHED:
        span = 2 * charts.half_window(len(raw)) + 1
        legend = [
            LegendKey(mark="raw", text="training"),
            LegendKey(mark="smooth", text=f"median of {span:,} records"),
        ]
    return [*legend, LegendKey(mark="eval", text="evaluation")] if evals else legend


def _loss_note(raw: Points, num_evals: int, num_above: int) -> str:
    notes = []
    if len(raw) > 2 * charts.BUCKETS:
        each = math.ceil(len(raw) / charts.BUCKETS)
        notes.append(
            f"{len(raw):,} records, thinned: the lowest and highest of every {each} are drawn."
        )
    if num_evals > MAX_EVALS:
        notes.append(f"{MAX_EVALS} of {num_evals:,} evaluations are drawn.")
    if num_above:
        notes.append(f"{figures.plural(num_above, 'record')} above the linear frame.")
    num_bad = sum(not math.isfinite(y) for _, y in raw)
    if num_bad:
        records = figures.plural(num_bad, "record")
        notes.append(f"{records} with a loss that is not a number (red marks).")
    return " ".join(notes)


def _simple_chart(run: RunRecord, series: Series, points: Points) -> Chart:
    evals = [] if series.metric is None else _thinned_evals(run, series.metric, series.scale)
    both = [*points, *evals]
    low, high, num_above = charts.span_of([y for _, y in both])
    y = charts.linear_axis(min(low * 1.08, 0.0), (high or 1.0) * 1.08, num_ticks=4)
    plot = _plot("linear", _x_axis(both), y, points, evals)
    if series.key == "learning_rate":  # smooth by itself; a median would cut its corners
        plot = replace(plot, lines=[PlotLine(css="smooth", path=plot.line)])
    note = f"{figures.plural(num_above, 'record')} above the frame." if num_above else ""
    return Chart(
        key=series.key, title=series.title, unit=series.unit, plots=(plot,), legend=(), note=note
    )


def _padded(low: float, high: float) -> PlotAxis:
    pad = (high - low) * 0.05
    low = low - pad if low - pad > 0 or low < 0 else 0.0
    return charts.linear_axis(low, high + pad, num_ticks=6)
