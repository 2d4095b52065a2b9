"""Ranges beside fields: what they take, what they say, and that no field of any recipe lacks one."""

import dataclasses
import inspect
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systolic import recipes
from systolic.core.errors import OptionError, SystolicError
from systolic.core.ranges import (
    COUNT,
    LARGEST_INT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check,
    check_arguments,
    ranges_of,
)
from systolic.job import Job, Optimizer, OptimizerChange, OptimizerKind
from tests.formats.outlines import outline


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    count: Annotated[int, COUNT] = 1
    rate: Annotated[float, POSITIVE] = 1.0
    decay: Annotated[float | None, SHARE] = None
    deadline: Annotated[float, POSITIVE] | None = None
    jump: Annotated[float, Range(above=1, only=(0,))] = 3.0
    widths: Annotated[tuple[int, ...], COUNT] = (1, 2)

    def __post_init__(self) -> None:
        check(self, "knobs")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": 0}, "knobs.count is 0; it must be at least 1"),
        ({"count": 2.5}, "knobs.count is 2.5; it takes a whole number"),
        ({"count": 2**31}, f"knobs.count is {2**31}; it must be at most {LARGEST_INT}"),
        ({"count": True}, "knobs.count is True; it takes a whole number"),
        ({"rate": 0.0}, "knobs.rate is 0.0; it must be above 0"),
        ({"rate": math.nan}, "knobs.rate is nan, not a finite number; it must be above 0"),
        ({"rate": math.inf}, "knobs.rate is inf, not a finite number; it must be above 0"),
        (
            {"decay": -math.inf},
            "knobs.decay is -inf, not a finite number; it must be at least 0 and below 1",
        ),
        ({"rate": "3e-4"}, "knobs.rate is '3e-4'; it takes a number"),
        ({"deadline": -5.0}, "knobs.deadline is -5.0; it must be above 0"),
        ({"decay": 1.0}, "knobs.decay is 1.0; it must be at least 0 and below 1"),
        ({"jump": 0.5}, "knobs.jump is 0.5; it must be 0, or above 1"),
        ({"widths": (4, 0)}, "knobs.widths is 0; it must be at least 1"),
    ],
)
def test_a_value_outside_its_range_is_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError) as error:
        Knobs(**given)
    assert str(error.value) == told


def test_none_is_taken_only_where_the_type_says_so() -> None:
    assert Knobs(decay=None).decay is None
    with pytest.raises(OptionError):
        Knobs(rate=None)  # ty: ignore[invalid-argument-type]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_range_is_the_set_that_its_sides_say(value: float) -> None:
    assert (value in SHARE) == (0 <= value < 1)
    assert (value in POSITIVE) == (0 < value < math.inf)
    assert (value in NOT_NEGATIVE) == (0 <= value < math.inf)


def test_parameters_of_a_function_are_checked_by_the_name_that_was_typed() -> None:
    def verb(top_p: Annotated[float, Range(above=0, most=1)] = 0.95) -> None: ...

    check_arguments(verb, {"top_p": 1.0}, str)
    with pytest.raises(OptionError, match="--top-p is 7; it must be above 0 and at most 1"):
        check_arguments(verb, {"top_p": 7}, lambda name: f"--{name.replace('_', '-')}")


def kinds(hint: Any) -> set[Any]:
    """The types that a hint is made of, without its annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    return set(typing.get_args(hint)) or {hint}


def records() -> dict[str, type]:
    """Every dataclass that a job of a shipped recipe is made of, by name."""
    from systolic.data.image.images import Images
    from systolic.models.vision.config import ViT
    from systolic.steps.tasks import Classification

    found: dict[str, type] = {}
    todo: list[Any] = [Job, Images, ViT, Classification]
    for name in recipes.shipped():
        function = recipes.find(name).function
        todo += typing.get_type_hints(function).values()
        if not any(p.default is p.empty for p in inspect.signature(function).parameters.values()):
            job = function()
            todo += [type(job.model), type(job.data), type(job.task)]
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__name__ not in found:
            found[kind.__name__] = kind
            todo += [part for hint in typing.get_type_hints(kind).values() for part in kinds(hint)]
    return found


def test_every_number_of_every_job_has_a_range() -> None:
    bare = [
        f"{name}.{field}"
        for name, kind in records().items()
        if kind is not OptimizerChange  # checked by the Optimizer that it makes, see below
        for field, hint in typing.get_type_hints(kind, include_extras=True).items()
        if kinds(hint) & {int, float} and field not in ranges_of(kind)
    ]
    assert not bare


def test_a_change_of_an_optimizer_has_the_fields_of_one_and_its_ranges() -> None:
    fields = [field.name for field in dataclasses.fields(Optimizer)]
    assert [field.name for field in dataclasses.fields(OptimizerChange)] == fields
    own = Optimizer(kind=OptimizerKind.sgd, learning_rate=0.1, clip=0.0)
    assert OptimizerChange().of(own) == own
    assert OptimizerChange(ema=0.99).of(own) == dataclasses.replace(own, ema=0.99)
    assert OptimizerChange(kind=OptimizerKind.lion).of(own) == Optimizer(kind=OptimizerKind.lion)
    with pytest.raises(OptionError, match=r"optimizer\.ema is 1\.5"):
        OptimizerChange(ema=1.5).of(own)


def numeric_options(recipe: recipes.Recipe) -> list[tuple[str, str | None, bool]]:
    """(parameter, field of its dataclass or None, whether it takes whole numbers only)."""
    found: list[tuple[str, str | None, bool]] = []
    for name, hint in typing.get_type_hints(recipe.function, include_extras=True).items():
        if name == "return":
            continue
        if kinds(hint) & {int, float}:
            found.append((name, None, float not in kinds(hint)))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found += [(name, field, of.whole) for field, of in ranges_of(hint).items()]
    return found


CASES = [
    pytest.param(name, *option, id=f"{name}-{option[0]}-{option[1]}")
    for name in recipes.shipped()
    for option in numeric_options(recipes.find(name))
]


def job(name: str, folder: Path, parameter: str, field: str | None, value: float) -> Job:
    """The job of a recipe with one number changed."""
    recipe = recipes.find(name)
    signature = inspect.signature(recipe.function)
    given: dict[str, Any] = {
        p.name: folder for p in signature.parameters.values() if p.default is p.empty
    }
    if "from_" in signature.parameters:
        outline(folder)
    if "classes" in signature.parameters:
        given["classes"] = 3  # the folder has none to count
    if field is not None:
        default = signature.parameters[parameter].default
        return recipe({**given, parameter: dataclasses.replace(default, **{field: value})})
    return recipe({**given, parameter: value})


@pytest.mark.parametrize(("name", "parameter", "field", "whole"), CASES)
def test_no_recipe_takes_an_impossible_number(
    name: str, parameter: str, field: str | None, whole: bool, tmp_path: Path
) -> None:
    for value in (-2, 2**40) if whole else (math.nan, math.inf, -2.5):
        with pytest.raises(SystolicError) as error:
            job(name, tmp_path, parameter, field, value)
        assert "\n" not in str(error.value)
        assert str(value) in str(error.value)
