"""Notes of a plan as text."""

import math
from collections.abc import Mapping

from systolic.chips.flags import described
from systolic.core.units import plural, si
from systolic.planning.goal import days
from systolic.planning.notes import (
    BaseFlags,
    BatchDiffers,
    ChipsNotCompiled,
    CorrectedTimes,
    FirstFit,
    FullCompileRatio,
    GpusByRoofline,
    NoAnswer,
    NotCompiled,
    OwnWork,
    PlanNote,
    PricesUnknown,
    ScheduleOnly,
    WallAssumed,
    WallLate,
    WayToAnswer,
)
from systolic.planning.objective import Objective
from systolic.planning.plan import Plan

NAMED = 4
"""Most slices without a price that are named."""
WAYS: Mapping[WayToAnswer, str] = {
    WayToAnswer.slices: "other slices (--on any, --max-chips)",
    WayToAnswer.batch: "another batch (--free batch)",
    WayToAnswer.deadline: "a later deadline",
    WayToAnswer.budget: "a larger budget",
}

BETTER: Mapping[Objective, str] = {
    Objective.time: "faster",
    Objective.cost: "cheaper",
    Objective.energy: "better in energy",
    Objective.pareto: "better in time x cost",
    Objective.fit: "faster",
}
"""Words for a better score."""


def notes(plan: Plan) -> list[str]:
    """A line each."""
    return [text(note) for note in plan.notes]


def text(note: PlanNote) -> str:
    """A note as one line, without a full stop."""
    match note:
        case OwnWork():
            return f"the goal of {si(note.units)} {note.unit} is the job's own {plural(note.steps, 'step')} of {plural(note.batch, 'example')}; --{note.unit} sets another"
        case CorrectedTimes(calibration=of):
            return f"step times of compiled layouts are corrected by the calibration {of.name} ({of.chip}, {plural(of.num_profiles, 'profile')}, {of.made}), {note.share:.0%} of the best one's; estimates before a compile are not"
        case BatchDiffers():
            return f"the job's batch is per device, so the global batch differs by slice ({note.smallest:,} to {plural(note.largest, 'example')} a step), which changes training; --batch sets one for all"
        case FirstFit():
            among = "the one" if note.fitting == 1 else f"the fastest of {note.fitting}"
            return f"the search ended once a layout fitted, and this is {among} found by then; --on {note.slice} --goal time goes on for speed"
        case ScheduleOnly():
            more = f"--finalists {note.full_compiles + 2} makes more full compiles"
            if note.asked:
                more = "its full compile did not end in time; --time-limit 2h gives it more time"
            return f"the best was compiled up to its schedule only: memory is exact, op times are estimates; {more}"
        case WallAssumed():
            return f"wall-clock: {'; '.join(note.assumptions)}"
        case WallLate():
            took = days(note.seconds) if math.isfinite(note.seconds) else "no finite time"
            return f"with start-up, checkpoints, data and preemptions the job takes {took}, and the deadline is {days(note.deadline_seconds)}"
        case NotCompiled():
            return _not_compiled(note)
        case FullCompileRatio():
            return f"steps of full compiles on {note.chip} take {note.ratio:.0%} of the time by their schedules; the others are ranked with the same ratio"
        case BaseFlags():
            return f"every program on {note.chip} is compiled with {described(note.flags)}; systolic chips {note.chip} gives the reasons, --flags changes them"
        case ChipsNotCompiled():
            return f"no slice of {', '.join(note.chips)} was compiled; see rejected"
        case GpusByRoofline():
            return "GPUs are compared by a roofline of their partitioned program: time within about 35 %, memory estimated"
        case PricesUnknown():
            more = " …" if len(note.slices) > NAMED else ""
            return f"no {note.price.value} price is known for {', '.join(note.slices[:NAMED])}{more}; add prices in a file, see systolic chips --help"
        case NoAnswer():
            return f"to try: {', '.join(WAYS[way] for way in note.ways)}"


def _not_compiled(note: NotCompiled) -> str:
    margin = note.margin
    at = margin.nearest - 1.0
    beside = f"{at:.0%} above the best" if at >= 0 else f"{-at:.0%} below the best"
    word = BETTER[note.objective]
    worth = f"up to {margin.share:.0%} {word}" if margin.share >= 0.005 else f"no {word}"
    return (
        f"left out by estimates, not bounds: {plural(margin.layouts, 'layout')} that may fit ({margin.bounded:,} more by bounds); the best of them "
        f"is estimated {beside}; the {margin.compiled} compiled took {margin.low:.2f} to {margin.high:.2f} times such estimates, "
        f"so that one may be {worth} than the answer; --programs compiles more"
    )
