"""HTML page of a study: best value so far, importance of each option, parallel coordinates, every trial with its run."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import dollars
from systolic.report import curves, figures
from systolic.report.curves import PlotAxis
from systolic.report.pages import Tile, fill
from systolic.report.tune import readings
from systolic.tuning.importance import usual
from systolic.tuning.objective import Aim
from systolic.tuning.results import StudyResult, TrialRow
from systolic.tuning.search import Searched

NAME = "report.html"
PAD = 0.06
"""Margin of a value axis beyond the outermost values, as a share of their range."""
MOST_ROWS = 500
"""Most rows of the table; the last trials are kept."""
TONES = 5
"""Number of line colours, from the best fifth to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialDot:
    """A trial on a chart; positions in per cent of the chart's size."""

    left: float
    bottom: float
    css: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialChart:
    """Values over trials, or one objective against another."""

    x: PlotAxis
    y: PlotAxis
    dots: Sequence[TrialDot]
    line: str
    """SVG path of the best value so far, or of the Pareto front."""
    x_name: str
    y_name: str
    beyond: int = 0
    """Number of results beyond the axis, drawn on its edge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Parallel coordinates: an axis for each option and for the first objective, a line for each trial."""

    axes: Sequence[tuple[float, str, str, str, str]]
    """Per cent from the left, name, short name (the last part if unique), lowest and highest label."""
    lines: Sequence[tuple[str, str, str]]
    """SVG path, class, text."""


def write_page(study: StudyResult, folder: Path) -> Path:
    """Writes ``report.html`` into the study's folder and returns its path.

    Raises:
        RunError: the file can't be written.
    """
    target = folder / NAME
    write_atomically(target, render(study, folder))
    return target


def render(study: StudyResult, folder: Path) -> str:
    """The page's HTML."""
    verdict = readings.verdict(study)
    hint = "" if study.repeats else readings.luck(study)
    page = {
        "heading": f"{study.recipe}: {figures.plural(study.total, 'trial')}",
        "verdict": verdict,
        "lead": "; ".join(filter(None, (verdict.sentence, hint))),
        "facts": _facts(study),
        "tiles": tiles(study),
        "command": study.command,
        "repeats": study.repeats,
        "chart": history(study),
        "fronts": front(study),
        "importance": list(study.importance.items()),
        "whole_percent": readings.whole_percent,
        "spreads": readings.spreads(study),
        "edges": readings.edges(study),
        "plural": figures.plural,
        "coordinates": coordinates(study),
        "names": [one.name for one in study.searched],
        "aims": [aim.name for aim in study.aims],
        "label": figures.label,
        # Objectives have columns of their own.
        "timed": all(aim.name != "seconds" for aim in study.aims),
        "priced": study.dollars is not None and all(aim.name != "dollars" for aim in study.aims),
        "rows": [_table_row(study, row, folder) for row in study.rows[-MOST_ROWS:]],
        "hidden": max(len(study.rows) - MOST_ROWS, 0),
    }
    return fill("tune.html", page)


def tiles(study: StudyResult) -> list[Tile]:
    """Tiles of the best trial's figures and of the study's cost."""
    best, found = study.best, []
    if best is not None:
        found = [
            Tile(
                label=f"best {figures.label(aim.name)}",
                value=readings.figure(aim.name, best.figures[aim.name]),
                small=f"trial {best.number}",
            )
            for aim in study.aims
        ]
    found.append(
        Tile(
            label="trials",
            value=f"{study.finished} of {study.total}",
            small=readings.counted(study),
        )
    )
    seconds = sum(row.seconds or 0.0 for row in study.rows)
    found.append(Tile(label="time of all trials", value=figures.seconds(seconds)))
    if study.dollars is not None:
        found.append(
            Tile(
                label="cost",
                value=dollars(study.dollars),
                small=", ".join(filter(None, ("forecast, training steps only", study.price))),
            )
        )
    return found


def history(study: StudyResult) -> TrialChart | None:
    """Values of the first objective over trials, with the best value so far; None without a result."""
    aim = study.aims[0]
    shown = [row for row in study.rows if aim.name in row.figures]
    so_far = study.best_so_far()
    if not so_far:
        return None
    x = curves.linear_axis(0, max(study.total - 1, 1))
    done = [row.figures[aim.name] for row in study.done]
    y = _axis(aim.name, usual(done, aim.mode))
    steps: list[tuple[float, float]] = []
    for number, value in [(number, min(max(value, y.low), y.high)) for number, value in so_far]:
        steps += [(number, steps[-1][1] if steps else value), (number, value)]
    steps.append((shown[-1].number, steps[-1][1]))
    return TrialChart(
        x=x,
        y=y,
        dots=[
            _dot(study, row, x.place(row.number), y.place(row.figures[aim.name])) for row in shown
        ],
        line=curves.path(steps, x, y),
        x_name="trial",
        y_name=figures.label(aim.name),
        beyond=sum(not y.low <= value <= y.high for value in done),
    )


