"""An untrained model knows nothing: its loss is near that of a uniform guess, whatever the family."""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from systolic.job import Model
from systolic.models.decoder.config import Decoder, Mlp
from systolic.recipes.lm import lm
from systolic.steps.tasks import LanguageModel
from tests.models import images
from tests.steps import tiny
from tests.tiers import some

WIDE = Decoder(layers=2, d_model=256, d_ff=128, heads=4, kv_heads=2, head_dim=16, vocab=1024)
DECODERS = {
    "tied": WIDE,
    "untied": replace(WIDE, tie_embeddings=False),
    "narrow": replace(WIDE, d_model=32),
    "deep": replace(WIDE, layers=12, d_model=64),
    "mixture": replace(WIDE, experts=4),
    "n-grams": replace(WIDE, ngrams=3, ngram_rows=64, ngram_dim=8),
    "two matrices": replace(WIDE, mlp=Mlp.relu, qk_norm=True),
}


def first_loss(model: Decoder) -> float:
    of = tiny.job(layout=tiny.ONE_DEVICE, model=model, task=LanguageModel())
    steps = tiny.steps(of)

    @jax.jit
    def first(key: jax.Array, batch: Any) -> Any:
        return steps.evaluate(*steps.network.init(key), batch)

    sums = first(jax.random.key(0), batch(steps, model.vocab))
    return float(sums["loss"].total / sums["loss"].weight)


def batch(steps, vocab: int) -> dict[str, np.ndarray]:
    """Random tokens, each row one document."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, vocab, (steps.batch_size, 33)).astype(np.int32)
    place = np.tile(np.arange(32, dtype=np.int32), (steps.batch_size, 1))
    arrays = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "positions": place}
    mask = np.ones(steps.batch_size, np.float32)
    return {**arrays, "segments": np.ones_like(place), "mask": mask}


@pytest.mark.parametrize("name", some(list(DECODERS), ["mixture"]))
def test_a_decoder_begins_near_the_logarithm_of_its_vocabulary(name: str) -> None:
    model = DECODERS[name]
    assert first_loss(model) == pytest.approx(math.log(model.vocab), abs=0.35)


@pytest.mark.parametrize(
    "name", some(["cnn", "resnet-basic", "vit-token"], ("resnet-basic", "vit-token"))
)
def test_an_image_model_begins_near_the_logarithm_of_its_classes(name: str) -> None:
    model: Model = images.MODELS[name]
    steps = images.steps(model)

    @jax.jit
    def first(key: jax.Array, batch: Any) -> Any:
        return steps.sums(*steps.network.init(key), batch, train=True)[0]

    sums = first(jax.random.key(0), images.batch(steps))
    loss = float(sums["loss"].total / sums["loss"].weight)
    assert loss == pytest.approx(math.log(images.CLASSES), abs=0.2)


@pytest.mark.slow
def test_the_default_language_model_is_among_them() -> None:
    model = lm().model
    assert isinstance(model, Decoder)
    shallow = replace(model, layers=1, d_ff=64)
    assert first_loss(shallow) == pytest.approx(math.log(model.vocab), abs=0.35)
