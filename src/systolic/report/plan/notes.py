"""Notes of a plan in words."""

from collections.abc import Mapping

from systolic.chips.flags import described
from systolic.core.units import si
from systolic.planning.notes import (
    BaseFlags,
    BatchDiffers,
    ChipsNotCompiled,
    FullCompileRatio,
    GpusByRoofline,
    NoAnswer,
    OwnWork,
    PlanNote,
    PricesUnknown,
    ScheduleOnly,
    WayToAnswer,
)
from systolic.planning.plan import Plan

NAMED = 4
"""Slices without a price that are named."""
WAYS: Mapping[WayToAnswer, str] = {
    WayToAnswer.slices: "other slices (--on any, --max-chips)",
    WayToAnswer.batch: "another batch (--free batch)",
    WayToAnswer.deadline: "a later deadline",
    WayToAnswer.budget: "a larger budget",
}


def notes(plan: Plan) -> list[str]:
    """A line each."""
    return [text(note) for note in plan.notes]


def text(note: PlanNote) -> str:
    """A note as one line, without a full stop."""
    match note:
        case OwnWork():
            return f"{si(note.units)} {note.unit} are the job's own {note.steps:,} steps of {note.batch:,} examples; --{note.unit} sets another number"
        case BatchDiffers():
            return f"the job's batch is per device, so the global batch differs by slice ({note.smallest:,} to {note.largest:,} examples a step): slices don't train the same; --batch fixes it"
        case ScheduleOnly():
            more = f"--finalists {note.full_compiles + 2} compiles more of the best to the end"
            if note.asked:
                more = "its full compile did not end in time; --time-limit 2h gives it longer"
            return f"the best was compiled up to the schedule: memory is exact, the time of ops estimated; {more}"
        case FullCompileRatio():
            return f"steps of full compiles on {note.chip} take {note.ratio:.0%} of what their schedules said; the others are ranked as if theirs did too"
        case BaseFlags():
            return f"every program on {note.chip} is compiled with {described(note.flags)}; systolic chips {note.chip} gives the reasons, --flags changes them"
        case ChipsNotCompiled():
            return f"no slice of {', '.join(note.chips)} was compiled; see rejected"
        case GpusByRoofline():
            return "GPUs are compared by a roofline of the program that XLA partitions for them: time to about 35 %, memory estimated"
        case PricesUnknown():
            more = " …" if len(note.slices) > NAMED else ""
            return f"no {note.price.value} price is known of {', '.join(note.slices[:NAMED])}{more}; a file of yours can give one, see systolic chips --help"
        case NoAnswer():
            return f"what may help: {', '.join(WAYS[way] for way in note.ways)}"
