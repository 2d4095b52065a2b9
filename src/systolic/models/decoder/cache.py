"""Keys and values of the positions seen so far, and attention over them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Cache(NamedTuple):
    """Keys and values of the positions seen so far."""

    key: jax.Array
    """[layers, batch, kv_heads, capacity, head_dim]: heads outside, as the matmuls of attention read them,
    so that a TPU reads a layer of it where it lies."""
    value: jax.Array
    """Like key."""
    length: jax.Array
    """int32[batch]: positions filled."""
    recent: jax.Array
    """int32[batch, n - 1]: the last tokens, for n-gram lookups; [batch, 0] without them."""


def written(cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """A cache with new rows; positions beyond its capacity are dropped.

    Args:
        cache: [..., batch, kv_heads, capacity, head_dim].
        positions: int32[batch, n].
        new: [..., batch, n, kv_heads, head_dim].
    """
    rows = jnp.arange(positions.shape[0])[:, None]
    # Indices with a slice between them bring their dims to the front: [batch, n, ..., kv_heads, head_dim].
    moved = jnp.moveaxis(new, (-4, -3), (0, 1))
    return cache.at[..., rows, :, positions, :].set(moved.astype(cache.dtype), mode="drop")


def attend_all(
    query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """Attention of new tokens over a cache that holds them: [batch, n, heads, head_dim].

    Args:
        query: [batch, n, heads, head_dim].
        keys: [batch, kv_heads, capacity, head_dim]; values alike.
        values: See keys.
        positions: int32[batch, n] of the queries; each sees its own position and those before.
    """
    visible = jnp.arange(keys.shape[2])[None, None, :] <= positions[:, :, None]
    return jax.nn.dot_product_attention(
        query,
        jnp.swapaxes(keys, 1, 2).astype(query.dtype),
        jnp.swapaxes(values, 1, 2).astype(query.dtype),
        mask=visible[:, None],
    )


def attend_one(
    query: jax.Array,
    own: tuple[jax.Array, jax.Array],
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Attention of one new token over a cache that does not hold it yet: [batch, 1, heads, head_dim].

    The cache is only read, so that a compiler needs no copy of it: rows are written once, after all layers.

    Args:
        query: [batch, 1, heads, head_dim].
        own: Key and value of the token, [batch, 1, kv_heads, head_dim].
        keys: [batch, kv_heads, capacity, head_dim]; values alike.
        values: See keys.
        positions: int32[batch, 1] of the token; cached positions before it are seen.
    """
    batch, _, heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    dtype = query.dtype
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    own_key, own_value = (jnp.swapaxes(each, 1, 2).astype(keys.dtype) for each in own)
    scale = head_dim**-0.5

    def logits(key: jax.Array) -> jax.Array:
        product = jnp.einsum(
            "bkgh,bksh->bkgs", grouped, key.astype(dtype), preferred_element_type=jnp.float32
        )
        return product * scale

    before = jnp.arange(capacity)[None, None, None, :] < positions[:, :, None, None]
    past = jnp.where(before, logits(keys), -jnp.inf)
    present = logits(own_key)
    largest = jnp.maximum(jnp.max(past, axis=-1, keepdims=True), present)
    past, present = jnp.exp(past - largest), jnp.exp(present - largest)
    total = jnp.sum(past, axis=-1, keepdims=True) + present
    attended = jnp.einsum("bkgs,bksh->bkgh", (past / total).astype(dtype), values.astype(dtype)) + (
        present / total
    ).astype(dtype) * own_value.astype(dtype)
    return attended.reshape(batch, 1, heads, head_dim)
