"""Keys and values of a transcription: of the tokens written so far, and of the encoder's output."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TextCache(NamedTuple):
    """Keys and values, heads outside as the matmuls of attention read them."""

    key: jax.Array
    """Of the tokens, [layers, batch, heads, capacity, head_dim]."""
    value: jax.Array
    """Like key."""
    cross_key: jax.Array
    """Of the encoder's output, [layers, batch, heads, frames, head_dim]."""
    cross_value: jax.Array
    """Like cross_key."""
    length: jax.Array
    """int32[batch]: tokens seen."""


def heads_out(rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[batch, n, heads, head_dim] as [batch, heads, n, head_dim]."""
    return jnp.swapaxes(rows, 1, 2).astype(dtype)


def attend_all(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of tokens to every position of a cache.

    Args:
        query: [batch, n, heads, head_dim].
        key: [batch, heads, positions, head_dim].
        value: Like key.

    Returns:
        [batch, n, heads, head_dim] in the dtype of ``query``.
    """
    scores = jnp.einsum(
        "bqhe,bhse->bhqs", query, key.astype(query.dtype), preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5, axis=-1).astype(query.dtype)
    return jnp.einsum("bhqs,bhse->bqhe", weights, value.astype(query.dtype))
