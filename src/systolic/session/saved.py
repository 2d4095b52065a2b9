"""Steps that a forecast's JSON or a plan names: made again, explained, and compared."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.chips.flags import resolved, spoken
from systolic.compiling import StepKind
from systolic.core.errors import DataError, RunError
from systolic.core.files import read_given
from systolic.explaining.settings import Settings
from systolic.forecasting import Forecast
from systolic.job import Job
from systolic.recipes import Recipe
from systolic.runs import trust
from systolic.runs.plan_choice import apply, is_plan, load
from systolic.session.explaining import StepExplainer
from systolic.sim.incomplete import NOTHING, Given

ALIKE = 0.002
"""Share of the step below which two figures are the same."""


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """A step of a recipe's job on a slice, as a command asks for it or a file has it."""

    recipe: Recipe
    options: Mapping[str, Any]
    """Arguments of the recipe."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a plan decided of the job: ``layout.fsdp``, ``batch``."""
    on: Slice
    flags: tuple[str, ...]
    """All flags of the compiler."""
    step: StepKind = StepKind.train
    kept: Job | None = None
    """The job as a run keeps it, with its own tokenizer; None where the recipe makes it."""

    @property
    def job(self) -> Job:
        """The job.

        Raises:
            SystolicError: the recipe refuses its options.
        """
        return self.kept or apply(self.recipe(self.options), self.settings)

    @property
    def as_options(self) -> "RecipeStep":
        """The same with the plan's settings as options, as far as the recipe has options for them."""
        parameters = inspect.signature(self.recipe.function).parameters
        plain, left = recipes.plain(self.options), {}
        for name, value in self.settings.items():
            part, dot, field_name = name.partition(".")
            if part not in parameters:
                left[name] = value
            elif dot:
                default = recipes.plain({part: parameters[part].default})
                plain[part] = {**default[part], **plain.get(part, {}), field_name: value}
            else:
                plain[part] = value
        if "batch" in plain and "batch" in self.settings:
            plain.pop("batch_per_device", None)
        options = recipes.typed(self.recipe, plain)
        return replace(self, options=options, settings=left)

    def with_flags(self, given: str) -> "RecipeStep":
        """The same with ``--flags`` on top of its own; ``none`` leaves its own out.

        Raises:
            OptionError: a word is no flag.
        """
        return replace(self, flags=resolved(given, self.on.chip, self.flags))

    def at(self, on: Slice) -> "RecipeStep":
        """The same on another slice, with the flags that jobs share there in place of those shared here."""
        return replace(self, on=on, flags=resolved(spoken(self.flags, self.on.chip), on.chip))

    def explainer(self) -> StepExplainer:
        """What explains it, with advice in options that the recipe has."""
        return StepExplainer(
            job=self.job,
            on=self.on,
            step=self.step,
            flags=self.flags,
            known=Settings(recipes.plain(self.options)),
        )


class _Made(msgspec.Struct):
    flags: list[str] = []


class _SavedForecast(msgspec.Struct):
    """A forecast's JSON, as far as it says what it was made of."""

    target: str
    slice: str
    arguments: list[str]
    options: dict[str, Any] | None = None
    """Forecasts of earlier versions lack them."""
    step: StepKind = StepKind.train
    compiler: _Made = msgspec.field(default_factory=_Made)


FromWords = Callable[[str, Sequence[str]], RecipeStep]
"""Reads a recipe's name and the words of a command line."""


def is_saved(path: Path) -> bool:
    """Whether a file is a forecast's JSON or a plan, damaged or not.

    Raises:
        OptionError: it is named so and is no JSON.
    """
    if path.suffix != ".json" or not path.is_file():
        return False
    record = read_given(path, "write it again")
    return is_plan(record) or (
        isinstance(record, dict) and {"step_seconds", "slice"} <= set(record)
    )


