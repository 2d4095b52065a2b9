"""Weights in int8 for programs without a gradient: codes with a scale for each output channel.

The product is made of the codes, which the compiler widens on their way to the matrix unit, and its result is
scaled: memory holds, and each step reads, one byte a weight.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LARGEST = 127
"""Of the codes, either sign."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Rounded:
    """A matrix in int8, or a stack of them, in the place of a parameter's array."""

    codes: jax.Array
    """int8, of the matrix's shape."""
    scales: jax.Array
    """Of the same rank; dims that products sum over have size 1."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the codes."""
        return self.codes.dtype

    def __getitem__(self, key: Any) -> "Rounded":
        """The matrix, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self

    def restored(self) -> jax.Array:
        """The matrix in the dtype of its scales."""
        return self.codes.astype(self.scales.dtype) * self.scales


def rounded(value: jax.Array, inputs: tuple[int, ...]) -> Rounded:
    """A matrix of floats in int8, scaled by the largest of each channel over the dims ``inputs``."""
    wide = value.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True)
    scales = (jnp.where(largest > 0, largest, 1.0) / LARGEST).astype(value.dtype)
    codes = jnp.clip(jnp.round(wide / scales.astype(jnp.float32)), -LARGEST, LARGEST)
    return Rounded(codes=codes.astype(jnp.int8), scales=scales)


def rounded_product(spec: str, x: jax.Array, weights: Rounded) -> jax.Array:
    """``einsum(spec, x, weights)`` in the dtype of ``x``; the scales are applied to the result, or to ``x`` where it has their dims."""
    operands, out = spec.split("->")
    given, matrix = operands.split(",")
    scaled = [letter for letter, size in zip(matrix, weights.scales.shape, strict=True) if size > 1]
    if not all(letter in out for letter in scaled):
        x = x * _spread(weights.scales, matrix, given).astype(x.dtype)
        return jnp.einsum(spec, x, weights.codes.astype(x.dtype))
    made = jnp.einsum(spec, x, weights.codes.astype(x.dtype))
    return made * _spread(weights.scales, matrix, out).astype(x.dtype)


def _spread(scales: jax.Array, letters: str, into: str) -> jax.Array:
    """Scales with the dims ``letters`` as they broadcast over an array with the dims ``into``."""
    kept = [letter for letter, size in zip(letters, scales.shape, strict=True) if size > 1]
    order = sorted(kept, key=into.index)
    values = scales.reshape([size for size in scales.shape if size > 1])
    values = values.transpose([kept.index(letter) for letter in order])
    sizes = dict(zip(order, values.shape, strict=True))
    return values.reshape([sizes.get(letter, 1) for letter in into])
