"""Arrays that are kept in bf16 from step to step: computed with in float32, rounded stochastically after it.

To the nearest, a bf16 array loses every change below about 1/256 of its value: weights under a small
learning rate and averages with a slow decay would stand still.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

LOW = 16
"""Bits of a float32 that bf16 lacks."""


def mixed(x: jax.Array) -> jax.Array:
    """A hash of uint32[...] in which each bit depends on all (Wellons, "Prospecting for hash functions", lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def noise(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """uint32[shape] below 2**16, evenly distributed; another ``salt`` uint32[] gives other numbers.

    A hash of each element's own number, so that it is the same under every sharding and shards
    without communication. JAX's threefry costs ten times the operations, and half a second of
    compile time for each shape.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return mixed(mixed(index) + salt) >> LOW


def salted(salt: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """A salt uint32[] of its own for each ``number``."""
    return mixed(mixed(jnp.asarray(number, jnp.uint32)) + jnp.asarray(salt, jnp.uint32))


def stochastic_round(x: jax.Array, salt: jax.Array) -> jax.Array:
    """f32[...] to bf16[...]: up or down by chance, so that the expected value is ``x``.

    What bf16 can express stays as it is, infinities and NaN too.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise(x.shape, salt)
    cut = jax.lax.bitcast_convert_type((bits >> LOW) << LOW, jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def widened(tree: Any) -> Any:
    """The same arrays, bf16 ones in float32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def narrowed(tree: Any, like: Any, salt: jax.Array) -> Any:
    """The same arrays in the dtypes of ``like``; what becomes bf16 is rounded stochastically."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(like)]
    return jax.tree.unflatten(
        structure,
        [
            leaf if leaf.dtype == kind else stochastic_round(leaf, salted(salt, number))
            for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        ],
    )


def cast(tree: Any, dtype: str) -> Any:
    """The same arrays, float32 ones with dims in ``dtype``: what is born, or small enough to be rounded to the nearest."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 and leaf.ndim else leaf, tree
    )
