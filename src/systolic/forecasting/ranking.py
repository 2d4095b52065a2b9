"""One program over several slices: captured on each, and ranked by time or by cost for the same work."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.capture.program import Captured, OpenLoop
from systolic.chips import Slice
from systolic.core.errors import DataError, LayoutError, OptionError, RunError
from systolic.forecasting.captured import StepPart, forecast_parts, parts_of
from systolic.forecasting.table import ForecastRow, ForecastTable
from systolic.sim.incomplete import NOTHING, Given
from systolic.sim.timeline import Span

WORK_TOLERANCE = 0.02
"""Difference of two steps' FLOPs below which they do the same work."""
UNIT = "steps"
WRITTEN = "by FLOPs"
EXECUTED = (
    "by FLOPs that its devices execute, loops with their trips and what is computed twice counted"
)


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of a step's matmuls over all devices; programs without any, and those of unknown work, have 0."""

    written: float = 0.0
    """FLOPs as the program wrote them, loops with the trips of the compiled program: what several devices compute alike counts once."""
    executed: float = 0.0
    """FLOPs as the compiled programs execute them, loops with their trips: recomputed and replicated ones count."""
    is_least: bool = False
    """Whether ``written`` leaves some out: a loop whose trips are not known from its program either, and a program that came lowered."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A program's step on several slices, best first, those that don't fit or failed last."""

    table: ForecastTable
    notes: Sequence[str]
    """Basis of the comparison."""
    goal: str = ""
    """``cost`` or ``time``."""
    quick: bool = True
    """Whether compiles stopped at the schedule."""
    seconds: float = 0.0
    """That the ranking took."""

    def to_json(self) -> dict[str, Any]:
        """``candidates`` in their order, ``rejected`` with reasons, ``best``, ``fastest`` and ``cheapest`` slices."""
        good = [row for row in self.table if row.fits]
        bad = [row for row in self.table if not row.fits]
        named = {"fastest": self.table.fastest, "cheapest": self.table.cheapest}
        return {
            "goal": self.goal,
            "recipe": self.table.name,
            "best": good[0].on.name if good and self.table.of_same_work else None,
            **{word: None if row is None else row.on.name for word, row in named.items()},
            "candidates": [row.to_json() for row in good],
            "rejected": [{"slice": row.on.name, "reason": reason(row)} for row in bad],
            "notes": list(self.notes),
            "quick": self.quick,
            "seconds": self.seconds,
        }


def reason(row: ForecastRow) -> str:
    """Why a slice can't run the step; empty where it can."""
    if row.forecast is None:
        return row.problem
    short = row.forecast.rejected
    if row.fits or short is None:
        return ""
    return f"does not fit: {short.need_bytes} bytes needed, {short.have_bytes} available"


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
    cautions = defaultdict[str, list[str]](list)
    for on in slices:
        try:
            captured = captured_for(on)
            parts = parts_of(captured, on, given)
            rows.append(ForecastRow(on=on, forecast=forecast_parts(captured, parts, on)))
            works.append(_work(parts))
            for caution in captured.answer.cautions:
                cautions[caution].append(on.name)
        except (DataError, LayoutError, OptionError, RunError) as error:
            rows.append(ForecastRow(on=on, problem=str(error)))
            works.append(StepFlops())
    scaled, notes, same = _scaled(rows, works)
    notes = [*(_on(names, text, slices) for text, names in cautions.items()), *notes]
    table = ForecastTable(name=name, rows=scaled, of_same_work=same)
    priced = all(row.usd_per_unit is not None for row in table if row.fits)

    def key(row: ForecastRow) -> tuple[bool, float]:
        forecast = row.forecast
        if not same:  # in their order
            return not row.fits, 0.0
        if forecast is None or not row.is_comparable:
            return True, 0.0
        if by_time or not priced:
            return False, -(forecast.units_per_second or 0.0)
        return False, row.usd_per_unit or 0.0

    if same and not by_time and not priced:
        notes.append("a slice has no price, so that they are ranked by time")
    return Ranking(table=replace(table, rows=sorted(scaled, key=key)), notes=notes)


def _on(names: Sequence[str], caution: str, slices: Sequence[Slice]) -> str:
    """A caution, with the slices that it is of unless these are all."""
    return caution if len(names) == len(slices) else f"on {', '.join(names)}: {caution}"


