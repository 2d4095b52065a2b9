"""HTML page of a study: charts of its results over trials and against each option, the options' importance, and its trials."""

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import dollars
from systolic.job import Mode
from systolic.report import figures, pages
from systolic.report.pages import (
    CoordinateAxis,
    CoordinateLine,
    Coordinates,
    Dot,
    LegendKey,
    Plot,
    PlotAxis,
    PlotLine,
    Scale,
    Tile,
    fill,
)
from systolic.tuning.display import view
from systolic.tuning.objective import Aim, usual
from systolic.tuning.results import StudyResult, TrialRow
from systolic.tuning.search import Searched

PAD = 0.06
"""Margin of a value axis beyond the outermost values, as a share of their range."""
TONES = 5
"""Number of line colours, from the best fifth to the worst."""


STRETCH = 2.0
"""Stretch of the value axis for the best value so far, in ranges of the results without outliers."""
SIDE = 0.05
"""Margin of an option's axis beyond its range, as a share of it, so that dots at the ends are whole."""
TICKS = 4
"""Most ticks of an option's axis, as far as they are chosen here."""
SPREAD = 0.5
"""Share of a choice's column over which its dots are spread."""
GOLDEN = 0.618
"""Step between the places of successive trials in a column, in which neighbours are far apart."""
NAME = "report.html"
MOST_ROWS = 500
"""Most rows of the table; the best trials are kept."""


def history(study: StudyResult) -> Plot | None:
    """Values of the first objective over trials, with the best value so far; None without a result."""
    aim = study.aims[0]
    shown = [row for row in study.rows if aim.name in row.figures]
    so_far = study.best_so_far()
    if not so_far:
        return None
    x = _whole_axis(0, max(study.total - 1, 1))
    done = [row.figures[aim.name] for row in study.done]
    near = usual(done, aim.mode)
    low, high = min(near), max(near)
    # The line begins at the first value that the axis can show; outliers before it are dots on the edge.
    reach = STRETCH * (high - low)
    line = [point for point in so_far if low - reach <= point[1] <= high + reach]
    y = _axis(study, aim.name, [*near, *(value for _, value in line)])
    steps: list[tuple[float, float]] = []
    for number, value in line:
        steps += [(number, steps[-1][1] if steps else value), (number, value)]
    steps.append((shown[-1].number, steps[-1][1]))
    return Plot(
        x=x,
        y=y,
        dots=[_dot(study, row, x, y, row.number, row.figures[aim.name]) for row in shown],
        lines=[PlotLine(css="so-far", path=pages.path(steps, x, y))],
        x_name="trial",
        y_name=figures.label(aim.name),
        beyond=sum(not y.low <= value <= y.high for value in done),
    )


def slices(study: StudyResult) -> list[Plot]:
    """The first objective against each option; empty without a result."""
    if not study.done:
        return []
    # Axis of the first objective that outliers do not stretch.
    aim = study.aims[0]
    y = _axis(study, aim.name, usual([row.figures[aim.name] for row in study.done], aim.mode))
    return [_slice(study, option, y) for option in study.searched]


def _slice(study: StudyResult, option: Searched, y: PlotAxis) -> Plot:
    name = study.aims[0].name
    x = _option_axis(option)
    shown = [row for row in study.rows if name in row.figures and option.name in row.values]
    dots = [_dot(study, row, x, y, _along(option, row), row.figures[name]) for row in shown]
    words = [] if option.choices is None else [view.value_text(word) for word in option.words]
    # The best is drawn last, on top of the others.
    dots.sort(key=lambda dot: ("broken", "good", "best").index(dot.css))
    return Plot(
        x=x,
        y=y,
        dots=dots,
        words=words,
        x_name=option.name,
        y_name=figures.label(name),
        beyond=sum(not y.low <= row.figures[name] <= y.high for row in study.done),
    )


def _along(option: Searched, row: TrialRow) -> float:
    """Value of a trial along an option's axis; the dots of a choice are spread over its column."""
    if option.choices is None:
        return row.values[option.name]
    shift = (row.number * GOLDEN % 1 - 0.5) * SPREAD
    return list(option.words).index(row.values[option.name]) + shift


def _option_axis(option: Searched) -> PlotAxis:
    """Axis of an option: its whole range, logarithmic as it is searched; a column for each choice."""
    if option.choices is not None:
        return PlotAxis(low=-0.5, high=len(option.words) - 0.5, ticks=())
    if option.log:
        inner = pages.log_axis(option.low, option.high)
        factor = (inner.high / inner.low) ** SIDE
        low, high, scale = inner.low / factor, inner.high * factor, Scale.log
    else:
        inner = (_whole_axis if option.whole else pages.linear_axis)(option.low, option.high, TICKS)
        pad = (inner.high - inner.low) * SIDE
        low, high, scale = inner.low - pad, inner.high + pad, Scale.linear
    ticks = [tick for tick in inner.ticks if not option.whole or tick[0] == round(tick[0])]
    if option.log:
        ticks = [(at, f"{at:g}".replace("e-0", "e-")) for at, _ in ticks]
    ticks = ticks[:: math.ceil(len(ticks) / (TICKS + 1)) or 1]
    return PlotAxis(low=low, high=high, ticks=tuple(ticks), scale=scale)


