"""HTML page of a study: best value so far, the objective against each option, their importance, every trial with its run."""

import os
import shlex
from pathlib import Path
from typing import Any

from systolic.core.files import write_atomically
from systolic.core.units import dollars
from systolic.job import Mode
from systolic.report import figures
from systolic.report.pages import Tile, fill
from systolic.tuning.display import plots, readings
from systolic.tuning.results import StudyResult, TrialRow

NAME = "report.html"
MOST_ROWS = 500
"""Most rows of the table; the best trials are kept."""


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
    history = plots.history(study)
    slices = plots.slices(study)
    fronts = plots.front(study)
    page = {
        "heading": f"{study.recipe}: {figures.plural(study.total, 'trial')}",
        "verdict": verdict,
        "lead": "; ".join(filter(None, (verdict.sentence, hint))),
        "facts": _facts(study),
        "tiles": tiles(study),
        "words": [shlex.quote(word) for word in shlex.split(study.command)],
        "repeats": study.repeats,
        "chart": history,
        "slices": slices,
        "fronts": fronts,
        "chart_legend": plots.legend(study, [history] if history else []),
        "slices_legend": plots.legend(study, slices),
        "front_legend": plots.legend(study, [], "on the Pareto front"),
        "importance": list(study.importance.items()),
        "whole_percent": readings.whole_percent,
        "spreads": readings.spreads(study),
        "edges": readings.edges(study),
        "plural": figures.plural,
        "coordinates": plots.coordinates(study),
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
                value=readings.figure(study, aim.name, best.figures[aim.name]),
                small=f"trial {best.number}",
            )
            for aim in study.aims
        ]
    cards.append(
        Tile(
            label="trials",
            value=f"{study.finished} of {study.total}",
            small=readings.counted(study),
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
            readings.value_text(row.values[option.name])
            if option.name in row.values
            else figures.MISSING
            for option in study.searched
        ],
        "figures": [
            readings.figure(study, aim.name, row.figures.get(aim.name)) for aim in study.aims
        ],
        "seconds": figures.seconds(row.seconds),
        "dollars": figures.MISSING if row.dollars is None else dollars(row.dollars),
        "link": report if row.run and (folder / report).is_file() else "",
        "run": inside,
    }


def _facts(study: StudyResult) -> list[tuple[str, str]]:
    objectives = ", ".join(f"{aim.mode.value} {figures.label(aim.name)}" for aim in study.aims)
    searched = ", ".join(option.text for option in study.searched)
    return [("study", study.name), ("objective", objectives), ("searched", searched)]
