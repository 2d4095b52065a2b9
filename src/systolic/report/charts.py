"""The charts of a run's page: which curves there are and how each is shown."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from systolic.report import curves, figures
from systolic.report.curves import Axis, Points
from systolic.report.run import Record, Run, loss_of

TABLE_ROWS = 400
"""Records in the page for the hover read-out; more are sampled evenly."""


MAX_EVALS = 200
"""Evaluations drawn; more are sampled evenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """One line of a plot."""

    css: str
    """raw, smooth, eval, dots or bad."""
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One drawing on one pair of axes."""

    view: str
    """The word on the switch between a chart's plots."""
    x: Axis
    y: Axis
    traces: tuple[Trace, ...]
    marks: tuple[float, ...] = ()
    """Per cent along x of steps whose loss was not a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A titled figure with one or more plots."""

    key: str
    title: str
    unit: str
    plots: tuple[Plot, ...]
    legend: tuple[tuple[str, str], ...]
    """(css, words) pairs."""
    note: str = ""


def all_charts(run: Run) -> list[Chart]:
    """The charts that the run has numbers for, the loss first."""
    charts = [_loss_chart(run)] if run.train or _eval_points(run) else []
    unit = next((found[1] for r in run.train if (found := figures.throughput(r))), "")
    simple: list[tuple[str, str, str, Callable[[Record], Any]]] = [
        ("learning_rate", "Learning rate", "", lambda r: r.get("learning_rate")),
        ("grad_norm", "Gradient norm", "", lambda r: r.get("grad_norm")),
        ("throughput", "Throughput", unit, lambda r: (figures.throughput(r) or (None,))[0]),
        ("data_wait", "Data wait", "% of the time", _percent_waiting),
    ]
    for key, title, unit_of, value in simple:
        points = points_of(run, value)
        if any(math.isfinite(y) for _, y in points):
            charts.append(_simple_chart(run, key, title, unit_of, points))
    return charts


def points_of(run: Run, value: Callable[[Record], Any]) -> Points:
    """(step, value) of each train record that has the value; a NaN is kept."""
    pairs = ((figures.number(r.get("step")), figures.number(value(r))) for r in run.train)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def hover_table(run: Run) -> dict[str, Any]:
    """Columns by chart key for the read-out under the pointer, and the evaluations."""
    rows = [run.train[i] for i in curves.evenly(len(run.train), TABLE_ROWS)]
    columns: dict[str, list[str]] = {
        "step": [figures.count(r.get("step")) for r in rows],
        "loss": [figures.figure(loss_of(r)) for r in rows],
        "learning_rate": [figures.rate(r.get("learning_rate")) for r in rows],
        "grad_norm": [figures.figure(r.get("grad_norm")) for r in rows],
        "throughput": [figures.throughput_text(r) for r in rows],
        "data_wait": [figures.percent(r.get("data_wait")) for r in rows],
    }
    if len(run.train) >= curves.MIN_SMOOTHED:
        finite = [p for p in points_of(run, loss_of) if math.isfinite(p[1])]
        places = {step: i for i, (step, _) in enumerate(finite)}
        found = [places.get(figures.number(r.get("step")) or 0.0) for r in rows]
        medians = [None if i is None else curves.median_around(finite, i) for i in found]
        columns["smooth"] = [figures.figure(m) for m in medians]
    return {
        "x": [figures.number(r.get("step")) or 0 for r in rows],
        "columns": columns,
        "evals": [[x, f"{y:.4f}"] for x, y in _eval_points(run)],
    }


def _percent_waiting(record: Record) -> float | None:
    share = figures.number(record.get("data_wait"))
    return None if share is None else share * 100


def _eval_points(run: Run) -> list[tuple[float, float]]:
    pairs = (
        (figures.number(r.get("step")), figures.number((r.get("metrics") or {}).get("loss")))
        for r in run.evals
        if r.get("split") != "test"
    )
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]


def _x_axis(run: Run, points: Points) -> Axis:
    last = max([x for x, _ in points], default=0.0)
    return curves.linear_axis(0.0, max(last, 1.0), num_ticks=5)


def _thinned_note(num_records: int) -> str:
    if num_records <= 2 * curves.BUCKETS:
        return ""
    each = math.ceil(num_records / curves.BUCKETS)
    return f"{num_records:,} records, thinned: the lowest and highest of every {each} are drawn."


