"""From a search to the plan that is answered and kept: with its wall-clock, its notes and the file that has the best so far."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from systolic import recipes
from systolic.core.errors import OptionError
from systolic.core.files import write_json
from systolic.core.reporter import reporter
from systolic.planning.evaluator import CompilingEvaluator, OpenEvaluator
from systolic.planning.fit_ladder import smallest_fit
from systolic.planning.notes import after_search, before_search
from systolic.planning.objective import Objective
from systolic.planning.plan import Plan
from systolic.planning.search import Search, SearchProgress
from systolic.planning.wall import Conditions, wall_of
from systolic.planning.wanted import Wanted
from systolic.recipes.jobs.source import JobSource
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import Given


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
    found = smallest_fit(search) if smallest else search.run()
    if found.best is not None:
        wall = wall_of(search.facts, found.goal, found.best, conditions)
        found = replace(found, wall=wall)
    return _with_notes(found, search, wanted)


def _with_notes(made: Plan, search: Search, wanted: Wanted) -> Plan:
    own = wanted.tokens is None and wanted.examples is None
    before = before_search(search.facts, search.slices, search.freedom, own_work=own)
    after = after_search(made, search.slices, search.freedom, search.limits.finalists)
    return replace(made, notes=(*before, *after))
