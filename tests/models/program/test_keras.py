"""Keras models as pure functions: outputs are Keras' own, training moves their state."""

import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from systolic.core.errors import OptionError, SystolicError
from systolic.models.program.config import load_keras, made_by
from systolic.models.program.keras_function import keras_function
from tests.models.program import zoo
from tests.tiers import some


@pytest.mark.parametrize("make", some([zoo.sequential, zoo.functional], [zoo.functional]))
def test_outputs_are_those_of_keras(make: Any) -> None:
    function = keras_function(made_by(make, "keras", "zoo.py"), "zoo.py")
    assert function.source is not None
    wanted = function.source(function.example)
    run = jax.jit(lambda t, s, x: function.call(t, s, x, False, None)[0])
    made = run(function.trained, function.state, function.example)
    assert made.keys() == wanted.keys()
    for name, there in wanted.items():
        np.testing.assert_allclose(made[name], there, rtol=1e-5, atol=1e-6)


def test_inputs_and_variables_have_the_names_of_keras() -> None:
    function = keras_function(made_by(zoo.functional, "keras", "zoo.py"), "zoo.py")
    assert list(function.example) == ["image", "size"]
    assert {name.rpartition("/")[2] for name in function.trained} == {
        "kernel",
        "bias",
        "gamma",
        "beta",
    }
    assert {name.rpartition("/")[2] for name in function.state} == {
        "moving_mean",
        "moving_variance",
    }


def test_training_moves_statistics_and_the_seed_of_dropout() -> None:
    function = keras_function(made_by(zoo.sequential, "keras", "zoo.py"), "zoo.py")
    run = jax.jit(lambda s: function.call(function.trained, s, function.example, True, None))
    first, after = run(function.state)
    second, _ = run(after)
    assert not np.allclose(first["output"], second["output"])
    changed = {
        name.rpartition("/")[2]
        for name in after
        if not np.array_equal(after[name], function.state[name])
    }
    assert changed == {"moving_mean", "moving_variance", "seed_generator_state"}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            lambda: load_keras().Sequential([load_keras().layers.Dense(3)]),
            "has unknown input shapes",
        ),
        (
            lambda: load_keras().Sequential(
                [load_keras().Input((None, 3)), load_keras().layers.Dense(3)]
            ),
            "of unknown size",
        ),
        (lambda: 3, "made int, not a keras.Model"),
    ],
)
def test_a_mistake_is_one_line(made: Any, told: str) -> None:
    with pytest.raises(SystolicError) as caught:
        keras_function(made(), "zoo.py")
    assert told in str(caught.value)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "torch"))
    monkeypatch.setitem(sys.modules, "keras", other)  # ty: ignore[invalid-argument-type]
    with pytest.raises(OptionError, match=r"loaded with the backend torch.*set KERAS_BACKEND=jax"):
        load_keras()
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(OptionError, match="KERAS_BACKEND is tensorflow"):
        load_keras()
