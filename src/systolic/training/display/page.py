"""One HTML file for a run: opens without a network, shows everything in the run directory."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.report import charts, figures
from systolic.report.charts import BarPart, Lane, LaneChart, LaneSpan, PlotAxis
from systolic.report.pages import Tile, fill, is_even
from systolic.report.terminal import printable
from systolic.runs.metrics import EvalRecord, EventRecord, SummaryRecord
from systolic.runs.record import RunRecord, load_run
from systolic.training.display import curves, plain, readings
from systolic.training.display.verdict import commands, judge

NAME = "report.html"

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
    target = run_dir / NAME
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
        "figures": curves.all_charts(run),
        "hover": curves.hover_table(run),
        "shares": [_part(share) for share in readings.shares(run)],
        "is_measured": run.summary is not None,
        "goodput": readings.goodput(run),
        "wall": readings.wall(run),
        "scope": readings.scope(run),
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
    shown = [Tile(label=name, value=text) for name, text in readings.metrics(run).items()]
    loss = run.final_loss
    if loss is not None:
        alarming = run.has_diverged or not math.isfinite(loss)
        shown.append(Tile(label="training loss", value=figures.figure(loss), is_alarming=alarming))
    peaks = [r.memory_bytes for r in run.train if r.memory_bytes is not None]
    texts = [
        *readings.speed(run),
        ("time", readings.wall(run)),
        ("goodput", readings.goodput(run)),
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


def _part(share: readings.TimeShare) -> BarPart:
    return BarPart(
        hue=charts.TIMES[share.kind],
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
        chosen = [records[i] for i in charts.evenly(len(records), MAX_SPANS)]
    spans = []
    for record, text in chosen:
        end = record.elapsed
        begin = max(end - (record.seconds or 0.0), 0.0)
        left, width = begin / run.seconds * 100, (end - begin) / run.seconds * 100
        spans.append(LaneSpan(left=round(left, 2), width=round(width, 2), text=text))
    kind = {"evaluation": "eval", "notes": "other"}.get(name, name)
    return Lane(
        hue=charts.TIMES[kind], name=name, spans=tuple(spans), num_hidden=len(records) - len(chosen)
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
    axis = charts.linear_axis(0.0, run.seconds / size, num_ticks=5)
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
    if readings.scope(run):
        texts.append(
            f"Times, throughput and goodput are of the {readings.scope(run)}; the charts show all."
        )
    hidden = curves.hidden_terms(run)
    if hidden:
        texts.append(f"Without a chart, in metrics.jsonl only: {', '.join(hidden)}.")
    return [*texts, *(f"{damage}." for damage in run.damage)]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
