"""One HTML file for a run: opens without a network, shows everything in the run directory, its curves first."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.report import figures, pages
from systolic.report.pages import (
    BarPart,
    Chart,
    Lane,
    LaneChart,
    LaneSpan,
    LegendKey,
    Plot,
    PlotAxis,
    PlotLine,
    Points,
    Tile,
    fill,
    is_even,
)
from systolic.report.terminal import printable
from systolic.runs.metrics import EvalRecord, EventRecord, SummaryRecord, TrainRecord, loss_of
from systolic.runs.record import RunRecord, load_run
from systolic.training.display import plain
from systolic.training.display.summary import (
    REPORT,
    TimeShare,
    commands,
    goodput,
    judge,
    metric_texts,
    scope,
    shares,
    speed,
    wall,
)

TABLE_ROWS = 400
"""Records in the page for the hover read-out; more are sampled evenly."""

MAX_EVALS = 200
"""Evaluations drawn; more are sampled evenly."""

MAX_TERMS = 8
"""Most charts of terms that the task reports beside the loss."""
MAX_EVENTS = 150
"""Rows of the event table; the last ones are kept."""
MAX_SPANS = 250
"""Bars in one lane of the time line."""
MAX_SAMPLES = 6
MAX_SAMPLE_CHARACTERS = 4000
MAX_TREE_ROWS = 400
MAX_VALUE_CHARACTERS = 400
_LaneEntry = tuple[EvalRecord | EventRecord, str]
"""A record of the time line, and its text."""
_LANES = {
    "compile": ("compile", "recompile", "load"),
    "checkpoint": ("checkpoint",),
    "trouble": ("bad_step", "skip", "lost", "stop", "interrupt", "skipped_file"),
}


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
    rows = [run.train[i] for i in pages.evenly(len(run.train), TABLE_ROWS)]
    columns = {
        "step": [figures.count(r.step) for r in rows],
        "loss": [figures.figure(loss_of(r)) for r in rows],
    }
    for series in _all_series(run):
        columns[series.key] = [series.text(r) for r in rows]
    if len(run.train) >= pages.MIN_SMOOTHED:
        finite = [p for p in points_of(run, loss_of) if math.isfinite(p[1])]
        places = {step: i for i, (step, _) in enumerate(finite)}
        indices = [places.get(float(r.step)) for r in rows]
        medians = [None if i is None else pages.median_around(finite, i) for i in indices]
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
    return [points[i] for i in pages.evenly(len(points), MAX_EVALS)]


def _x_axis(points: Points) -> PlotAxis:
    last = max((x for x, _ in points), default=0.0)
    return pages.linear_axis(0.0, max(last, 1.0), num_ticks=5)


def _plot(view: str, x: PlotAxis, y: PlotAxis, raw: Points, evals: Points) -> Plot:
    """Raw and smoothed training values and the evaluations, from the left edge of the axis on."""
    inside = [p for p in raw if p[0] >= x.low]
    shown = [p for p in evals if p[0] >= x.low]
    is_smoothed = len(raw) >= pages.MIN_SMOOTHED
    faint = pages.path(pages.thin(inside), x, y)
    lines = [PlotLine(css="raw" if is_smoothed else "smooth", path=faint)]
    if is_smoothed:
        later = [p for p in pages.smooth(raw) if p[0] >= x.low]
        lines.append(PlotLine(css="smooth", path=pages.path(later, x, y)))
    lines.append(PlotLine(css="eval", path=pages.path(shown, x, y)))
    lines.append(PlotLine(css="dots", path=pages.dotted(shown, x, y)))
    marks = pages.spread(x.percent(px) for px, py in inside if not math.isfinite(py))
    return Plot(view=view, x=x, y=y, lines=lines, marks=marks)


def _loss_chart(run: RunRecord) -> Chart:
    raw, evals = points_of(run, loss_of), _thinned_evals(run, "loss")
    both = [*raw, *evals]
    x = _x_axis(both)
    low, high, num_above = pages.span_of([y for _, y in both])
    plots = [_plot("linear", x, _padded(low, high), raw, evals)]
    positive = [y for _, y in both if math.isfinite(y) and y > 0]
    if positive:
        y = pages.log_axis(min(positive) * 0.97, max(positive) * 1.03)
        plots.append(_plot("log", x, y, raw, evals))
    late = [y for px, y in both if px >= x.high / 2]
    if sum(map(math.isfinite, late)) >= 10:
        low, high, _ = pages.span_of(late)
        later = pages.linear_axis(x.high / 2, x.high, num_ticks=5)
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
    if len(raw) >= pages.MIN_SMOOTHED:
        span = 2 * pages.half_window(len(raw)) + 1
        legend = [
            LegendKey(mark="raw", text="training"),
            LegendKey(mark="smooth", text=f"median of {span:,} records"),
        ]
    return [*legend, LegendKey(mark="eval", text="evaluation")] if evals else legend


def _loss_note(raw: Points, num_evals: int, num_above: int) -> str:
    notes = []
    if len(raw) > 2 * pages.BUCKETS:
        each = math.ceil(len(raw) / pages.BUCKETS)
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
    low, high, num_above = pages.span_of([y for _, y in both])
    y = pages.linear_axis(min(low * 1.08, 0.0), (high or 1.0) * 1.08, num_ticks=4)
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
    return pages.linear_axis(low, high + pad, num_ticks=6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A group of settings: a title and (name, value) rows."""

    title: str
    rows: tuple[tuple[str, str], ...]


