"""Changes since an earlier forecast, as text."""

from collections.abc import Sequence

from systolic.core.units import duration, gibibytes
from systolic.forecasting.comparison import FigureChange
from systolic.report import figures

SAME_RATIO = 0.0005
"""Change of a figure, as a share of it, below which both are the same."""


def lines(changes: Sequence[FigureChange], before: str, after: str) -> list[str]:
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
