"""From a recipe with its options, or the candidate of a plan, to a job with its compiler flags."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from systolic import recipes
from systolic.chips import slice
from systolic.chips.flags import CPU_FLAGS, NONE, resolved, shared_set
from systolic.core.errors import OptionError
from systolic.core.option_words import flat, negated, option_words
from systolic.core.ranges import dashed
from systolic.job import Job, Layout, Model
from systolic.recipes import Recipe
from systolic.runs import paths
from systolic.runs.job_record import JobRecord, RunFlags, types_of
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


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """A recipe with its arguments and the plan's candidate, where there is one."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Options of the recipe, by parameter; no path depends on the working directory."""
    chosen: Chosen | None = None
    """Decisions of a plan about the job."""
    given: frozenset[str] = frozenset()
    """Options that were given, as typed without the dashes before them: ``layout.fsdp``; the others are defaults."""
    relative: Mapping[str, Any] | None = None
    """The options with paths as they were given, relative to the working directory; None where that is not known."""
    types: Mapping[str, str] | None = None
    """Model, task and data to the full names of their classes, where a Job was given in place of a recipe."""

    @cached_property
    def job(self) -> Job:
        """The job that these options make, with the plan's settings; the recipe runs once."""
        return under_plan(self.recipe(self.options), self.chosen)

    @property
    def words(self) -> list[str]:
        """The options that were given, as words of a command line."""
        return option_words(self.recipe.function, self.options, typed=self.given)


def given_options(source: JobSource) -> dict[str, Any]:
    """The options that were given, by dotted name, as Python gives them."""
    return {
        name: value
        for name, value in flat(source.options).items()
        if not {*_wholes(dashed(name)), negated(name)}.isdisjoint(source.given)
    }


def _wholes(name: str) -> list[str]:
    """``layout`` and ``layout.fsdp``: an option, and those that it is a field of."""
    parts = name.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def with_options(source: JobSource, options: Mapping[str, Any]) -> JobSource:
    """A source with further options of its recipe, by dotted name.

    Raises:
        OptionError: an option is unknown, of another type, out of its range or without effect.
    """
    return _source(source.recipe, {**given_options(source), **options}, source.types)


def source_of(job: Job | JobSource | str, options: Mapping[str, Any]) -> JobSource:
    """Source of what a user names: a Job, a recipe with its options, or a source that is made already.

    Raises:
        NotFoundError: there is no such recipe.
        OptionError: an option is missing, unknown, of another type, out of its range or without effect.
    """
    if isinstance(job, JobSource):
        return job
    if isinstance(job, str):
        recipe, types = recipes.find(job), None
    else:
        recipe, types = recipe_of(job), types_of(job)
    return _source(recipe, options, types)


def _source(
    recipe: Recipe, options: Mapping[str, Any], types: Mapping[str, str] | None
) -> JobSource:
    arguments = arguments_of(recipe, options)
    source = JobSource(
        recipe=recipe,
        options=paths.absolute(arguments),
        given=frozenset(map(dashed, options)),
        relative=arguments,
        types=types,
    )
    source.job.check_effects()
    return source


def arguments_of(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a recipe: options from Python, and its defaults.

    Raises:
        OptionError: an option is missing, unknown or of another type.
    """
    options = recipes.expanded(recipe, options)
    try:
        bound = inspect.signature(recipe.function).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(recipe.function).parameters)
        raise OptionError(f"{recipe.target}: {error}; its options are {known}") from error
    bound.arguments.update(recipes.converted(recipe, bound.arguments))
    bound.apply_defaults()
    return bound.arguments


def with_plan(
    job: Job | str,
    options: Mapping[str, Any],
    chosen: Chosen,
    warn: Callable[[str], None],
    planned_job: Job | None = None,
) -> JobSource:
    """Source of what a Python user names, under a plan: a recipe has the options that were planned where they are not given.

    Args:
        job: A Job, or a recipe.
        options: Options of the recipe; of a Job ``steps``.
        chosen: The plan's candidate.
        warn: Called where the forecast is of another step than the one that is trained.
        planned_job: The Job that was planned, where it is known.

    Raises:
        OptionError: the plan is for another recipe, or an option contradicts what it decides.
    """
    if isinstance(job, str):
        recipe = recipes.find(job)
        planned = planned_options(recipe, chosen)
        source = source_of(job, {**planned, **options})
        before = recipe(planned)
    else:
        source = source_of(job, options)
        before = source.job if planned_job is None else planned_job
        if planned_job is None:
            warn(
                f"{chosen.path} does not say which Job it forecast, so there is no forecast beside it; give systolic.plan's own result"
            )
            chosen = replace(chosen, forecast=StepTime())
    kept = kept_choice(chosen, before, source.job, steps_given="steps" in options, warn=warn)
    return replace(source, chosen=kept)


def recipe_of(job: Job) -> Recipe:
    """A Job as a recipe, so that its run resumes as one of a recipe does, with these options to change."""
    located = paths.absolute(job)

    def changed(steps: int = job.steps, layout: Layout = job.layout) -> Job:
        return replace(located, steps=steps, layout=layout)

    changed.__doc__ = f"""The job {job.name}.

    Args:
        steps: Optimizer steps.
        layout: How it is spread.
    """
    return Recipe(target=job.name, function=changed, of_job=True)


def new_flags(words: str, chosen: Chosen | None, model: Model) -> RunFlags:
    """Flags of a new run on these devices.

    Args:
        words: What ``--flags`` says.
        chosen: A plan's candidate, whose flags take the place of the shared set.
        model: The job's.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    from systolic.steps.machine import LocalDevices

    machine = LocalDevices.here()
    chip = machine.chip
    same = chosen is not None and (chip is None or slice(chosen.slice).chip.name == chip.name)
    shared = shared_set(chip, machine.platform, convolutional=model.is_convolutional)
    base = chosen.flags if chosen is not None and same else shared
    return RunFlags(
        given=words,
        chip=None if chip is None else chip.name,
        compiler=tuple(resolved(words, chip, base)),
    )


def kept_flags(
    record: JobRecord, chosen: Chosen | None, model: Model, words: str | None = None
) -> RunFlags:
    """Flags of a run that is used again: its own, unless others are given or these are other devices.

    Args:
        record: The run's; one of a version that kept no flags had the compiler's defaults.
        chosen: What still holds of its plan.
        model: The job's.
        words: What ``--flags`` says, None where it was left out.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    from systolic.steps.machine import LocalDevices

    before = record.flags
    if words is not None:
        return new_flags(words, chosen, model)
    given = NONE if before is None else before.given
    now = new_flags(given, None if before is None else chosen, model)
    if before is None:
        compiler = () if chosen is None else tuple(chosen.flags)
        return RunFlags(given=NONE, chip=now.chip, compiler=compiler)
    if before.chip != now.chip:
        return now
    # A CPU and what the catalogue does not have are both no chip.
    return (
        before
        if LocalDevices.here().platform == "cpu"
        else replace(
            before, compiler=tuple(flag for flag in before.compiler if flag not in CPU_FLAGS)
        )
    )