def write_report(run_dir: Path) -> Path:
    """Writes ``report.html`` into a run directory from its files and returns its path.

    Works for unfinished and failed runs too; missing parts are left out, and thinning is noted.

    Raises:
        NotFoundError: not a run directory.
        RunError: a damaged JSON file, or the page cannot be written.
    """
    target = run_dir / REPORT
    write_atomically(target, render(load_run(run_dir)))
    return target


def render(run: RunRecord) -> str:
    """Renders the page of a run."""
    events = run.events[-MAX_EVENTS:]
    verdict = judge(run)
    page = {
        "heading": run.name,
        "where": str(run.path),
        "verdict": verdict,
        "lead": verdict.sentence,
        "facts": header_facts(run),
        "tiles": tiles(run),
        "figures": all_charts(run),
        "hover": hover_table(run),
        "shares": [_part(share) for share in shares(run)],
        "is_measured": run.summary is not None,
        "goodput": goodput(run),
        "wall": wall(run),
        "scope": scope(run),
        "lanes": lanes(run),
        "lead_in": lead_in(run),
        "events": [(figures.seconds(e.elapsed), plain.event_text(e)) for e in events],
        "num_events": len(run.events),
        "samples": samples(run),
        "num_samples": len(run.samples),
        "commands": [(purpose, text.split(" ")) for purpose, text in commands(run)],
        "job": tree(job_view(run)),
        "environment": tree(run.environment),
        "notes": notes(run),
    }
    return fill("run.html", page)


def header_facts(run: RunRecord) -> list[tuple[str, str]]:
    """Recipe, devices, layout and dates of the run."""
    start = run.start
    axes = " × ".join(f"{axis} {size}" for axis, size in run.job.layout.items() if size != 1)
    facts = [
        ("recipe", run.job.recipe),
        ("parameters", plain.parameters_text(start).replace(" parameters", "", 1)),
        ("devices", start.devices),
        ("layout", axes),
        ("precision", start.precision),
        ("compiler flags", " ".join(start.flags)),
        ("batch", figures.count(start.batch) if start.batch else None),
        ("steps", f"{figures.count(run.step)} of {figures.count(run.steps)}"),
        ("sessions", str(run.num_sessions) if run.num_sessions > 1 else None),
        ("started", None if run.began is None else _date(run.began)),
        ("systolic", run.job.version if run.job_fields else None),
    ]
    return [(name, str(value)) for name, value in facts if value]


def tiles(run: RunRecord) -> list[Tile]:
    """The key figures: metrics first, then speed, then trouble."""
    shown = [Tile(label=name, value=text) for name, text in metric_texts(run).items()]
    loss = run.final_loss
    if loss is not None:
        alarming = run.has_diverged or not math.isfinite(loss)
        shown.append(Tile(label="training loss", value=figures.figure(loss), is_alarming=alarming))
    peaks = [r.memory_bytes for r in run.train if r.memory_bytes is not None]
    texts = [
        *speed(run),
        ("time", wall(run)),
        ("goodput", goodput(run)),
        ("peak memory", figures.memory(max(peaks, default=None))),
    ]
    shown += [Tile(label=name, value=text) for name, text in texts if text != figures.MISSING]
    for label, number in _trouble(run.summary):
        if number:
            alarming = label != "recompiles"
            shown.append(Tile(label=label, value=figures.count(number), is_alarming=alarming))
    if is_even(len(shown)):
        return shown
    # The heading above the time line has it too; without it the last row is full.
    return [tile for tile in shown if tile.label != "goodput"]


def _trouble(summary: SummaryRecord | None) -> list[tuple[str, int]]:
    """Kinds of trouble, and how often each was met."""
    if summary is None:
        return []
    return [
        ("bad steps", summary.bad_steps),
        ("skipped files", summary.skipped_files),
        ("recompiles", summary.recompiles),
    ]


def _part(share: TimeShare) -> BarPart:
    return BarPart(
        hue=pages.TIMES[share.kind],
        name=share.name,
        share=share.percent / 100,
        share_text=share.share_text,
        text=share.seconds_text,
    )


