"""Two models, each on a device of its own; the second takes what the first made where it is asked to."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

first, second = jax.devices()[:2]


@jax.jit
def one(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


@jax.jit
def other(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(batch @ w)))(weights)


weights, batch = np.ones((1024, 1024), np.float32), np.ones((4096, 1024), np.float32)
here, there = jax.device_put(weights, first), jax.device_put(weights, second)
for _ in range(1000):
    here = one(here, jax.device_put(batch, first))
    if sys.argv[1] == "apart":
        there = other(there, jax.device_put(batch, second))
    else:
        there = other(jax.device_put(here, second), jax.device_put(batch, second))
        here = jax.device_put(there, first)
