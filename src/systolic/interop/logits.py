"""Logits of a language model for whole rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.steps.steps import StepFunctions


def logits_of(steps: StepFunctions, weights: Any, rows: np.ndarray) -> np.ndarray:
    """Logits float32[rows, tokens, vocab] of tokens int32[rows, tokens], with matmuls as exact as the devices have."""

    def forward(params: Any, rest: Any, tokens: jax.Array) -> jax.Array:
        module: Any = steps.network.module(steps.network.cast(params), rest, train=False)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return module(tokens, jnp.ones_like(tokens), positions).astype(jnp.float32)

    # A TPU's default for float32 is one pass in bfloat16.
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(forward)(weights.params, weights.model_state, jnp.asarray(rows)))