def _loss_chart(run: Run) -> Chart:
    raw = points_of(run, loss_of)
    evals = _eval_points(run)
    drawn_evals = [evals[i] for i in curves.evenly(len(evals), MAX_EVALS)]
    smoothed = curves.smooth(raw)
    is_smoothed = len(raw) >= curves.MIN_SMOOTHED
    bad = [x for x, y in raw if not math.isfinite(y)]
    notes = [_thinned_note(len(raw))]
    both = [*raw, *evals]
    x = _x_axis(run, both)
    low, high, num_above = curves.span_of([y for _, y in both])
    if num_above:
        notes.append(f"{figures.plural(num_above, 'record')} above the linear frame.")
    if bad:
        notes.append(f"{figures.plural(len(bad), 'record')} with a loss that is not a number (red marks).")

    def plot(view: str, x: Axis, y: Axis) -> Plot:
        inside = [p for p in raw if p[0] >= x.low]
        traces = [Trace(css="raw" if is_smoothed else "smooth", path=_draw(inside, x, y))]
        if is_smoothed:
            later = [p for p in smoothed if p[0] >= x.low]
            traces.append(Trace(css="smooth", path=curves.path(later, x, y)))
        shown = [p for p in drawn_evals if p[0] >= x.low]
        traces.append(Trace(css="eval", path=curves.path(shown, x, y)))
        traces.append(Trace(css="dots", path=curves.dots(shown, x, y)))
        marks = [round(x.place(b) * 100, 2) for b in bad if b >= x.low]
        return Plot(view=view, x=x, y=y, traces=tuple(traces), marks=tuple(_spread(marks)))

    plots = [plot("linear", x, _padded(low, high))]
    positive = [y for _, y in both if math.isfinite(y) and y > 0]
    if positive:
        plots.append(plot("log", x, curves.log_axis(min(positive) * 0.97, max(positive) * 1.03)))
    middle = x.high / 2
    late = [y for px, y in both if px >= middle]
    if sum(map(math.isfinite, late)) >= 10:
        later_x = curves.linear_axis(middle, x.high, num_ticks=5)
        low, high, _ = curves.span_of(late)
        plots.append(plot("second half", later_x, _padded(low, high)))
    legend = [("raw", "training")] if is_smoothed else [("smooth", "training")]
    if is_smoothed:
        span = 2 * curves.half_window(len(raw)) + 1
        legend.append(("smooth", f"median of {span:,} records"))
    if evals:
        legend.append(("eval", "evaluation"))
    note = " ".join(filter(None, notes))
    return Chart(
        key="loss", title="Loss", unit="", plots=tuple(plots), legend=tuple(legend), note=note
    )


def _simple_chart(run: Run, key: str, title: str, unit: str, points: Points) -> Chart:
    _, high, num_above = curves.span_of([y for _, y in points])
    x = _x_axis(run, points)
    y = curves.linear_axis(0.0, (high or 1.0) * 1.08, num_ticks=4)
    traces = [Trace(css="raw", path=_draw(points, x, y))]
    if key == "learning_rate" or len(points) < curves.MIN_SMOOTHED:
        traces = [Trace(css="smooth", path=_draw(points, x, y))]
    else:
        traces.append(Trace(css="smooth", path=curves.path(curves.smooth(points), x, y)))
    note = f"{figures.plural(num_above, 'record')} above the frame." if num_above else ""
    plot = Plot(view="linear", x=x, y=y, traces=tuple(traces))
    return Chart(key=key, title=title, unit=unit, plots=(plot,), legend=(), note=note)


def _draw(points: Points, x: Axis, y: Axis) -> str:
    return curves.path(curves.thin(points), x, y)


def _padded(low: float, high: float) -> Axis:
    pad = (high - low) * 0.05
    low = low - pad if low - pad > 0 or low < 0 else 0.0
    return curves.linear_axis(low, high + pad, num_ticks=6)


def _spread(marks: list[float]) -> list[float]:
    """Marks that would fall on one pixel are drawn once."""
    kept: list[float] = []
    for mark in marks:
        if not kept or mark - kept[-1] >= 0.15:
            kept.append(mark)
    return kept
