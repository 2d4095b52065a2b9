"""Changes between the JSON of two forecasts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import OptionError
from systolic.core.files import read_given
from systolic.core.units import duration, gibibytes
from systolic.forecasting.costs import roll_up
from systolic.report import figures

ROWS = 12
"""Most rows of a group in a comparison, the largest changes first."""
SAME = 0.0005
"""Changes below this share of the step are left out."""


def read(path: Path) -> dict[str, Any]:
    """Reads the JSON of another forecast.

    Raises:
        NotFoundError: the file cannot be read.
        OptionError: it holds something else.
        DataError: it is cut short.
    """
    again = "write one with systolic forecast … --json > forecast.json"
    record = read_given(path, again)
    if not isinstance(record, dict) or not {"slice", "fits", "hbm", "time_by_resource"} <= set(
        record
    ):
        raise OptionError(f"{path} is JSON but not a forecast; {again}")
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureChange:
    """One figure before and after; None where a side has none."""

    group: str
    name: str
    before: float | None
    after: float | None
    unit: str
    """``s``, ``B``, ``share``, ``$`` or the unit of a throughput."""

    @property
    def ratio(self) -> float | None:
        """After over before, less 1."""
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1

    def to_json(self) -> dict[str, Any]:
        """The values as JSON."""
        return {
            "group": self.group,
            "name": self.name,
            "before": self.before,
            "after": self.after,
            "unit": self.unit,
        }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Compares the JSON of two forecasts: step, memory, money, resources, places."""
    found = [
        _change("", "step", before, after, ("step_seconds",), "s"),
        _change("", "MFU", before, after, ("mfu",), "share"),
        _change("", "tokens/s", before, after, ("tokens_per_second",), ""),
        _change("", "examples/s", before, after, ("examples_per_second",), ""),
        _change("", "calls/s", before, after, ("calls_per_second",), ""),
        _change("", "peak memory", before, after, ("hbm", "peak_bytes"), "B"),
        _change("", "per billion tokens", before, after, ("usd_per_billion_tokens",), "$"),
        _change("", "per million examples", before, after, ("usd_per_million_examples",), "$"),
        _change("", "per million calls", before, after, ("usd_per_million_calls",), "$"),
    ]
    found = [change for change in found if (change.before, change.after) != (None, None)]
    old, new = before["hbm"].get("by_kind") or {}, after["hbm"].get("by_kind") or {}
    found += _table("memory", old, new, "B", 0.0)
    steps = [record.get("step_seconds") or 0.0 for record in (before, after)]
    least = SAME * max(steps)
    found += _table(
        "time by resource", before["time_by_resource"], after["time_by_resource"], "s", least
    )
    old, new = before.get("time_by_layer") or {}, after.get("time_by_layer") or {}
    if old and new:
        names = roll_up(
            {name: old.get(name, 0.0) + new.get(name, 0.0) for name in {**old, **new}}, ROWS
        )
        found += _table("time by layer", _summed(old, names), _summed(new, names), "s", least)
    return found


def lines(changes: Sequence[FigureChange], before: str, after: str) -> list[str]:
    """The changes as a table of plain text."""
    shown = [f"from {before} to {after}"]
    group = ""
    for change in changes:
        if change.group != group:
            group = change.group
            shown.append(group)
        name, before_text, after_text, told = figure_texts(change)
        name = name if len(name) <= 34 else f"…{name[-33:]}"
        shown.append(f"  {name:<34}{before_text:>12}  {after_text:>12}  {told:>9}".rstrip())
    return shown


def figure_texts(change: FigureChange) -> tuple[str, str, str, str]:
    """Name, before, after and the difference of a figure."""
    told = "" if change.ratio is None else _ratio(change.ratio)
    return change.name, _text(change.before, change.unit), _text(change.after, change.unit), told


def depths(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A line where one of two forecasts is of a schedule and the other of a full compile; empty where both are alike or unknown."""
    quick = [record.get("quick") for record in (before, after)]
    if None in quick or quick[0] == quick[1]:
        return ""
    words = ["--quick, with op times estimated", "of a full compile"]
    first, second = words if quick[0] else reversed(words)
    return f"the first is {first}, the second {second}: part of the difference in time comes from that; forecast both the same way to compare"


def _ratio(ratio: float) -> str:
    if abs(ratio) < SAME:
        return "same"
    return f"{ratio * 100:+.1f} %" if ratio < 2 else f"× {ratio + 1:.3g}"


def _change(
    group: str,
    name: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    path: tuple[str, ...],
    unit: str,
) -> FigureChange:
    return FigureChange(
        group=group, name=name, before=_at(before, path), after=_at(after, path), unit=unit
    )


def _at(record: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = record
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return figures.number(value)


def _table(
    group: str, old: Mapping[str, float], new: Mapping[str, float], unit: str, least: float
) -> list[FigureChange]:
    """Rows of both sides that matter, the largest change first."""
    rows = [
        FigureChange(
            group=group, name=name, before=old.get(name, 0.0), after=new.get(name, 0.0), unit=unit
        )
        for name in {**old, **new}
    ]
    moved = [row for row in rows if abs((row.after or 0.0) - (row.before or 0.0)) > least]
    moved.sort(key=lambda row: -abs((row.after or 0.0) - (row.before or 0.0)))
    return moved[:ROWS]


def _summed(seconds: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for path, spent in seconds.items():
        found[names[path]] = found.get(names[path], 0.0) + spent
    return found


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