def lanes(run: RunRecord) -> LaneChart | None:
    """The events and evaluations along the time of the run, a lane for each kind; None without any."""
    if run.seconds <= 0:
        return None
    groups: dict[str, list[_LaneEntry]] = {k: [] for k in ("compile", "evaluation")}
    for record in run.evals:
        text = f"step {record.step}: {figures.metrics_text(record.metrics, run.start.shares)}"
        groups["evaluation"].append((record, text))
    for event in run.events:
        lane = next((k for k, names in _LANES.items() if event.name in names), "notes")
        groups.setdefault(lane, []).append((event, plain.event_text(event)))
    order = ("compile", "evaluation", "checkpoint", "notes", "trouble")
    shown = [_lane(run, name, groups[name]) for name in order if groups.get(name)]
    breaks = [round(seconds / run.seconds * 100, 2) for seconds in run.resumes]
    return LaneChart(lanes=shown, axis=time_axis(run), breaks=breaks) if shown else None


def _lane(run: RunRecord, name: str, records: list[_LaneEntry]) -> Lane:
    chosen = records
    if len(records) > MAX_SPANS:
        chosen = [records[i] for i in pages.evenly(len(records), MAX_SPANS)]
    spans = []
    for record, text in chosen:
        end = record.elapsed
        begin = max(end - (record.seconds or 0.0), 0.0)
        left, width = begin / run.seconds * 100, (end - begin) / run.seconds * 100
        spans.append(LaneSpan(left=round(left, 2), width=round(width, 2), text=text))
    kind = {"evaluation": "eval", "notes": "other"}.get(name, name)
    return Lane(
        hue=pages.TIMES[kind], name=name, spans=tuple(spans), num_hidden=len(records) - len(chosen)
    )


def lead_in(run: RunRecord) -> str:
    """Measured time before the first record; ``""`` for less than a second."""
    if run.summary is None or run.num_sessions > 1:
        return ""
    before = run.summary.seconds - run.seconds
    return figures.seconds(before) if before >= 1 else ""


def time_axis(run: RunRecord) -> PlotAxis:
    """Axis of the time line in the largest unit that suits it."""
    unit, size = next(
        u for u in (("s", 1), ("min", 60), ("h", 3600)) if run.seconds < 180 * u[1] or u[0] == "h"
    )
    axis = pages.linear_axis(0.0, run.seconds / size, num_ticks=5)
    return replace(axis, ticks=tuple((value, f"{text} {unit}") for value, text in axis.ticks))


def samples(run: RunRecord) -> list[dict[str, str]]:
    """The last samples, newest first: step, prompt and what follows it."""
    shown = []
    for record in reversed(run.samples[-MAX_SAMPLES:]):
        text = record.text.removeprefix(record.prompt)
        shown.append(
            {
                "step": figures.count(record.step),
                "prompt": printable(record.prompt),
                "text": _cut(printable(text), MAX_SAMPLE_CHARACTERS),
            }
        )
    return shown


def job_view(run: RunRecord) -> Mapping[str, Any]:
    """The resolved job, with the other entries of job.json."""
    beside = {k: v for k, v in run.job_fields.items() if k not in ("job", "options")}
    return {**run.job.job, "kept with it": beside} if run.job_fields else {}


def tree(value: Mapping[str, Any]) -> list[Branch]:
    """Nested settings as groups of rows; plain values first, deeper names dotted."""
    top = [(k, _text(v)) for k, v in value.items() if not isinstance(v, Mapping)]
    branches = [Branch(title="", rows=tuple(top))] if top else []
    for title, part in value.items():
        if isinstance(part, Mapping) and part:
            branches.append(_branch(str(title), list(_flat(part))))
    return branches


def _branch(title: str, rows: list[tuple[str, str]]) -> Branch:
    hidden = len(rows) - MAX_TREE_ROWS
    if hidden > 0:
        rows = [*rows[:MAX_TREE_ROWS], ("…", f"{hidden} more are in the JSON file")]
    return Branch(title=title, rows=tuple(rows))


def _flat(part: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in part.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    if value is None:
        return figures.MISSING
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _cut(printable(text), MAX_VALUE_CHARACTERS)


def _cut(text: str, limit: int) -> str:
    return (
        text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} characters more)"
    )


def notes(run: RunRecord) -> list[str]:
    """Notes about the records: their scope, terms without a chart, damage."""
    texts = []
    if scope(run):
        texts.append(f"Times, throughput and goodput are of the {scope(run)}; the charts show all.")
    hidden = hidden_terms(run)
    if hidden:
        texts.append(f"Without a chart, in metrics.jsonl only: {', '.join(hidden)}.")
    return [*texts, *(f"{damage}." for damage in run.damage)]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
