"""Gradients of 24 batches are gathered by jitted calls before the weights change."""

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, BATCHES = 1024, 24


@jax.jit
def gradient(weights, batch):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


@jax.jit
def add(total, more):
    return total + more


@jax.jit
def update(weights, total):
    return weights - 0.1 * total


weights = jax.device_put(np.ones((WIDTH, WIDTH), np.float32))
for _ in range(200):
    total = None
    for _ in range(BATCHES):
        more = gradient(weights, jax.device_put(np.ones((WIDTH, WIDTH), np.float32)))
        total = more if total is None else add(total, more)
    weights = update(weights, total)
