"""Outputs of a model of files for whole rows, with nothing sampled, pooled or ranked."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from systolic.models.decoder.config import Decoder
from systolic.models.encoder.config import Encoder
from systolic.models.whisper.config import Whisper
from systolic.steps.steps import StepFunctions


def outputs_of(steps: StepFunctions, weights: Any, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Outputs float32[rows, ..., n] of a model, with matmuls as exact as the devices have.

    Args:
        steps: Programs of a job with the model.
        weights: Its parameters and other variables.
        inputs: ``tokens`` int32[rows, tokens]; also ``features`` for Whisper; for image models ``image`` alone.

    Returns:
        Logits; of an encoder without a head for masked tokens its vectors, then those of its pooler.
    """
    model = steps.job.model

    def forward(params: Any, rest: Any, given: Mapping[str, jax.Array]) -> jax.Array:
        module: Any = steps.network.module(steps.network.cast(params), rest, train=False)
        if "image" in given:
            found = module(given["image"])
        elif isinstance(model, Whisper):
            found = module(given["features"], given["tokens"])
        else:
            found = _of_tokens(model, module, given["tokens"])
        return found.astype(jnp.float32)

    # A TPU's default for float32 is one pass in bfloat16.
    with jax.default_matmul_precision("highest"):
        given = {name: jnp.asarray(value) for name, value in inputs.items()}
        return np.asarray(jax.jit(forward)(weights.params, weights.model_state, given))


def _of_tokens(model: Any, module: Any, tokens: jax.Array) -> jax.Array:
    assert isinstance(model, Decoder | Encoder)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if isinstance(model, Decoder):
        # A mixture keeps the losses of its routers on the way, which nobody reads here.
        return nnx.capture(module, nnx.Intermediate)(tokens, jnp.ones_like(tokens), positions)[0]
    found = module(tokens, jnp.ones_like(tokens), positions)
    if model.head:
        return module.logits(found, positions)
    if model.pooler:
        return jnp.concatenate([found, module.pooled(found)[:, None]], axis=1)
    return found
