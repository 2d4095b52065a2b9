"""Arrays drawn by NumPy: JAX compiles a program for every shape that it draws outside of one."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Of mean 0 and deviation 1, in float32."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")
