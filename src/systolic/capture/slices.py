"""One program over several slices: captured on each, and ranked by time or by cost for the same work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.capture.forecast import forecast_captured
from systolic.capture.program import Captured
from systolic.chips import Slice
from systolic.core.errors import DataError, LayoutError, OptionError, RunError
from systolic.forecasting.table import ForecastRow, ForecastTable
from systolic.sim.incomplete import NOTHING, Given

SAME = 0.02
"""Difference of two steps' FLOPs below which they do the same work."""
UNIT = "steps"


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A program's step on several slices, best first, those that don't fit or failed last."""

    table: ForecastTable
    notes: Sequence[str]
    """What the comparison rests on."""

    def to_json(self) -> dict[str, Any]:
        """``candidates`` in their order, ``rejected`` with reasons, ``best``, ``fastest`` and ``cheapest`` slices."""
        good = [row for row in self.table if row.fits]
        bad = [row for row in self.table if not row.fits]
        named = {"fastest": self.table.fastest, "cheapest": self.table.cheapest}
        return {
            "recipe": self.table.name,
            "best": good[0].on.name if good else None,
            **{word: None if row is None else row.on.name for word, row in named.items()},
            "candidates": [row.to_json() for row in good],
            "rejected": [{"slice": row.on.name, "reason": reason(row)} for row in bad],
            "notes": list(self.notes),
        }


def reason(row: ForecastRow) -> str:
    """Why a slice can't run the step; empty where it can."""
    if row.forecast is None:
        return row.problem
    rejected = row.forecast.rejected or {}
    need, have = rejected.get("need_bytes", 0), rejected.get("have_bytes", 0)
    return "" if row.fits else f"does not fit: {need} bytes needed, {have} available"


def rank(
    name: str,
    slices: Sequence[Slice],
    captured_for: Callable[[Slice], Captured],
    *,
    by_time: bool = False,
    given: Given = NOTHING,
) -> Ranking:
    """The step of a program on each of several slices.

    Args:
        name: The program, for the table.
        slices: In the order in which they are tried.
        captured_for: Captures it for one.
        by_time: Rank by throughput, rather than by dollars for the same work where prices are known.
        given: Trips and costs that the program leaves open.

    Raises:
        NotFoundError: there is no such command.
    """
    rows, works = [], []
    for on in slices:
        try:
            captured = captured_for(on)
            rows.append(ForecastRow(on=on, forecast=forecast_captured(captured, on, given)))
            works.append(_work(captured))
        except (DataError, LayoutError, OptionError, RunError) as error:
            rows.append(ForecastRow(on=on, problem=str(error)))
            works.append(0.0)
    scaled, notes = _scaled(rows, works)
    table = ForecastTable(name=name, rows=scaled)
    priced = all(row.usd_per_unit is not None for row in table if row.fits)

    def key(row: ForecastRow) -> tuple[bool, float]:
        made = row.forecast
        if made is None or not row.is_comparable:
            return True, 0.0
        if by_time or not priced:
            return False, -(made.units_per_second or 0.0)
        return False, row.usd_per_unit or 0.0

    if not by_time and not priced:
        notes.append("a slice has no price, so that they are ranked by time")
    return Ranking(table=replace(table, rows=sorted(scaled, key=key)), notes=notes)


def _work(captured: Captured) -> float:
    """FLOPs of a step's matmuls as the program wrote them, over all devices; 0 where one is not known."""
    found = [one["calls_per_step"] * one["flops"] for one in captured.programs]
    return sum(found) if all(found) else 0.0


def _scaled(
    rows: Sequence[ForecastRow], works: Sequence[float]
) -> tuple[list[ForecastRow], list[str]]:
    """Rows whose steps count by their work: where the batch follows the devices, a larger slice does more in one."""
    made = [work for row, work in zip(rows, works, strict=True) if row.forecast is not None]
    if not made:
        return list(rows), []
    if not all(made):
        notes = ["the FLOPs of the step are not known on each slice: steps count the same on all"]
        return [_counted(row, 1.0) for row in rows], notes if len(made) > 1 else []
    first = next(row for row in rows if row.forecast is not None)
    base = made[0]
    if all(abs(work - base) <= SAME * base for work in made):
        return [_counted(row, 1.0) for row in rows], []
    texts = [
        f"{work / base:.3g} on {row.on.name}"
        for row, work in zip(rows, works, strict=True)
        if work and row is not first
    ]
    note = f"a step's work follows the slice: of that of a step on {first.on.name}, by FLOPs, it is {', '.join(texts)}; steps/s and $ are of steps as on {first.on.name}"
    counted = [
        _counted(row, work / base if work else 1.0) for row, work in zip(rows, works, strict=True)
    ]
    return counted, [note]


def _counted(row: ForecastRow, units: float) -> ForecastRow:
    if row.forecast is None:
        return row
    return replace(row, forecast=replace(row.forecast, unit=UNIT, units=units))