def _whole_axis(low: float, high: float, num_ticks: int = 5) -> PlotAxis:
    """An axis whose ticks are whole numbers."""
    return pages.linear_axis(low, high, max(min(num_ticks, int(high - low)), 1))


def front(study: StudyResult) -> list[Plot]:
    """The first objective against each of the others, with the Pareto front."""
    first, fronts = study.aims[0], []
    for aim in study.aims[1:]:
        points = [(row.figures[aim.name], row.figures[first.name], row) for row in study.done]
        if not points:
            continue
        x = _axis(study, aim.name, [p[0] for p in points])
        y = _axis(study, first.name, [p[1] for p in points])
        kept = {row.number for row in study.front}
        line = sorted((a, b) for a, b, row in points if row.number in kept)
        fronts.append(
            Plot(
                x=x,
                y=y,
                dots=[_dot(study, row, x, y, a, b) for a, b, row in points],
                lines=[
                    PlotLine(
                        css="so-far",
                        path=pages.path(line, x, y) if len(study.aims) == 2 else "",
                    )
                ],
                x_name=figures.label(aim.name),
                y_name=figures.label(first.name),
            )
        )
    return fronts


def coordinates(study: StudyResult) -> Coordinates | None:
    """A line over all options for each trial with a result; None for fewer than two, or for a single option."""
    aim, done = study.aims[0], study.done
    if len(done) < 2 or len(study.searched) < 2:
        return None
    best_first = sorted(
        done, key=lambda row: row.figures[aim.name], reverse=aim.mode.value == "max"
    )
    values = [row.figures[aim.name] for row in done]
    y = pages.linear_axis(min(values), max(values))
    low, high = (view.figure(study, aim.name, option) for option in (min(values), max(values)))
    count = len(study.searched)
    words = [option.name.rpartition(".")[2] for option in study.searched]
    axes = [
        CoordinateAxis(
            round(i / count * 100, 2),
            option.name,
            words[i] if words.count(words[i]) == 1 else option.name,
            *_ends(option),
        )
        for i, option in enumerate(study.searched)
    ]
    axes.append(CoordinateAxis(100.0, aim.name, figures.label(aim.name), low, high))
    lines = []
    for rank, row in reversed(list(enumerate(best_first))):
        places = [
            (i / count, option.place(row.values[option.name]))
            for i, option in enumerate(study.searched)
        ] + [(1.0, _share(row, aim, y))]
        tone = min(rank * TONES // len(best_first), TONES - 1)
        lines.append(CoordinateLine(pages.across(places), f"t{tone}", _text(study, row)))
    return Coordinates(axes=axes, lines=lines)


def _share(row: TrialRow, aim: Aim, y: PlotAxis) -> float:
    values = (y.low, y.high)
    return (row.figures[aim.name] - values[0]) / (values[1] - values[0])


def _ends(option: Searched) -> tuple[str, str]:
    if option.choices is not None:
        return view.value_text(option.words[0]), view.value_text(option.words[-1])
    return view.value_text(option.low), view.value_text(option.high)


def _axis(study: StudyResult, name: str, values: Sequence[float]) -> PlotAxis:
    low, high = min(values), max(values)
    pad = (high - low) * PAD or abs(high) * PAD or 1.0
    axis = pages.linear_axis(low - pad, high + pad)
    if not figures.is_share(name, study.shares):
        return axis
    return replace(axis, ticks=tuple((at, f"{at * 100:g} %") for at, _ in axis.ticks))


def _dot(study: StudyResult, row: TrialRow, x: PlotAxis, y: PlotAxis, a: float, b: float) -> Dot:
    best = any(row is kept for kept in study.front)
    css = "best" if best else "good" if row.is_done else "broken"
    hue = pages.hue(0 if css != "broken" else pages.COLOURS)
    return pages.dot(x, y, a, b, _text(study, row), css=css, hue=hue)


def legend(study: StudyResult, shown: Sequence[Plot], ringed: str = "") -> list[LegendKey]:
    """Marks of the trials in plots.

    Args:
        study: The study.
        shown: Plots that share the legend, and show the same trials.
        ringed: Text for the ringed dots; empty for that of the study's objectives.
    """
    keys = [LegendKey(text="a trial's result", hue=pages.hue(0))]
    if any(dot.css == "broken" for plot in shown for dot in plot.dots):
        hue = pages.hue(pages.COLOURS)
        keys.append(LegendKey(text="stopped early (last evaluation)", hue=hue))
    one_aim = len(study.aims) == 1
    keys.append(
        LegendKey(text=ringed or ("best" if one_aim else "on the Pareto front"), mark="ring")
    )
    if beyond := max((plot.beyond for plot in shown), default=0):
        text = f"{figures.plural(beyond, 'outlier')} drawn on the edge"
        keys.append(LegendKey(text=text, mark=""))
    return keys


def _text(study: StudyResult, row: TrialRow) -> str:
    return f"trial {row.number}: {view.objectives(study, row)}\n{view.settings_of(row)}"


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
    verdict = view.verdict_of(study)
    hint = "" if study.repeats else view.luck_of(study)
    over_trials = history(study)
    by_option = slices(study)
    fronts = front(study)
    page = {
        "heading": f"{study.recipe}: {figures.plural(study.total, 'trial')}",
        "verdict": verdict,
        "lead": "; ".join(filter(None, (verdict.sentence, hint))),
        "facts": _facts(study),
        "tiles": tiles(study),
        "words": [shlex.quote(word) for word in shlex.split(study.command)],
        "repeats": study.repeats,
        "chart": over_trials,
        "slices": by_option,
        "fronts": fronts,
        "chart_legend": legend(study, [over_trials] if over_trials else []),
        "slices_legend": legend(study, by_option),
        "front_legend": legend(study, [], "on the Pareto front"),
        "importance": list(study.importance.items()),
        "whole_percent": view.whole_percent,
        "spreads": view.spreads_of(study),
        "edges": view.edges_of(study),
        "plural": figures.plural,
        "coordinates": coordinates(study),
        "names": [option.name for option in study.searched],
        "aims": [aim.name for aim in study.aims],
        "label": figures.label,
        # Objectives have columns of their own.
        "timed": all(aim.name != "seconds" for aim in study.aims),
        "priced": study.dollars is not None and all(aim.name != "dollars" for aim in study.aims),
        "rows": [_table_row(study, row, folder) for row in ranked(study)[:MOST_ROWS]],
        "hidden": max(len(study.rows) - MOST_ROWS, 0),
    }
    return fill("tune.html", page)


def tiles(study: StudyResult) -> list[Tile]:
    """Tiles of the best trial's figures and of the study's cost."""
    best, cards = study.best, []
    if best is not None:
        cards = [
            Tile(
                label=f"best {figures.label(aim.name)}",
                value=view.figure(study, aim.name, best.figures[aim.name]),
                small=f"trial {best.number}",
            )
            for aim in study.aims
        ]
    cards.append(
        Tile(
            label="trials",
            value=f"{study.finished} of {study.total}",
            small=view.counted(study),
        )
    )
    seconds = sum(row.seconds or 0.0 for row in study.rows)
    cards.append(Tile(label="time of all trials", value=figures.seconds(seconds)))
    if study.dollars is not None:
        cards.append(
            Tile(
                label="cost",
                value=dollars(study.dollars),
                small=", ".join(filter(None, ("forecast, training steps only", study.price))),
            )
        )
    return cards


def ranked(study: StudyResult) -> list[TrialRow]:
    """Trials by the first objective, best first, then those without a result, by number."""
    aim = study.aims[0]
    sign = -1 if aim.mode is Mode.max else 1

    def place(row: TrialRow) -> tuple[bool, float, int]:
        return not row.is_done, sign * row.figures[aim.name] if row.is_done else 0.0, row.number

    return sorted(study.rows, key=place)


def _table_row(study: StudyResult, row: TrialRow, folder: Path) -> dict[str, Any]:
    inside = os.path.relpath(row.run, folder) if row.run else ""
    report = f"{inside}/report.html"
    return {
        "number": row.number,
        "is_best": any(row is best for best in study.front),
        "state": row.state,
        "reason": row.reason,
        "values": [
            view.value_text(row.values[option.name])
            if option.name in row.values
            else figures.MISSING
            for option in study.searched
        ],
        "figures": [view.figure(study, aim.name, row.figures.get(aim.name)) for aim in study.aims],
        "seconds": figures.seconds(row.seconds),
        "dollars": figures.MISSING if row.dollars is None else dollars(row.dollars),
        "link": report if row.run and (folder / report).is_file() else "",
        "run": inside,
    }


def _facts(study: StudyResult) -> list[tuple[str, str]]:
    objectives = ", ".join(f"{aim.mode.value} {figures.label(aim.name)}" for aim in study.aims)
    searched = ", ".join(option.text for option in study.searched)
    return [("study", study.name), ("objective", objectives), ("searched", searched)]
