"""Takes the variable for the platform, as SGLang-JAX does: kernels for TPUs are for those alone."""

import os

import jax
import jax.numpy as jnp

assert os.environ.get("JAX_PLATFORMS", "tpu") == "tpu", os.environ["JAX_PLATFORMS"]


@jax.jit
def step(weights):
    return weights - 0.01 * jnp.tanh(weights @ weights)


weights = jnp.ones((512, 512))
for _ in range(50):
    weights = step(weights)
