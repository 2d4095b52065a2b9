"""Arrays kept in bf16 between steps: updated in float32, then rounded stochastically.

Rounded to nearest, a bf16 array loses every change below about 1/256 of its value: weights under a
small learning rate and averages with a slow decay would not change.
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
    """Uniform uint32[shape] below 2**16; another ``salt`` uint32[] gives other numbers.

    A hash of each element's index, so that it is the same under every sharding and needs no
    communication. JAX's threefry costs ten times the operations, and half a second of
    compile time for each shape.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return mixed(mixed(index) + salt) >> LOW


def salted(salt: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Separate salt uint32[] for each ``number``."""
    return mixed(mixed(jnp.asarray(number, jnp.uint32)) + jnp.asarray(salt, jnp.uint32))


def stochastic_round(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Rounds f32[...] to bf16[...] up or down at random, so that the expected value is ``x``.

    Values that bf16 can represent do not change, infinities and NaN included.
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
    """The same arrays in the dtypes of ``like``, with stochastic rounding to bf16."""
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
    """The same arrays with float32 ones, except scalars, in ``dtype``, rounded to nearest; for initial values."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 and leaf.ndim else leaf, tree
    )
