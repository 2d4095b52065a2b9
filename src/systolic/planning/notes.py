"""Notes on a plan besides its figures, as values."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from systolic.chips import Slice
from systolic.planning.analytic import Facts
from systolic.planning.enumeration import Margin
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.plan import CompileDepth, Plan, full_over_schedule
from systolic.planning.space import Freedom, RefusalRule, Refused, global_batch
from systolic.sim.calibration import Calibration
from systolic.sim.cost_kinds import corrected_seconds

OFF = 0.03
"""Relative difference between full compiles and their schedules from which a note is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnWork:
    """The goal is the job's own steps times its batch, since no other was given."""

    units: float
    unit: str
    steps: int
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDiffers:
    """The job's batch is per device, so the global batch differs by slice."""

    smallest: int
    largest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFit:
    """The search ended when a layout fitted, for that was its goal."""

    slice: str
    fitting: int
    """Layouts of the slice that fit and keep the goal, so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOnly:
    """The best candidate was compiled only up to its schedule."""

    full_compiles: int
    """Number of candidates compiled in full."""
    more_requested: bool
    """Whether more full compiles were requested than have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullCompileRatio:
    """Ratio of step times of full compiles on a chip to those of their schedules."""

    chip: str
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFlags:
    """Every program on the best candidate's chip is compiled with these flags."""

    chip: str
    flags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectedTimes:
    """Step times of what was compiled are corrected by a calibration; estimates before the compile are not."""

    calibration: Calibration
    share: float
    """Share of the best candidate's step that it corrects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChipNotCompiled:
    """No slice of a chip was compiled, with the reason of the nearest one; empty where the search ended before."""

    chip: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTimes:
    """GPUs are among the slices, and their times are not measured."""

    simulated: bool
    """Whether their own compiler scheduled them; else they are rooflines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricesUnknown:
    """The catalogue lacks this price for these slices."""

    price: PriceTerm
    slices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotCompiled:
    """Layouts were left out by estimates, which are no bounds; the margin says what they may be worth."""

    margin: Margin
    objective: Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class WallAssumed:
    """Assumptions of the wall-clock."""

    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WallLate:
    """The steps end before the deadline, and the job does not."""

    seconds: float
    deadline_seconds: float


class WayToAnswer(enum.Enum):
    """Ways to an answer where there is none."""

    slices = "slices"
    batch = "batch"
    deadline = "deadline"
    budget = "budget"


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAnswer:
    """Nothing fits and keeps the goal."""

    ways: tuple[WayToAnswer, ...]


PlanNote = (
    OwnWork
    | BatchDiffers
    | FirstFit
    | ScheduleOnly
    | FullCompileRatio
    | BaseFlags
    | CorrectedTimes
    | ChipNotCompiled
    | GpuTimes
    | PricesUnknown
    | NotCompiled
    | WallAssumed
    | WallLate
    | NoAnswer
)


def before_search(
    facts: Facts, slices: Sequence[Slice], freedom: Freedom, own_work: bool
) -> list[PlanNote]:
    """Notes on a search before it starts.

    Args:
        facts: Facts of the job.
        slices: Slices that it may run on.
        freedom: Settings that the search may change.
        own_work: Whether the goal is the job's own steps.
    """
    job, notes = facts.job, list[PlanNote]()
    batches = {global_batch(job, on) for on in slices}
    if own_work:
        units = float(job.steps * min(batches) * facts.units_per_example)
        notes.append(OwnWork(units=units, unit=facts.unit, steps=job.steps, batch=min(batches)))
    if len(batches) > 1 and not freedom.batch:
        notes.append(BatchDiffers(smallest=min(batches), largest=max(batches)))
    return notes


def after_search(
    plan: Plan, slices: Sequence[Slice], freedom: Freedom, finalists: int
) -> list[PlanNote]:
    """Notes on an answer, or on how to get one where there is none.

    Args:
        plan: The plan.
        slices: Slices that were searched.
        freedom: Settings that the search might change.
        finalists: Number of full compiles requested.
    """
    best = plan.best
    if best is None:
        return [NoAnswer(ways=_ways(plan.goal, freedom))]
    notes: list[PlanNote] = []
    if plan.goal.objective is Objective.fit:
        notes.append(FirstFit(slice=best.candidate.on.name, fitting=len(plan.ranking)))
    if best.depth is CompileDepth.schedule:
        full = sum(trial.full for trial in plan.tried)
        notes.append(ScheduleOnly(full_compiles=full, more_requested=finalists > full))
    deadline, wall = plan.goal.deadline_seconds, plan.wall
    if wall is not None and deadline is not None and wall.seconds > deadline:
        notes.append(WallLate(seconds=wall.seconds, deadline_seconds=deadline))
    if wall is not None and wall.assumptions:
        notes.append(WallAssumed(assumptions=wall.assumptions))
    if plan.margin is not None and plan.goal.objective is not Objective.fit:
        free = best.total is not None and best.total.usd == 0.0
        wanted = Objective.time if free else plan.goal.objective
        notes.append(NotCompiled(margin=plan.margin, objective=wanted))
    for chip, ratio in full_over_schedule(plan.tried).items():
        if abs(ratio - 1) > OFF:
            notes.append(FullCompileRatio(chip=chip, ratio=ratio))
    if best.candidate.base:
        notes.append(BaseFlags(chip=best.candidate.on.chip.name, flags=best.candidate.base))
    timeline = None if best.forecast is None else best.forecast.timeline
    if timeline is not None and timeline.calibration is not None and timeline.seconds:
        share = sum(corrected_seconds(timeline).values()) / timeline.seconds
        notes.append(CorrectedTimes(calibration=timeline.calibration, share=share))
    compiled = {trial.candidate.on.chip.name for trial in plan.tried}
    for chip in sorted({on.chip.name for on in slices} - compiled):
        notes.append(ChipNotCompiled(chip=chip, reason=_nearest_refusal(plan, chip)))
    if any(on.platform == "gpu" for on in slices):
        gpus = [trial for trial in plan.tried if trial.candidate.on.platform == "gpu"]
        depths = {trial.depth for trial in gpus if trial.forecast is not None}
        notes.append(GpuTimes(simulated=depths == {CompileDepth.schedule}))
    price = plan.goal.price
    if unknown := sorted({on.name for on in slices if plan.goal.hourly(on) is None}):
        notes.append(PricesUnknown(price=price, slices=tuple(unknown)))
    return notes


def _nearest_refusal(plan: Plan, chip: str) -> str:
    """Reason that kept the most promising layouts of a chip from being compiled; empty without one."""
    refusals = [refused for refused in plan.refused if refused.on.chip.name == chip]
    near = min(refusals, key=_distance, default=None)
    return "" if near is None else f"{near.on.name}: {near.reason}"


def _distance(refused: Refused) -> tuple[bool, float]:
    """Sort key of refusals: what the search did not reach, then by the figure over the rule's limit."""
    near = 0.0 if refused.miss is None else refused.miss
    return refused.rule is not RefusalRule.not_compiled, near


def _ways(goal: Goal, freedom: Freedom) -> tuple[WayToAnswer, ...]:
    helps = {
        WayToAnswer.slices: True,
        WayToAnswer.batch: not freedom.batch,
        WayToAnswer.deadline: goal.deadline_seconds is not None,
        WayToAnswer.budget: goal.budget_usd is not None,
    }
    return tuple(way for way, may in helps.items() if may)
