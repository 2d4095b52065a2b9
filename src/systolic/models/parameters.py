"""Initial values of parameters."""

import jax
import jax.numpy as jnp
from flax import nnx

TRUNCATED_DEVIATION = 0.879625657
"""Standard deviation of a unit normal cut at two: sqrt(1 - 4 pdf(2) / (2 cdf(2) - 1))."""


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    fan_in: int,
    gain: float = 1.0,
) -> nnx.Param:
    """A float32 array of standard deviation gain / sqrt(fan_in): a normal cut at two of its own deviations.

    ``axes`` are the logical names of its dims.
    """
    value = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    # What is cut off takes spread with it, which the scale gives back.
    return nnx.Param(value * (gain / (TRUNCATED_DEVIATION * fan_in**0.5)), out_sharding=axes)
