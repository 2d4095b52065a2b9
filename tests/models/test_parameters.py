"""How weights begin: with the deviation that their makers state."""

import jax
import numpy as np
import pytest

from systolic.models.decoder.config import Decoder
from systolic.models.vision.config import ViT
from tests.models import images
from tests.steps import tiny

DECODER = Decoder(layers=2, d_model=64, d_ff=256, heads=4, kv_heads=4, head_dim=16, vocab=512)
VIT = ViT(layers=2, d_model=64, d_ff=256, heads=4, patch=4, pixels=images.COLOURED)


def test_weights_have_the_deviation_that_is_stated() -> None:
    """Normal cut at two deviations, its spread given back: not 0.88 of what it says."""
    steps = tiny.steps(tiny.job(layout=tiny.ONE_DEVICE, model=DECODER))
    params, _ = jax.jit(steps.network.init)(jax.random.key(0))
    depth = (2 * DECODER.layers) ** -0.5
    stated = {
        "blocks/query": 64**-0.5,
        "blocks/out": depth * 64**-0.5,
        "blocks/mlp/up": 64**-0.5,
        "blocks/mlp/down": depth * 256**-0.5,
    }
    check({name: params[name] for name in stated}, stated)


def test_weights_of_image_models_too() -> None:
    params, _ = jax.jit(images.steps(VIT).network.init)(jax.random.key(0))
    stated = {"blocks/project": 64**-0.5, "blocks/up": 64**-0.5, "blocks/down": 256**-0.5}
    check({name: params[name] for name in stated}, stated)


def check(params: dict[str, jax.Array], stated: dict[str, float]) -> None:
    for name, value in params.items():
        array = np.asarray(value)
        assert array.std() == pytest.approx(stated[name], rel=0.02), name
        assert abs(array.mean()) < 0.03 * stated[name], name
        assert abs(array).max() < 2.3 * stated[name], "the tails are cut"
