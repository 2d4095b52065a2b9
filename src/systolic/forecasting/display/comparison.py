"""The changes between two forecasts: the screen, and the ops as rows of the page."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from systolic.core.units import duration, gibibytes
from systolic.forecasting.comparison import FigureChange, ForecastChanges, changed_ops
from systolic.forecasting.display.text import MAX_WIDTH
from systolic.forecasting.op_changes import OpChange, totals
from systolic.report import figures
from systolic.report.output import print_json
from systolic.report.terminal import one_line

SAME_RATIO = 0.0005
"""Change of a figure, as a share of it, below which both are the same."""
ROWS = 20
"""Most rows on a screen, the largest changes first."""
PAGE_ROWS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRow:
    """A row of the page's table."""

    op: OpChange
    before: str
    after: str
    difference: str
    names: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """Part of a page about the forecast that it is compared with."""

    name: str
    figures: Sequence[tuple[str, str, str, str]]
    """Name, before, after and the difference."""
    summary: str
    ops: Sequence[PageRow]
    rest: str


def show_changes(changes: ForecastChanges, *, json: bool = False) -> int:
    """Prints what changed between two saved forecasts; returns the exit code, 1 where the later one does not fit.

    Args:
        changes: The later one beside the earlier one.
        json: Print one JSON object on stdout.
    """
    if json:
        print_json({**changes.record, **changes.to_json()})
    else:
        print_changes(changes)
    return 0 if changes.after.fits else 1


def print_changes(changes: ForecastChanges) -> None:
    """The figures and ops that changed since the earlier forecast."""
    columns = min(shutil.get_terminal_size((80, 24)).columns, MAX_WIDTH)
    texts = figure_lines(changes.figures, changes.before.name, changes.after.name)
    if changes.ops:
        texts += lines(changes.ops, changes.step_seconds, columns)
    for note in changes.notes:
        texts += wrap(note, columns, break_long_words=False, break_on_hyphens=False)
    print("\n".join(texts))


def lines(rows: Sequence[OpChange], step_seconds: float, width: int) -> list[str]:
    """The ops that changed as plain text of ``width`` columns."""
    changed = changed_ops(rows, step_seconds)
    texts = wrap(summary(rows, changed), width)
    widest = max((len(row.change.value) for row in changed[:ROWS]), default=0)
    if changed:
        texts.append(f"  {'':<{widest}} {'before':>10} {'after':>10} {'difference':>11}  op")
    for row in changed[:ROWS]:
        before = _time(row.before_seconds, row.before_runs)
        after = _time(row.after_seconds, row.after_runs)
        text = (
            f"  {row.change.value:<{widest}} {before:>10} {after:>10} {signed(row.seconds):>11}  "
        )
        texts.append(text + identity(row, width - len(text)))
    return [*texts, *wrap(rest(rows, changed[:ROWS]), width, subsequent_indent="  ")]


def summary(rows: Sequence[OpChange], changed: Sequence[OpChange]) -> str:
    """``ops that changed, by time: 3 slower +1.2 ms, 1 gone -0.1 ms``."""
    if not changed:
        return f"no op changed: the {figures.plural(len(rows), 'row')} of both schedules take the same time"
    parts = [
        f"{count} {change.value} {signed(seconds)}"
        for change, (count, seconds) in sorted(
            totals(changed).items(), key=lambda item: -abs(item[1][1])
        )
    ]
    return f"ops that changed, by time: {', '.join(parts)}"


def rest(rows: Sequence[OpChange], changed: Sequence[OpChange]) -> str:
    """The rows beside those that changed; empty without any."""
    others = len(rows) - len(changed)
    seconds = sum(row.seconds for row in rows) - sum(row.seconds for row in changed)
    same = sum(row.after_seconds for row in rows) - sum(row.after_seconds for row in changed)
    if not others:
        return ""
    return f"  {figures.plural(others, 'other row')} of ops that are alike or changed less: {duration(same)} of the step, {signed(seconds)}"


def identity(row: OpChange, width: int) -> str:
    """``matmul, backward, mlp, model.py:70, bf16[8,1024] x2``, of which the shape, the phase and the place are left out where there is no room."""
    runs = max(row.before_runs, row.after_runs)
    many = f" x{runs:.0f}" if runs > 1 else ""
    source = row.source.rpartition("/")[2]
    place = "" if row.layer == row.source else row.layer
    parts = [row.kind, row.phase, place, source, row.shape]
    for least in (row.shape, row.phase, place):
        if len(", ".join(filter(None, parts))) > width - len(many) and any((source, place)):
            parts.remove(least)
    return one_line(", ".join(filter(None, parts)), width - len(many)) + many


def for_page(against: ForecastChanges) -> Against:
    """Part of the page about the earlier forecast."""
    rows = against.ops
    changed = changed_ops(rows, against.step_seconds)
    return Against(
        name=against.before.name,
        figures=[figure_texts(change) for change in against.figures],
        summary=summary(rows, changed) if rows else "",
        ops=[
            PageRow(
                op=row,
                before=_time(row.before_seconds, row.before_runs),
                after=_time(row.after_seconds, row.after_runs),
                difference=signed(row.seconds),
                names=f"{', '.join(row.before_ops) or 'none'} → {', '.join(row.after_ops) or 'none'}",
            )
            for row in changed[:PAGE_ROWS]
        ],
        rest=rest(rows, changed[:PAGE_ROWS]).strip() if rows else "",
    )


def signed(seconds: float) -> str:
    """``+1.2 ms``, ``-30 us``."""
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}" if seconds else "0"


def _time(seconds: float, runs: float) -> str:
    return duration(seconds) if runs else figures.MISSING


def figure_lines(changes: Sequence[FigureChange], before: str, after: str) -> list[str]:
    """The changes as a table of plain text."""
    shown = [f"from {before} to {after}"]
    group = ""
    for change in changes:
        if change.group != group:
            group = change.group
            shown.append(group)
        name, before_text, after_text, difference = figure_texts(change)
        name = name if len(name) <= 34 else f"…{name[-33:]}"
        shown.append(f"  {name:<34}{before_text:>12}  {after_text:>12}  {difference:>9}".rstrip())
    return shown


def figure_texts(change: FigureChange) -> tuple[str, str, str, str]:
    """Name, before, after and the difference of a figure."""
    difference = "" if change.ratio is None else _ratio(change.ratio)
    return (
        change.name,
        _text(change.before, change.unit),
        _text(change.after, change.unit),
        difference,
    )


def _ratio(ratio: float) -> str:
    if abs(ratio) < SAME_RATIO:
        return "same"
    return f"{ratio * 100:+.1f} %" if ratio < 2 else f"× {ratio + 1:.3g}"


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return figures.MISSING
    if unit == "s":
        return duration(value) if value else "0"
    if unit == "B":
        return gibibytes(value)
    if unit == "share":
        return figures.percent(value)
    return f"{unit}{figures.si(value)}"
