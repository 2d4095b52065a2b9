"""From a search to the plan that is answered and kept, with its wall-clock and notes; and from the goal that a user gives to the goal of a job and its slices."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.chips import Slice
from systolic.core.arguments import member
from systolic.core.errors import OptionError, nearest
from systolic.core.files import write_json
from systolic.core.reporter import reporter
from systolic.planning.analytic import Facts
from systolic.planning.evaluator import CompilingEvaluator, OpenEvaluator
from systolic.planning.fit_ladder import smallest_fit
from systolic.planning.goal import Goal, Objective, PriceTerm
from systolic.planning.notes import after_search, before_search
from systolic.planning.plan import Plan, default_objective
from systolic.planning.search import Search, SearchProgress
from systolic.planning.space import Freedom, global_batch
from systolic.planning.wall import Conditions, wall_of
from systolic.recipes.jobs.source import JobSource
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import Given

FREE = ("batch", "precision")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A goal as it was asked for, before the job's own work and the slices fill in the rest."""

    tokens: float | None = None
    examples: float | None = None
    objective: Objective | None = None
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    price: PriceTerm = PriceTerm.on_demand
    chip_usd: float | None = None


def price_of(price: PriceTerm | str | float) -> tuple[PriceTerm, float | None]:
    """A kind of price of the catalogue, and dollars of a chip and hour where these are given instead.

    Raises:
        OptionError: neither a kind of price nor dollars from 0 on.
    """
    if isinstance(price, PriceTerm):
        return price, None
    try:
        usd = float(price)
    except ValueError:
        return member(PriceTerm, str(price), "--price"), None
    if not 0.0 <= usd < float("inf"):
        raise OptionError(
            f"--price is {price}; give dollars of a chip and hour from 0 on, or on-demand, spot or committed"
        )
    return PriceTerm.on_demand, usd


def goal_of(facts: Facts, slices: Sequence[Slice], wanted: Wanted) -> Goal:
    """The goal, made definite.

    Raises:
        OptionError: tokens of a job that has none.
    """
    job = facts.job
    if wanted.tokens is not None and facts.unit != "tokens":
        raise OptionError(f"{job.name} has no tokens; give --examples")
    if wanted.tokens is not None:
        units = wanted.tokens
    elif wanted.examples is not None:
        units = wanted.examples * facts.units_per_example
    else:
        # A batch per device makes more work on a larger slice: the smallest counts, whatever the order of slices.
        batch = min(global_batch(job, on) for on in slices)
        units = float(job.steps * batch * facts.units_per_example)
    objective = wanted.objective or default_objective(
        len(slices), wanted.deadline_seconds is not None, wanted.budget_usd is not None
    )
    return Goal(
        objective=objective,
        units=units,
        unit=facts.unit,
        deadline_seconds=wanted.deadline_seconds,
        budget_usd=wanted.budget_usd,
        price=wanted.price,
        chip_usd=wanted.chip_usd,
    )


FINALISTS = 2
"""Full compiles of a search where none are given."""


def full_compiles(wanted: Wanted, finalists: int | None) -> int:
    """Full compiles of a search: those given, else two, and none where only the memory decides."""
    if finalists is not None:
        return finalists
    return 0 if wanted.objective is Objective.fit else FINALISTS


def freed(text: str) -> Freedom:
    """``batch,precision`` as what the search may change.

    Raises:
        OptionError: another word.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in FREE:
            raise OptionError(
                f"--free is {word!r}{nearest(word, FREE)}; it takes batch, precision or batch,precision"
            )
    return Freedom(batch="batch" in words, precision="precision" in words)


@dataclass
class PlanFile:
    """The plan's file, which has the best so far: a kill leaves it."""

    source: JobSource
    out: Path | None
    best: list[Any] = field(default_factory=list)

    def see(self, progress: SearchProgress) -> None:
        """Reports the progress, and writes a best that is new."""
        reporter().update(progress)
        if self.out is None or progress.best is None or progress.best in self.best[-1:]:
            return
        self.best.append(progress.best)
        write_json(self.out, self._named(progress.answer()).to_json())

    def kept(self, plan: Plan) -> Plan:
        """The plan, written where it has an answer or no other plan is there."""
        named = self._named(plan)
        if self.out is None:
            return named
        if plan.best is None and not (plan.tried and not self.out.exists()):
            return named
        write_json(self.out, named.to_json())
        return replace(named, saved=self.out)

    def _named(self, plan: Plan) -> Plan:
        if self.source.recipe.of_job:
            return plan
        return replace(
            plan,
            target=self.source.recipe.target,
            options=recipes.plain(self.source.options),
            arguments=tuple(self.source.words),
        )


def corrected(evaluator: OpenEvaluator | None, calibration: Calibration | None) -> OpenEvaluator:
    """The compiler's evaluator with corrections.

    Raises:
        OptionError: the evaluator is another, which tells times of its own.
    """
    if calibration is None:
        return evaluator or CompilingEvaluator
    if evaluator is not None:
        raise OptionError(
            f"calibration is {calibration.name}, and the evaluator is not the compiler's but another with times of its own; give one of them"
        )
    return partial(CompilingEvaluator, given=Given(calibration=calibration))


def searched(search: Search, wanted: Wanted, conditions: Conditions) -> Plan:
    """The plan of a search, with the wall-clock of its best and with notes."""
    smallest = search.goal.objective is Objective.fit
    plan = smallest_fit(search) if smallest else search.run()
    if plan.best is not None:
        wall = wall_of(search.facts, plan.goal, plan.best, conditions)
        plan = replace(plan, wall=wall)
    return _with_notes(plan, search, wanted)


def _with_notes(plan: Plan, search: Search, wanted: Wanted) -> Plan:
    own = wanted.tokens is None and wanted.examples is None
    before = before_search(search.facts, search.slices, search.freedom, own_work=own)
    after = after_search(plan, search.slices, search.freedom, search.limits.finalists)
    return replace(plan, notes=(*before, *after))
