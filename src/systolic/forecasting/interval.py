"""Range of a forecast: errors that programs of its kind had against chips (``benchmarks/accuracy/intervals.py``)."""

import enum
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from systolic.hlo import Module
from systolic.sim.cost_kinds import corrected_seconds
from systolic.sim.timeline import Timeline

ALL = "all"
"""The row of all generations together."""


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "errors.toml").read_text())


class ScheduleDetail(enum.Enum):
    """Schedules by what the compiler tells of them."""

    full = "full"
    """Schedule with the compiler's cycles."""
    quick = "quick"
    """Schedule without cycles: the compile ended there."""


class ResultKind(enum.Enum):
    """Measured results that a forecast's errors were found on."""

    operation = "operation"
    step = "step"


def detail_of(module: Module) -> ScheduleDetail:
    """Detail of a module's schedule."""
    cycles = (op.cycles for held in module.computations.values() for op in held)
    return ScheduleDetail.quick if all(count is None for count in cycles) else ScheduleDetail.full


def interval_of(
    generation: str, seconds: float, facts: Mapping[str, Any], schedule: ScheduleDetail
) -> tuple[float, float, str]:
    """Low and high seconds, and the results that they rest on.

    An error of the table is (forecast - measured) / measured, so a measured time lies between
    forecast / (1 + high) and forecast / (1 + low). Functions (``unit`` ``calls``) take the errors of single operations,
    jobs those of train steps; a generation with few results takes those of all. Made to hold 80 %, where each family
    of results counts once; the text says how many of them lie inside, and where a program is of another kind or mode.
    """
    calls = facts.get("unit", "calls") == "calls"
    kind = ResultKind.operation if calls else ResultKind.step
    schedules = _table()[kind.value]
    by_generation = schedules.get(schedule.value) or schedules[ScheduleDetail.quick.value]
    row = by_generation.get(generation)
    where = generation if row is not None else f"all generations, too few on {generation}"
    row = row if row is not None else by_generation[ALL]
    what = "operations" if kind is ResultKind.operation else "train steps"
    text = f"{row['held']} of {row['rows']} measured {what} on {where}"
    if schedule.value not in schedules:
        text += ", forecast from schedules"
    verb = facts.get("verb", "train")
    if kind is ResultKind.step and verb != "train":
        text += f"; no {verb} step among them"
    return seconds / (1 + row["high"]), seconds / (1 + row["low"]), text


def measured_range(timeline: Timeline) -> tuple[float, float, float]:
    """Seconds of the core in kinds of op whose spread a calibration measured, and the least and most that they may be."""
    found = [0.0, 0.0, 0.0]
    for kind, seconds in corrected_seconds(timeline).items():
        assert timeline.calibration is not None
        ends = timeline.calibration.ends(kind)
        if ends is not None:
            for at, times in enumerate((1.0, *ends)):
                found[at] += seconds * times
    return found[0], found[1], found[2]


def range_of(
    generation: str, timeline: Timeline, facts: Mapping[str, Any], schedule: ScheduleDetail
) -> tuple[float, float, str]:
    """:func:`interval_of` a timeline; ops that rules estimate have the rules' own range in place of it, and those of kinds that a calibration measured its spread."""
    by_rule, least, most = timeline.by_rule
    own, own_least, own_most = measured_range(timeline)
    rest = max(timeline.seconds - by_rule - own, 0.0)
    low, high, text = interval_of(generation, rest, facts, schedule)
    if own and timeline.calibration is not None:
        text = f"{own / timeline.seconds:.0%} of the step from the 10th to the 90th percentile of the ops of the calibration {timeline.calibration.name}, all kinds at once; the rest by {text}"
    share = by_rule / timeline.seconds if timeline.seconds else 0.0
    if share >= 5e-4:
        text += f"; {share:.1%} of it estimated by rules with a range of their own"
    return low + own_least + least, high + own_most + most, text
