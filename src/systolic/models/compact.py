"""Frozen matrices in 4 bits: nf4 codes with a scale for each block of 64 inputs (QLoRA, Dettmers et al. 2023, section 3).

Codes and ranges are those of Qwix. Scales stay in the compute dtype: they are not quantized a second time.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from systolic.core.errors import MissingExtraError

BLOCK = 64
"""Inputs that share a scale; fewer where they don't divide the dim."""


class Compact(NamedTuple):
    """A matrix in 4 bits."""

    codes: jax.Array
    """uint4, of the matrix's shape."""
    scales: jax.Array
    """Of the same rank; a dim that shares scales is shorter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.codes.shape

    def restored(self) -> jax.Array:
        """The matrix in the dtype of its scales."""
        numerics, _ = _qwix()
        values = numerics.get_nf4_buckets().astype(self.scales.dtype)
        # Qwix looks codes up in a flat array, which a partitioner would gather first.
        found = values[self.codes.astype(jnp.int32)]
        split: list[int] = []
        spread: list[int] = []
        for size, scales in zip(self.codes.shape, self.scales.shape, strict=True):
            split += [scales, size // scales]
            spread += [scales, 1]
        return (found.reshape(split) * self.scales.reshape(spread)).reshape(self.codes.shape)


def compressed(value: jax.Array, dim: int, others: tuple[int, ...]) -> Compact:
    """A matrix of floats in 4 bits.

    Args:
        value: The matrix, or a stack of them.
        dim: Whose neighbours share a scale.
        others: All other dims.

    Raises:
        MissingExtraError: Qwix is not installed.
    """
    _, qarray = _qwix()
    how = qarray.HowToQuantize(
        qtype="nf4", channelwise_axes=others, tiled_axes={dim: math.gcd(value.shape[dim], BLOCK)}
    )
    made = qarray.quantize(value, how)
    return Compact(made.qvalue, made.scale)


def _qwix():
    try:
        from qwix._src.core import numerics, qarray
    except ImportError as error:
        raise MissingExtraError("frozen weights in 4 bits", "quant") from error
    return numerics, qarray
