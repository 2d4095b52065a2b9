"""How parameters are born."""

import jax
import jax.numpy as jnp
from flax import nnx


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    fan_in: int,
    gain: float = 1.0,
) -> nnx.Param:
    """A float32 array, normal with standard deviation gain / sqrt(fan_in), cut at two deviations.

    ``axes`` are the logical names of its dims.
    """
    value = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value * (gain / fan_in**0.5), out_sharding=axes)
