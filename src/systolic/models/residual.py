"""The residual stream between the blocks of a transformer, which the tensor axis may split."""

import jax

from systolic.job import Target

STREAM = ("batch", "residual_sequence", "residual_embed")
"""Logical names of its dims, [batch, sequence, d_model]."""


def gathered(target: Target, x: jax.Array) -> jax.Array:
    """x [batch, sequence, d_model] of the stream, what the tensor axis split whole on each device.

    Left to itself the partitioner gathers for each matmul that takes it, or before a norm in float32.
    """
    return target.constrain(target.constrain(x, *STREAM), "batch", "sequence", None)
