"""Decisions of a plan about a job: the job with them, and what holds of it when the run resumes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from systolic import recipes
from systolic.core.errors import OptionError
from systolic.job import Job
from systolic.recipes import Recipe
from systolic.runs.plan_choice import Chosen, SavedPlan, StepTime, candidate


class PlanLike(Protocol):
    """A plan, as :func:`systolic.plan` returns it."""

    def to_json(self) -> Mapping[str, Any]:
        """Content of plan.json."""


def candidate_of(plan: PlanLike, number: int) -> Chosen:
    """A candidate of a plan by its rank from 1.

    Raises:
        OptionError: the plan has fewer candidates, or none.
    """
    saved = msgspec.convert(plan.to_json(), SavedPlan)
    if not saved.candidates:
        raise OptionError(
            "nothing in the plan fits and keeps its goal; plan again with other slices"
        )
    return candidate(saved, "plan", number)


def under_plan(job: Job, chosen: Chosen | None) -> Job:
    """A job with the layout, batch, precision and steps of a plan, where there is one."""
    if chosen is None:
        return job
    job = chosen.applied(job)
    if not chosen.steps:
        return job
    schedule = job.schedule
    if schedule.warmup >= chosen.steps:
        # The recipe fitted it to its own steps.
        schedule = schedule.shortened(schedule, chosen.steps)
    return replace(job, steps=chosen.steps, schedule=schedule)


def resumed(chosen: Chosen | None, changed: set[str]) -> Chosen | None:
    """The part of a run's plan that holds when the run resumes with some options changed.

    Args:
        chosen: From the run's job.json.
        changed: The recipe's options that were given anew.
    """
    if chosen is None:
        return None
    dropped = {
        name
        for name in chosen.settings
        if name.partition(".")[0] in changed
        or (name == "batch" and any("batch" in option for option in changed))
    }
    kept = {name: value for name, value in chosen.settings.items() if name not in dropped}
    forecast = StepTime() if dropped else chosen.forecast
    steps = 0 if "steps" in changed else chosen.steps
    return replace(chosen, settings=kept, forecast=forecast, steps=steps)


def planned_options(recipe: Recipe, chosen: Chosen) -> dict[str, Any]:
    """Options of a recipe that a plan was made with.

    Raises:
        OptionError: the plan is for another recipe.
    """
    if not _is_of(recipe, chosen.recipe):
        raise OptionError(
            f"{chosen.path} is a plan for {chosen.recipe}, not for {recipe.target}; train that one or plan again"
        )
    return recipes.typed(recipe, chosen.options)


def kept_choice(
    chosen: Chosen, before: Job, now: Job, *, steps_given: bool, warn: Callable[[str], None]
) -> Chosen:
    """Decisions of a plan about a job whose other options may differ from those that were planned.

    Args:
        chosen: The plan's candidate.
        before: The job of the options that were planned, without the plan's settings.
        now: The job of the options that are trained, without the plan's settings.
        steps_given: Whether the number of steps is asked for, so that the plan's is not taken.
        warn: Called where the forecast is of another step than the one that is trained.

    Raises:
        OptionError: an option contradicts what the plan decides.
    """
    for part in ("layout", "batch", "precision"):
        if getattr(before, part) != getattr(now, part):
            raise OptionError(
                f"the {part} is what {chosen.path} decides; leave its option out, or plan again with it"
            )
    steps = now.steps if steps_given or now.steps != before.steps else chosen.steps
    if not _same_step(before, now):
        warn(
            f"the job is not the one that {chosen.path} forecast, so there is no forecast beside it"
        )
        chosen = replace(chosen, forecast=StepTime())
    return replace(chosen, steps=steps)


def _is_of(recipe: Recipe, target: str) -> bool:
    """Whether a plan's recipe is this one; a file may be named by another path."""
    if recipe.file is None or recipe.target == target:
        return recipe.target == target
    return _file(recipe.target) == _file(target)


def _file(target: str) -> tuple[Path, str]:
    path, _, name = target.rpartition(":") if ":" in target else (target, "", "job")
    return Path(path).resolve(), name


def _same_step(before: Job, now: Job) -> bool:
    """Whether the train steps of two jobs compute the same; data may differ where its shapes don't, and the learning rate is an input."""
    rate = replace(before.optimizer, learning_rate=now.optimizer.learning_rate)
    same = rate == now.optimizer and (before.model, before.task) == (now.model, now.task)
    return same and before.data.fields() == now.data.fields()