def front(study: StudyResult) -> list[TrialChart]:
    """The first objective against each of the others, with the Pareto front."""
    first, found = study.aims[0], []
    for aim in study.aims[1:]:
        points = [(row.figures[aim.name], row.figures[first.name], row) for row in study.done]
        if not points:
            continue
        x = _axis(aim.name, [p[0] for p in points])
        y = _axis(first.name, [p[1] for p in points])
        kept = {row.number for row in study.front}
        line = sorted((a, b) for a, b, row in points if row.number in kept)
        found.append(
            TrialChart(
                x=x,
                y=y,
                dots=[_dot(study, row, x.place(a), y.place(b)) for a, b, row in points],
                line=curves.path(line, x, y) if len(study.aims) == 2 else "",
                x_name=figures.label(aim.name),
                y_name=figures.label(first.name),
            )
        )
    return found


def coordinates(study: StudyResult) -> Coordinates | None:
    """A line over all options for each trial with a result; None for fewer than two."""
    aim, done = study.aims[0], study.done
    if len(done) < 2:
        return None
    best_first = sorted(
        done, key=lambda row: row.figures[aim.name], reverse=aim.mode.value == "max"
    )
    values = [row.figures[aim.name] for row in done]
    y = curves.linear_axis(min(values), max(values))
    low, high = (readings.figure(aim.name, one) for one in (min(values), max(values)))
    count = len(study.searched)
    words = [one.name.rpartition(".")[2] for one in study.searched]
    axes = [
        (
            round(i / count * 100, 2),
            one.name,
            words[i] if words.count(words[i]) == 1 else one.name,
            *_ends(one),
        )
        for i, one in enumerate(study.searched)
    ]
    axes.append((100.0, aim.name, figures.label(aim.name), low, high))
    lines = []
    for rank, row in reversed(list(enumerate(best_first))):
        places = [(i / count, _place(one, row)) for i, one in enumerate(study.searched)] + [
            (1.0, _share(row, aim, y))
        ]
        path = "".join(
            f"{'L' if i else 'M'}{x * curves.WIDTH:.1f} {(1 - share) * curves.HEIGHT:.1f}"
            for i, (x, share) in enumerate(places)
        )
        tone = min(rank * TONES // len(best_first), TONES - 1)
        lines.append((path, f"t{tone}", _text(study, row)))
    return Coordinates(axes=axes, lines=lines)


def _place(one: Searched, row: TrialRow) -> float:
    return one.place(row.values[one.name])


def _share(row: TrialRow, aim: Aim, y: PlotAxis) -> float:
    values = (y.low, y.high)
    return (row.figures[aim.name] - values[0]) / (values[1] - values[0])


def _ends(one: Searched) -> tuple[str, str]:
    if one.choices is not None:
        return readings.value_text(one.words[0]), readings.value_text(one.words[-1])
    return readings.value_text(one.low), readings.value_text(one.high)


def _axis(name: str, values: Sequence[float]) -> PlotAxis:
    low, high = min(values), max(values)
    pad = (high - low) * PAD or abs(high) * PAD or 1.0
    axis = curves.linear_axis(low - pad, high + pad)
    if not figures.is_share(name):
        return axis
    return replace(axis, ticks=tuple((at, f"{at * 100:g} %") for at, _ in axis.ticks))


def _dot(study: StudyResult, row: TrialRow, x: float, y: float) -> TrialDot:
    best = study.front
    css = "best" if any(row is one for one in best) else "good" if row.is_done else "broken"
    # Values beyond the axis are drawn on its edge.
    return TrialDot(
        left=round(x * 100, 2),
        bottom=round(min(max(y, 0.0), 1.0) * 100, 2),
        css=css,
        text=_text(study, row),
    )


def _text(study: StudyResult, row: TrialRow) -> str:
    return f"trial {row.number}: {readings.objectives(study, row)}\n{readings.settings(row)}"


def _table_row(study: StudyResult, row: TrialRow, folder: Path) -> dict[str, Any]:
    inside = os.path.relpath(row.run, folder) if row.run else ""
    report = f"{inside}/report.html"
    return {
        "number": row.number,
        "is_best": any(row is one for one in study.front),
        "state": row.state,
        "reason": row.reason,
        "values": [
            readings.value_text(row.values[one.name]) if one.name in row.values else figures.MISSING
            for one in study.searched
        ],
        "figures": [readings.figure(aim.name, row.figures.get(aim.name)) for aim in study.aims],
        "seconds": figures.seconds(row.seconds),
        "dollars": figures.MISSING if row.dollars is None else dollars(row.dollars),
        "link": report if row.run and (folder / report).is_file() else "",
        "run": inside,
    }


def _facts(study: StudyResult) -> list[tuple[str, str]]:
    objectives = ", ".join(f"{aim.mode.value} {figures.label(aim.name)}" for aim in study.aims)
    searched = ", ".join(one.text for one in study.searched)
    return [("study", study.name), ("objective", objectives), ("searched", searched)]
