"""Families that ``parity.py`` compares: models of transformers with random weights, and the outputs of both sides."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from systolic.models.vision.config import IMAGENET_MEAN, IMAGENET_STD, Pixels
from tests.models import speech
from tests.models.families import dense_models, test_bert, test_image_families, test_mixtures

HALF = (0.5,) * 3
PIXELS = {
    "ViT": Pixels(mean=HALF, std=HALF),
    "MobileNetV2": Pixels(mean=HALF, std=HALF),
    "ResNet": Pixels(mean=IMAGENET_MEAN, std=IMAGENET_STD),
}
"""Means and deviations of the processors of transformers."""
LENGTH = 48
"""Tokens of a decoder's sequence: longer than the windows, shorter than the positions."""
SHORT = 20
"""Tokens for BERT and Whisper, whose tiny models have 24 positions."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family, and how either side computes its output."""

    make: Callable[[int], Any]
    """A model of transformers from a seed, in float32, with random norms and biases."""
    theirs: Callable[[Any], np.ndarray]
    """Its output, float32."""
    ours: Callable[[Any], jax.Array]
    """Output of our module."""
    load: Any = transformers.AutoModelForCausalLM
    """Class that opens a folder."""
    mixture: bool = False
    """Whether it has routers."""


def tokens(length: int, vocab: int) -> np.ndarray:
    """int64[2, length]."""
    return np.random.default_rng(0).integers(0, vocab, (2, length))


def decoder_theirs(model: Any) -> np.ndarray:
    """Logits of a language model of transformers."""
    with torch.no_grad():
        return model(torch.tensor(tokens(LENGTH, 120)), use_cache=False).logits.float().numpy()


def decoder_ours(module: Any) -> jax.Array:
    """Logits of our decoder."""
    given = jnp.asarray(tokens(LENGTH, 120))
    positions = jnp.asarray(np.broadcast_to(np.arange(LENGTH), given.shape))
    graph, state = nnx.split(module)

    def run(state: Any) -> jax.Array:
        call = nnx.capture(nnx.merge(graph, state), nnx.Intermediate)
        return call(given, jnp.ones_like(given), positions)[0]

    return jax.jit(run)(state)


def decoder(kind: str, fields: dict[str, Any], *, mixture: bool = False) -> Case:
    """A decoder of the tests."""
    if kind == "gpt2":
        fields = {**fields, "n_positions": LENGTH}
    return Case(
        make=lambda seed: dense_models.random_model(kind, fields, seed),
        theirs=decoder_theirs,
        ours=decoder_ours,
        mixture=mixture,
    )


def bert_theirs(model: Any) -> np.ndarray:
    """The last layer's output, or logits where there is a head; all tokens are real."""
    with torch.no_grad():
        made = model(torch.tensor(tokens(SHORT, 60)), token_type_ids=torch.tensor(_types()))
    return (made.logits if "logits" in made else made.last_hidden_state).float().numpy()


def bert_ours(module: Any) -> jax.Array:
    """The same of our encoder."""
    graph, state = nnx.split(module)
    given, types = jnp.asarray(tokens(SHORT, 60)), jnp.asarray(_types())
    positions = jnp.asarray(np.broadcast_to(np.arange(SHORT), given.shape))

    def run(state: Any) -> jax.Array:
        model = nnx.merge(graph, state)
        hidden = model(given, jnp.ones_like(given), positions, types)
        return model.logits(hidden, positions) if model.config.head else hidden

    return jax.jit(run)(state)


def _types() -> np.ndarray:
    return (tokens(SHORT, 60) % 2).astype(np.int64)


def bert(name: str) -> Case:
    """An encoder without (MiniLM) or with a head for masked tokens."""
    return Case(
        make=lambda seed: test_bert.made(name, seed),
        theirs=bert_theirs,
        ours=bert_ours,
        load=getattr(transformers, name),
    )


def image(kind: str, fields: dict[str, Any]) -> Case:
    """A classifier of images."""
    size = fields.get("image_size", 64)
    given = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), np.uint8)

    def theirs(model: Any) -> np.ndarray:
        with torch.no_grad():
            pixels = test_image_families.normalised(given, PIXELS[kind])
            return model(pixels.to(model.dtype)).logits.float().numpy()

    return Case(
        make=lambda seed: test_image_families.made(kind, fields, seed),
        theirs=theirs,
        ours=lambda module: nnx.jit(lambda model: model(given))(module),
        load=getattr(transformers, f"{kind}ForImageClassification"),
    )


def whisper() -> Case:
    """Speech to text: the decoder's logits of random features and tokens."""
    features = np.random.default_rng(1).normal(size=(2, 60, 20)).astype(np.float32)
    words = tokens(SHORT, 101)

    def theirs(model: Any) -> np.ndarray:
        heard = torch.tensor(features.swapaxes(1, 2)).to(model.dtype)
        with torch.no_grad():
            made = model(heard, decoder_input_ids=torch.tensor(words), use_cache=False)
        return made.logits.float().numpy()

    def ours(module: Any) -> jax.Array:
        graph, state = nnx.split(module)

        def run(state: Any) -> jax.Array:
            model = nnx.merge(graph, state)
            heard = model.encode(jnp.asarray(features))
            return model.logits(model.decode(jnp.asarray(words), heard))

        return jax.jit(run)(state)

    return Case(
        make=lambda seed: speech.random_model(seed=seed),
        theirs=theirs,
        ours=ours,
        load=transformers.WhisperForConditionalGeneration,
    )


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(decoder, *given) for name, given in dense_models.CASES.items()},
    **{name: partial(decoder, *given, mixture=True) for name, given in test_mixtures.CASES.items()},
    "bert": partial(bert, "BertModel"),
    "bert-masked": partial(bert, "BertForMaskedLM"),
    **{name: partial(image, *given) for name, given in test_image_families.CASES.items()},
    "whisper": whisper,
}
"""Name to case; a family more is a line more."""
