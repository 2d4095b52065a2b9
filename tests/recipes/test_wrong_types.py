"""Values of a wrong type from Python: every parameter of every recipe, and every field below one, takes them or says in a line what it takes."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.core.errors import SystolicError
from systolic.job import Job, Layout, Optimizer, OptimizerChange
from systolic.recipes.digits import digits
from systolic.recipes.image import image
from systolic.recipes.jobs import source_of
from systolic.recipes.lm import lm
from systolic.recipes.sft import sft

WRONG = ("x", 3, -1, None, True, [3], {"x": 1}, object())
NEEDED = {"sft": {"from_": "smollm2-135m"}}
"""Parameters without a default."""


def test_no_value_of_a_wrong_type_passes_into_a_recipe() -> None:
    """Recipes that begin with the same records have the same fields below them, which are tried once."""
    tried: set[tuple[str, Any]] = set()
    for name in recipes.shipped():
        recipe, needed = recipes.find(name), NEEDED.get(name, {})
        parameters = inspect.signature(recipe.function).parameters
        for parameter in parameters:
            for value in WRONG:
                given = {**needed, parameter: value}
                for make in (partial(source_of, name, given), partial(recipe.function, **given)):
                    refused_in_a_line(make, f"{name} {parameter} {value!r}")
        for option in recipes._option_names(recipe.function):
            record, below, _ = option.partition(".")
            known = below and (option, parameters[record.replace("-", "_")].annotation)
            if not known or known in tried:
                continue
            tried.add(known)
            for value in WRONG:
                make = partial(recipes.expanded, recipe, {option: value})
                refused_in_a_line(make, f"{name} {option} {value!r}")
    assert len(tried) > 50


def refused_in_a_line(make: Callable[[], object], what: str) -> None:
    """Fails for an error that is no line of ours."""
    told = ""
    try:
        make()
    except SystolicError as error:
        told = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert "\n" not in told, what


def adapted(**options: Any) -> Job:
    """Fine-tuning with adapters."""
    return sft(from_="smollm2-135m", adapter="lora", **options)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sft(from_="x"), "x does not exist, and no published model has that name"),
        (
            lambda: sft(from_="a/smollm2"),
            "of that family it knows smollm2-135m, smollm2-360m, smollm2",
        ),
        (lambda: lm(layout="fsdp"), "layout is 'fsdp'; it takes a systolic.job.Layout"),
        (lambda: lm(model="llama"), "model is 'llama'; it takes a systolic.models.decoder."),
        (lambda: lm(steps=1.5), "steps is 1.5; it takes a whole number"),
        (lambda: lm(path=3), "path is 3; it takes a path or None"),
        (lambda: lm(optimizer=OptimizerChange()), "; it takes a systolic.job.Optimizer"),
        (lambda: adapted(targets=["query", 3]), "targets is 3; it takes text"),
        (lambda: source_of("lm", {"layout.remat-names": 3}), "layout.remat-names is 3; it takes a"),
        (lambda: source_of("lm", {"layout.fsdp": {}}), "layout.fsdp is {}; it takes a whole"),
    ],
)
def test_what_is_refused_says_what_is_taken(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SystolicError) as refused:
        make()
    assert message in str(refused.value)


def test_text_and_lists_are_taken_as_on_the_command_line() -> None:
    for given in ("query key", "query,key", ["query", "key"], ("query", "key")):
        assert adapted(targets=given).adapter.targets == ("query", "key")
    assert adapted(targets="query").adapter.targets == ("query",)
    assert adapted(alpha=8).start == Path("smollm2-135m")
    assert lm(layout=Layout(fsdp=2), steps=20.0).steps == 20
    # A recipe that changes its own optimizer takes a whole one, too.
    own = Optimizer(learning_rate=1.0, b1=0.5)
    assert {one.optimizer.b1 for one in (image(optimizer=own), digits(optimizer=own))} == {0.5}
