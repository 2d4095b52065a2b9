"""Sources of a job: a recipe with its options or a Job, the candidate of a plan, and the compiler flags that the options, the plan and the run's own record give."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from systolic import recipes
from systolic.chips import slice
from systolic.chips.flags import NONE, resolved
from systolic.core.errors import OptionError
from systolic.core.option_words import flat, negated, option_words
from systolic.core.ranges import dashed
from systolic.job import Job, Layout
from systolic.recipes import Recipe
from systolic.recipes.jobs.plan import kept_choice, planned_options, under_plan
from systolic.runs import paths
from systolic.runs.job_record import JobRecord, RunFlags, types_of
from systolic.runs.plan_choice import Chosen, StepTime


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


def new_flags(words: str, chosen: Chosen | None) -> RunFlags:
    """Flags of a new run on these devices.

    Args:
        words: What ``--flags`` says.
        chosen: A plan's candidate, whose flags take the place of the shared set.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    from systolic.steps.machine import LocalDevices

    chip = LocalDevices.here().chip
    same = chosen is not None and (chip is None or slice(chosen.slice).chip.name == chip.name)
    base = chosen.flags if chosen is not None and same else None
    return RunFlags(
        given=words,
        chip=None if chip is None else chip.name,
        compiler=tuple(resolved(words, chip, base)),
    )


def kept_flags(record: JobRecord, chosen: Chosen | None, words: str | None = None) -> RunFlags:
    """Flags of a run that is used again: its own, unless others are given or these are other devices.

    Args:
        record: The run's; one of a version that kept no flags had the compiler's defaults.
        chosen: What still holds of its plan.
        words: What ``--flags`` says, None where it was left out.

    Raises:
        OptionError: a word of ``words`` is no flag.
    """
    before = record.flags
    if words is not None:
        return new_flags(words, chosen)
    now = new_flags(NONE if before is None else before.given, None if before is None else chosen)
    if before is None:
        compiler = () if chosen is None else tuple(chosen.flags)
        return RunFlags(given=NONE, chip=now.chip, compiler=compiler)
    return before if before.chip == now.chip else now