def saved_step(path: Path, from_words: FromWords | None = None) -> RecipeStep:
    """The step of a forecast's JSON, or of the best of a plan.

    Args:
        path: Of the file.
        from_words: Reads what a forecast of an earlier version has in place of the recipe's options.

    Raises:
        RunError: it does not say what it was made of, or its recipe may not be executed.
        DataError: it is damaged, or nothing in the plan fits.
        NotFoundError: its slice or recipe is unknown.
    """
    record = read_given(path, "write it again")
    if is_plan(record):
        return _planned(path)
    if "arguments" not in record:
        raise RunError(
            f"{path} is a forecast of a Job, a function or a dump, and does not hold it; give the Job in Python: systolic.explain(job, on='{record['slice']}'), or explain a recipe: systolic explain RECIPE --on {record['slice']}"
        )
    try:
        saved = msgspec.convert(record, _SavedForecast)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is a damaged forecast ({error}); write it again") from error
    on = slice(saved.slice)
    _require_own(saved.target, path)
    if saved.options is None:
        if from_words is None:
            raise _unnamed(path)
        made = from_words(saved.target, saved.arguments)
        return replace(made, flags=tuple(saved.compiler.flags))
    recipe = recipes.find(saved.target)
    return RecipeStep(
        recipe=recipe,
        options=recipes.typed(recipe, saved.options),
        on=on,
        flags=tuple(saved.compiler.flags),
        step=saved.step,
    )


def _planned(path: Path) -> RecipeStep:
    saved = load(path)
    assert saved.recipe is not None  # load refuses the plan of a Job
    best = saved.candidates[0]
    on = slice(best.slice)
    _require_own(saved.recipe, path)
    recipe = recipes.find(saved.recipe)
    return RecipeStep(
        recipe=recipe,
        options=recipes.typed(recipe, saved.options),
        settings=best.settings,
        on=on,
        flags=tuple(best.flags),
    )


def _unnamed(path: Path) -> RunError:
    return RunError(
        f"{path} does not say which options it was made with; make it again with this version, or explain the recipe: systolic explain RECIPE --on v5e-16"
    )


def _require_own(recipe: str, named_by: Path) -> None:
    """Refuses a recipe that a file names and that is neither shipped nor the user's own.

    Raises:
        RunError: the file, or its folder, belongs to another user or can be written by anyone.
    """
    file = Path(recipes.split(recipe)[0])
    if recipe in recipes.shipped() or not file.is_file():
        return
    reason = trust.foreign([file, file.absolute().parent])
    if reason:
        raise RunError(
            f"{reason}, and {named_by} names {file} as its recipe; read it, then give it yourself: systolic explain {recipe} --on v5e-16"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseDifference:
    """Seconds that a cause takes in each of two steps; 0 where it is none of one's causes."""

    name: str
    title: str
    seconds: float
    against_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """Two steps, both from the compiler's schedule, and what one takes longer for."""

    forecast: Forecast
    against: Forecast
    causes: Sequence[CauseDifference]
    """The largest difference first; all of them."""

    @property
    def alike(self) -> bool:
        """Whether both take the same time, within :data:`ALIKE`."""
        one, two = self.forecast.step_seconds, self.against.step_seconds
        return one is not None and two is not None and abs(one / two - 1) < ALIKE

    @property
    def worth_showing(self) -> list[CauseDifference]:
        """Differences above :data:`ALIKE` of the longer step."""
        longest = max(self.forecast.step_seconds or 0.0, self.against.step_seconds or 0.0)
        least = ALIKE * longest
        return [one for one in self.causes if abs(one.seconds - one.against_seconds) > least]


def compare(one: RecipeStep, two: RecipeStep, given: Given = NOTHING) -> StepComparison:
    """What makes the first slower or faster than the second, cause by cause.

    ``given`` has trips and costs that the programs leave open, of which each may have some, and corrections.

    Raises: as :meth:`~systolic.session.explaining.StepExplainer.explain`.
    """
    known = replace(given, strict=False)
    first, second = (
        replace(step.explainer(), remedies=0, given=known).explain() for step in (one, two)
    )
    causes_by_name = [
        {c.name: c for c in made.causes if c.seconds is not None} for made in (first, second)
    ]
    rows = []
    for name in dict.fromkeys([*causes_by_name[0], *causes_by_name[1]]):
        a, b = (causes[name].seconds if name in causes else 0.0 for causes in causes_by_name)
        title = (causes_by_name[0].get(name) or causes_by_name[1][name]).title
        rows.append(
            CauseDifference(name=name, title=title, seconds=a or 0.0, against_seconds=b or 0.0)
        )
    rows.sort(key=lambda row: -abs(row.seconds - row.against_seconds))
    return StepComparison(forecast=first.forecast, against=second.forecast, causes=rows)
