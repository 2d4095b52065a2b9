"""The ops that changed between two dumps, as text and as rows of the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.core.units import duration
from systolic.forecasting.comparison import ForecastChanges, changed_ops
from systolic.forecasting.display.comparison import figure_texts
from systolic.forecasting.op_changes import OpChange, totals
from systolic.report import figures

ROWS = 20
"""Most rows on a screen, the largest changes first."""
PAGE_ROWS = 100
SHAPE = 48
"""Characters of a shape on a screen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRow:
    """A row of the page's table."""

    change: str
    before: str
    after: str
    difference: str
    kind: str
    phase: str
    place: str
    source: str
    shape: str
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


def lines(rows: Sequence[OpChange], step_seconds: float) -> list[str]:
    """The ops that changed as plain text."""
    changed = changed_ops(rows, step_seconds)
    texts = [summary(rows, changed)]
    for row in changed[:ROWS]:
        times = (
            _time(row.before_seconds, row.before_runs),
            _time(row.after_seconds, row.after_runs),
        )
        texts.append(
            f"  {row.change.value:<17} {times[0]:>10} {times[1]:>10} {signed(row.seconds):>11}  {identity(row)}"
        )
    return [*texts, *([text] if (text := rest(rows, changed[:ROWS])) else [])]


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


def identity(row: OpChange) -> str:
    """``matmul, backward, mlp, model.py:70, bf16[8,1024] x2``."""
    shape = row.shape if len(row.shape) <= SHAPE else f"{row.shape[: SHAPE - 1]}…"
    runs = max(row.before_runs, row.after_runs)
    many = f" x{runs:.0f}" if runs > 1 else ""
    place = "" if row.place == row.source else row.place
    return (
        ", ".join(part for part in (row.kind, row.phase, place, row.source, shape) if part) + many
    )


def for_page(against: ForecastChanges) -> Against:
    """Part of the page about the earlier forecast."""
    rows = against.ops
    changed = changed_ops(rows, against.step_seconds)
    return Against(
        name=against.name,
        figures=[figure_texts(change) for change in against.figures],
        summary=summary(rows, changed) if rows else "",
        ops=[
            PageRow(
                change=row.change.value,
                before=_time(row.before_seconds, row.before_runs),
                after=_time(row.after_seconds, row.after_runs),
                difference=signed(row.seconds),
                kind=row.kind,
                phase=row.phase,
                place=row.place,
                source=row.source,
                shape=row.shape,
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
