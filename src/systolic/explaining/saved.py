"""Steps that a forecast's JSON or a plan names: made again, explained, and compared."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from systolic import recipes
from systolic.chips import Slice, slice
from systolic.compiling import StepKind
from systolic.core.errors import DataError, OptionError, RunError
from systolic.core.files import read_given
from systolic.core.option_words import flat, negated
from systolic.core.ranges import dashed
from systolic.explaining.explainer import RecipeStep
from systolic.forecasting import Forecast
from systolic.job.layout import RENAMED
from systolic.recipes.jobs import arguments_of
from systolic.runs import access
from systolic.runs.plan_choice import is_plan, load
from systolic.sim.incomplete import NOTHING, Given

ALIKE = 0.002
"""Share of the step below which two figures are the same."""
OptionReader = Callable[..., Mapping[str, Any]]
"""Makes all options of a recipe from the recipe and those of a file."""
_OF_EXPLAIN = ("flags", "remedies", "workers", "trips", "cost", "calibration", "json")
"""Options in the words of earlier versions that are none of the recipe's; flags are in the file."""


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


def saved_step(path: Path) -> RecipeStep:
    """The step of a forecast's JSON, or of the best of a plan.

    Args:
        path: Of the file.

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
            f"{path} is a forecast of a Job, a function, a program or a dump, and does not hold it; explain what it was made of: systolic explain RECIPE --on {record['slice']}, or --on {record['slice']} -- python PROGRAM, or in Python systolic.explain(job, on='{record['slice']}')"
        )
    try:
        saved = msgspec.convert(record, _SavedForecast)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is a damaged forecast ({error}); write it again") from error
    on = slice(saved.slice)
    _require_own(saved.target, path)
    if saved.options is None:
        return replace(_from_words(saved), flags=tuple(saved.compiler.flags))
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


def _from_words(saved: _SavedForecast) -> RecipeStep:
    """The step of a forecast of an earlier version, which has the words of its command in place of the recipe's options.

    Raises:
        OptionError: an option is not the recipe's, or does not parse.
    """
    recipe = recipes.find(saved.target)
    parameters = inspect.signature(recipe.function).parameters
    switches = {negated(name): name for name in flat({n: p.default for n, p in parameters.items()})}
    words: dict[str, list[str]] = {}
    for word in saved.arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words[dashed(name)] = values = [value] if equals else []
        elif words:
            values.append(word)
        else:
            raise OptionError(f"{saved.target} has no argument {word}, which the file names")
    on, step = words.pop("on", [saved.slice]), words.pop("step", [saved.step.value])
    options: dict[str, Any] = {}
    for name, values in words.items():
        if name in _OF_EXPLAIN:
            continue
        if name in switches:
            options[switches[name]] = False
            continue
        part, _, last = name.rpartition(".")
        now = RENAMED.get(last.replace("-", "_"), last) if part == "layout" else last
        options[f"{part}.{dashed(now)}" if part else now] = " ".join(values) if values else True
    return RecipeStep(
        recipe=recipe,
        options=arguments_of(recipe, options),
        on=slice(on[0]),
        flags=(),
        step=StepKind(step[0]),
    )


def _require_own(recipe: str, named_by: Path) -> None:
    """Refuses a recipe that a file names and that is neither shipped nor the user's own.

    Raises:
        RunError: the file, or its folder, belongs to another user or can be written by anyone.
    """
    file = Path(recipes.split(recipe)[0])
    if recipe in recipes.shipped() or not file.is_file():
        return
    reason = access.foreign([file, file.absolute().parent])
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
    target: str = ""
    """The first, as it was named."""
    against_target: str = ""

    @property
    def alike(self) -> bool:
        """Whether both take the same time, within :data:`ALIKE`."""
        mine, other = self.forecast.step_seconds, self.against.step_seconds
        return mine is not None and other is not None and abs(mine / other - 1) < ALIKE

    @property
    def worth_showing(self) -> list[CauseDifference]:
        """Differences above :data:`ALIKE` of the longer step."""
        longest = max(self.forecast.step_seconds or 0.0, self.against.step_seconds or 0.0)
        least = ALIKE * longest
        return [row for row in self.causes if abs(row.seconds - row.against_seconds) > least]


def step_of_file(
    path: Path,
    *,
    on: Slice | None = None,
    step: StepKind | None = None,
    flags: str = "",
    reader: OptionReader | None = None,
    options: Mapping[str, Any],
) -> RecipeStep:
    """The step that a file names, with what is given on top.

    Args:
        path: A forecast's JSON or a plan.
        on: Another slice.
        step: Another of the job's steps.
        flags: Compiler flags on top of those of the file; ``none`` leaves these out.
        reader: Makes the recipe's options, in place of ``options``.
        options: Options of the recipe, in place of those of the file.

    Raises: as :func:`saved_step`.
    """
    saved = saved_step(path).as_options
    if reader is not None:
        values = reader(saved.recipe, saved.options)
    else:
        more = recipes.expanded(saved.recipe, options, saved.options)
        values = {**saved.options, **recipes.converted(saved.recipe, more)}
    saved = replace(saved, options=values, step=step or saved.step)
    return (saved if on is None else saved.at(on)).with_flags(flags)


def compare(
    of: RecipeStep,
    other: RecipeStep,
    given: Given = NOTHING,
    names: tuple[str, str] = ("the first", "the second"),
) -> StepComparison:
    """Compares two steps, cause by cause.

    ``given`` has trips and costs that the programs leave open, of which each may have some, and corrections;
    ``names`` are what is printed of the two.

    Raises: as :meth:`~systolic.explaining.explainer.StepExplainer.find_causes`.
    """
    known = replace(given, strict=False)
    first, second = (replace(step.explainer(), given=known).find_causes() for step in (of, other))
    causes_by_name = [
        {c.name: c for c in explanation.causes if c.seconds is not None}
        for explanation in (first, second)
    ]
    rows = []
    for name in dict.fromkeys([*causes_by_name[0], *causes_by_name[1]]):
        a, b = (causes[name].seconds if name in causes else 0.0 for causes in causes_by_name)
        title = (causes_by_name[0].get(name) or causes_by_name[1][name]).title
        rows.append(
            CauseDifference(name=name, title=title, seconds=a or 0.0, against_seconds=b or 0.0)
        )
    rows.sort(key=lambda row: -abs(row.seconds - row.against_seconds))
    return StepComparison(
        forecast=first.forecast,
        against=second.forecast,
        causes=rows,
        target=names[0],
        against_target=names[1],
    )
