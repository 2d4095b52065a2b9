"""Values of a wrong type from Python: every parameter of every public function takes them or says in a line what it takes; what the command line takes as text is taken."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import systolic
from systolic.core.errors import SystolicError
from systolic.job import Job, Layout
from systolic.models.decoder.options import RopeScaling, Stretching
from systolic.recipes.jobs import source_of
from systolic.recipes.lm import lm

WRONG = (None, 3, -1, True, [3], {"x": 1}, object(), "x")
FUNCTIONS = [name for name in systolic.__all__ if inspect.isfunction(getattr(systolic, name, None))]
YARN: dict[str, Any] = {"kind": Stretching.linear, "factor": 2.0}
NEEDED = {"on": "v5e-1", "to": "int8", "requests_per_second": 1, "search": {"x": [1]}, "via": "gke"}
"""Parameters without a default; others name what does not exist, so that nothing runs."""
TAKEN = (("calibrations", "name", None), ("evaluate", "harness", "x"))
"""Values of the right type: one lists all, the other is looked up among the harness's tasks (``tests/inference/test_harness.py``)."""
UNCHECKED = {"what", "plan", "place", "evaluator", "watchers", "prompts"}
"""Parameters of types that only type checkers know, and what has a check of its own."""


def called(name: str, values: dict[str, Any]) -> Any:
    """A public function's result for values by name."""
    function = getattr(systolic, name)
    kinds = {n: p.kind for n, p in inspect.signature(function).parameters.items()}
    first = [values[n] for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY]
    rest = {
        n: v for n, v in values.items() if kinds.get(n) is not inspect.Parameter.POSITIONAL_ONLY
    }
    return function(*first, **rest)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_value_of_a_wrong_type_passes_into_a_public_function(name: str) -> None:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {
        n: p
        for n, p in inspect.signature(getattr(systolic, name)).parameters.items()
        if p.kind not in several
    }
    needed = {
        n: NEEDED.get(n, f"/nowhere/{n}")
        for n, p in parameters.items()
        if p.default is inspect.Parameter.empty
    }
    for parameter in parameters:
        for value in WRONG:
            if (name, parameter, value) in TAKEN:
                continue
            what = f"{name} {parameter} {value!r}"
            try:
                called(name, {**needed, parameter: value})
            except SystolicError as error:
                told = str(error)
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
            else:
                raise AssertionError(f"{what}: nothing was refused")
            assert "\n" not in told, what
            if type(value) is object and parameter not in UNCHECKED:
                assert told.startswith(f"{parameter} is <obj"), what
                assert "; it takes " in told, what


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: systolic.forecast("lm", on=None), "on is None; it takes slices or their names"),
        (lambda: systolic.forecast(abs, on=8), "on is 8; it takes slices or their names"),
        (lambda: systolic.plan("lm", on=None), "on is None; it takes slices or their names"),
        (lambda: systolic.explain("lm", on=8), "on is 8; it takes a slice or its name, such as"),
        (lambda: systolic.open(3), "path is 3; it takes a path"),
        (
            lambda: systolic.plan_serving("lm", on="8xh100", requests_per_second=1),
            "on is 8xh100, and plan serve is for slices of TPUs: give v6e-8",
        ),
        (lambda: systolic.forecast("lm", on="v5e-1", vary="batch"), "vary is 'batch'; it takes"),
        (lambda: systolic.forecast("lm", on="v5e-1", vary={"batch": []}), "no value for batch"),
        (lambda: lm(sequence="many"), "sequence is 'many'; it takes a whole number"),
        (lambda: lm(layout={"fsd": 2}), "layout has 'fsd'; did you mean fsdp?; its fields are"),
        (lambda: source_of("lm", {"layout": {"fsd": 2}}), "no option 'layout.fsd'; did you mean"),
        (lambda: lm(optimizer="lionn"), "optimizer.kind is 'lionn'; did you mean lion?"),
    ],
)
def test_what_is_refused_says_what_is_taken(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SystolicError) as refused:
        make()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"model.layers": "2", "sequence": "256"}, {"model.layers": 2, "sequence": 256}),
        ({"layout": {"fsdp": 2}}, {"layout.fsdp": 2}),
        ({"layout": {"data": 1}, "layout.fsdp": "2"}, {"layout": Layout(data=1, fsdp=2)}),
        ({"optimizer": "lion"}, {"optimizer.kind": "lion"}),
        (
            {"optimizer": {"learning-rate": "1e-3"}, "model": {"rope_scaling": YARN}},
            {"optimizer.learning-rate": 1e-3, "model.rope-scaling": RopeScaling(**YARN)},
        ),
    ],
)
def test_text_and_dicts_are_taken_as_the_command_line_takes_them(
    given: dict[str, Any], same: dict[str, Any]
) -> None:
    def made(options: dict[str, Any]) -> Job:
        return source_of("lm", options).job

    assert made(given) == made(same)
    plain = {name: value for name, value in given.items() if "." not in name}
    if plain == given:
        assert lm(**given) == made(same)


def test_options_with_several_values_are_taken_as_the_command_line_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "systolic.forecasting.run.forecast_job", lambda job, *_, **__: pytest.fail(str(job))
    )
    settings = []

    def row(on: systolic.Slice, given: dict[str, Any], make: Callable[[], Any]) -> Any:
        settings.append((on.name, given))

    monkeypatch.setattr("systolic.forecasting.table.row_of", row)
    monkeypatch.setattr("systolic.forecasting.table.ForecastTable", lambda **_: None)
    for vary in ({"batch": 8}, "batch=8", ["batch=8"], {"batch": "8"}, {"batch": [8]}):
        systolic.forecast("lm", on="v5e-1", vary=vary)
    assert [(on, str(given["batch"])) for on, given in settings] == [("v5e-1", "8")] * 5
