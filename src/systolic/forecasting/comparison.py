"""Changes since an earlier forecast: of its figures, and of the ops of two dumps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.core.errors import OptionError
from systolic.core.files import read_given
from systolic.forecasting.costs import roll_up
from systolic.forecasting.op_changes import OpChange, OpFate
from systolic.report import figures

ROWS = 12
"""Most rows of a group in a comparison, the largest changes first."""
SAME = 0.0005
"""Changes below this share of the step are left out."""
LEAST = 0.0002
"""Changes of an op's time below this share of the step have no row of their own."""


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


@dataclass(frozen=True, kw_only=True)
class ForecastChanges:
    """A forecast beside an earlier one."""

    before: Mapping[str, Any]
    """JSON of the earlier one."""
    figures: Sequence[FigureChange]
    """Step, memory, money, resources and places."""
    ops: Sequence[OpChange] = ()
    """Ops of both, where two dumps are compared."""
    step_seconds: float = 0.0
    """Seconds of the later one's step."""

    @property
    def name(self) -> str:
        """The earlier forecast: ``lm on v5e-4``."""
        return f"{self.before['recipe']} on {self.before['slice']}"

    def to_json(self) -> dict[str, Any]:
        """Figures as ``against``; ops that changed as ``against_ops``, where two dumps are compared."""
        record: dict[str, Any] = {"against": [figure.to_json() for figure in self.figures]}
        if self.ops:
            rows = changed_ops(self.ops, self.step_seconds)
            record["against_ops"] = [row.to_json() for row in rows]
        return record


def changed_ops(rows: Sequence[OpChange], step_seconds: float) -> list[OpChange]:
    """Rows that a table has: what changed by more than :data:`LEAST` of the step, the largest first."""
    least = LEAST * step_seconds
    return [row for row in rows if row.change is not OpFate.same and abs(row.seconds) > least]


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


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FigureChange]:
    """Compares the JSON of two forecasts: step, memory, money, resources, places."""
    changes = [
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
    changes = [change for change in changes if (change.before, change.after) != (None, None)]
    old, new = before["hbm"].get("by_kind") or {}, after["hbm"].get("by_kind") or {}
    changes += _table("memory", old, new, "B", 0.0)
    steps = [record.get("step_seconds") or 0.0 for record in (before, after)]
    least = SAME * max(steps)
    changes += _table(
        "time by resource", before["time_by_resource"], after["time_by_resource"], "s", least
    )
    old, new = before.get("time_by_layer") or {}, after.get("time_by_layer") or {}
    if old and new:
        names = roll_up(
            {name: old.get(name, 0.0) + new.get(name, 0.0) for name in {**old, **new}}, ROWS
        )
        changes += _table("time by layer", _summed(old, names), _summed(new, names), "s", least)
    return changes


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
    sums: dict[str, float] = {}
    for path, spent in seconds.items():
        sums[names[path]] = sums.get(names[path], 0.0) + spent
    return sums
