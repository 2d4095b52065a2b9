"""How weights begin: with the deviation that their makers state."""

import jax
import numpy as np
import pytest
from flax import nnx

from systolic.models import layers
from systolic.models.parameters import weight


@pytest.mark.parametrize(("fan_in", "gain"), [(64, 1.0), (400, 0.5)])
def test_a_weight_has_the_deviation_that_is_stated(fan_in: int, gain: float) -> None:
    value = np.asarray(weight(nnx.Rngs(0), (fan_in, 5000), (None, None), fan_in, gain)[...])
    wanted = gain / fan_in**0.5
    assert value.std() == pytest.approx(wanted, rel=0.01)
    assert abs(value.mean()) < 0.01 * wanted
    assert abs(value).max() < 2.3 * wanted, "the tails are cut"


def test_layers_of_image_models_too() -> None:
    class Pair(nnx.Module):
        def __init__(self) -> None:
            self.small = layers.random((300, 300), (None, None), 0.02)
            self.large = layers.random((300, 300), (None, None), 0.5)

    pair = Pair()
    layers.start(pair, nnx.Rngs(params=jax.random.key(1)))
    for parameter, wanted in ((pair.small, 0.02), (pair.large, 0.5)):
        assert np.asarray(parameter[...]).std() == pytest.approx(wanted, rel=0.01)
