"""Training steps of PyTorch modules: what PyTorch leaves constant stays so, and what is not followed is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from systolic.core.errors import DataError, OptionError
from systolic.models.program.config import TorchModule
from systolic.models.program.function import PureFunction
from systolic.models.program.torch_training import Compared, trainable_function
from tests.models.program import crooked, zoo


def function_of(make: Any, example: Any = crooked.rows) -> PureFunction:
    torch.manual_seed(0)
    return trainable_function((make(), example()), "net")


def compared(function: PureFunction) -> Compared:
    assert function.compare is not None
    return function.compare(function.example)


@pytest.mark.parametrize(
    "make",
    [
        crooked.Linears,
        crooked.Constant,
        crooked.Decorated,
        crooked.Averaged,
        crooked.Squared,
        crooked.spectral,
        crooked.dropped,
    ],
)
def test_steps_that_agree(make: Any) -> None:
    """No gradient passes no_grad, and dropout is not what differs."""
    assert compared(function_of(make)).notes == ()


def test_a_network_with_batch_norm_and_dropout_agrees_and_stays_as_it_was() -> None:
    made = zoo.cnn()
    function = trainable_function(made, "net")
    before = {name: one.copy() for name, one in {**function.trained, **function.state}.items()}
    rng = np.random.default_rng(0)
    assert function.compare is not None
    found = function.compare({"input": rng.normal(size=(3, 1, 8, 8)).astype(np.float32)})
    assert found == Compared()
    for name, one in {**function.trained, **function.state}.items():
        assert np.array_equal(one, before[name]), name
    assert all(one.grad is None for one in made[0].parameters())


@pytest.mark.parametrize(
    ("make", "example", "told"),
    [
        (crooked.Data, crooked.rows, "is 0 there"),
        (crooked.Flipped, crooked.rows, "differs by 2 of its norm"),
        (crooked.Rounded, crooked.rows, "differs by 1 of its norm"),
        (crooked.Hooked, crooked.rows, "differs by 0.9 of its norm"),
        (crooked.Clamped, crooked.rows, "changes its weight head.weight in place"),
        (
            lambda: nn.ConvTranspose2d(6, 6, 3, groups=3),
            lambda: torch.randn(2, 6, 5, 5),
            "output output differs by",
        ),
        (
            lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True),
            lambda: torch.randn(2, 3, 5, 5),
            "buffer running_",
        ),
        (
            lambda: nn.Embedding(9, 4, max_norm=0.5),
            crooked.repeated,
            "changes its weight weight in place",
        ),
        (
            lambda: nn.Embedding(9, 4, scale_grad_by_freq=True),
            crooked.repeated,
            "the gradient of weight differs by",
        ),
    ],
)
def test_what_is_not_followed_is_refused(make: Any, example: Any, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        compared(function_of(make, example))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_compared_is_said() -> None:
    (note,) = compared(function_of(crooked.Noisy)).notes
    assert "draws random numbers besides dropout in training" in note

    def batch() -> dict[str, np.ndarray]:
        return {"x": np.ones((3, 4), np.float32), "label": np.zeros(3)}

    (note,) = TorchModule(unused).check_training(batch)
    assert "depends on its weight head.weight" in note
    (note,) = TorchModule(one_row).check_training(lambda: {"input": np.ones((1, 3), np.float32)})
    assert "fails on the first batch (ValueError: Expected more than 1 value" in note


def unused() -> Any:
    return crooked.Unused(), crooked.rows()


def one_row() -> Any:
    return nn.BatchNorm1d(3), torch.zeros(2, 3)


def test_whole_numbers_that_do_not_fit_are_refused() -> None:
    class Counter(crooked.Linears):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(2**40 + 7))

    with pytest.raises(DataError, match="seen of the model holds 1099511627783"):
        function_of(Counter)