def _work(parts: Sequence[StepPart]) -> StepFlops:
    turned = [turns_of(part) for part in parts]
    written = sum(
        part.copies * part.calls * (part.program.flops + (more or 0.0))
        for part, more in zip(parts, turned, strict=True)
    )
    executed = sum(
        part.copies
        * part.calls
        * len(part.program.places)
        * sum(part.timeline.flops_by_format.values())
        for part in parts
        if part.timeline is not None
    )
    # Devices execute no less than what is written: of a loop whose turns the compiler joined the trips are others.
    joined = any(turned) and written > (1 + WORK_TOLERANCE) * executed
    return StepFlops(
        written=written,
        executed=executed,
        is_least=joined or any(more is None for more in turned),
    )


def turns_of(part: StepPart) -> float | None:
    """FLOPs of a program's loops of unknown length beyond one trip of each, by the trips of its compiled loops; None where these are not known."""
    if not part.program.flops_are_least:
        return 0.0
    loops = part.program.open_loops
    if not loops or part.timeline is None or part.timeline.incomplete:
        return None
    trips = _trips(part.timeline.spans)
    flops = [_turned(loop, trips) for loop in loops]
    if any(more is None for more in flops):
        return None
    return sum(more or 0.0 for more in flops) - sum(map(_once, loops))


def _trips(spans: Sequence[Span]) -> dict[str, set[float]]:
    """Trips of the loops with matmuls by their line."""
    trips: dict[str, set[float]] = defaultdict(set)
    for span in spans:
        if span.opcode == "while" and any(flops_of(inner) for inner in span.inside):
            file, _, line = span.source.rpartition(":")
            trips[f"{Path(file).name}:{line}"].add(span.repeat)
        for line, numbers in _trips(span.inside).items():
            trips[line] |= numbers
    return trips


def flops_of(span: Span) -> float:
    """FLOPs of one run of a span's matmuls, on whatever unit."""
    own = span.flops + span.vector_flops
    return own + span.repeat * sum(map(flops_of, span.inside))


def _once(loop: OpenLoop) -> float:
    return loop.times * (loop.flops + sum(map(_once, loop.loops)))


def _turned(loop: OpenLoop, trips: Mapping[str, set[float]]) -> float | None:
    """FLOPs of a loop with its trips; None where a line has none, or loops of several lengths."""
    numbers = trips.get(loop.source, set())
    inner = [_turned(nested, trips) for nested in loop.loops]
    if len(numbers) != 1 or any(flops is None for flops in inner):
        return None
    return loop.times * next(iter(numbers)) * (loop.flops + sum(flops or 0.0 for flops in inner))


def _scaled(
    rows: Sequence[ForecastRow], works: Sequence[StepFlops]
) -> tuple[list[ForecastRow], list[str], bool]:
    """Rows whose steps count by their work: where the batch follows the devices, a larger slice does more in one.

    Also notes, and whether the steps are of known work on each slice that the program fits.
    """
    ran = [work for row, work in zip(rows, works, strict=True) if row.fits]
    by_executed = any(work.is_least or not work.written for work in ran)
    flops = [work.executed if by_executed else work.written for work in works]
    fit = [(row, count) for row, count in zip(rows, flops, strict=True) if row.fits]
    alone = [_counted(row, 1.0) for row in rows]
    if len(fit) < 2:
        return alone, [], True
    if missing := [row.on.name for row, count in fit if not count]:
        note = f"the FLOPs of the step are not known on {', '.join(missing)} (no matmul is found in it), so that a step may be another work on each slice: the slices can't be compared, and none is named fastest or cheapest"
        return alone, [note], False
    first, base = fit[0]
    if all(abs(count - base) <= WORK_TOLERANCE * base for _, count in fit):
        return alone, [], True
    texts = [f"{count / base:.3g} on {row.on.name}" for row, count in fit[1:]]
    note = f"a step's work follows the slice: of that of a step on {first.on.name}, {EXECUTED if by_executed else WRITTEN}, it is {', '.join(texts)}; steps/s and $ are of steps as on {first.on.name}"
    counted = [
        _counted(row, count / base if row.fits else 1.0)
        for row, count in zip(rows, flops, strict=True)
    ]
    return counted, [note], True


def _counted(row: ForecastRow, units: float) -> ForecastRow:
    if row.forecast is None:
        return row
    return replace(row, forecast=replace(row.forecast, unit=UNIT, units=units))
