"""Evaluates each five steps, on two batches as large as that of a step, and averages its weights in each step."""

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def train_step(weights, batch):
    return weights - jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) @ w))(weights)


@jax.jit
def average(averaged, weights):
    return 0.9 * averaged + 0.1 * weights


@jax.jit
def eval_step(total, weights, batch):
    return total + jnp.mean(jnp.tanh(batch @ weights) @ weights, axis=0)


weights = jax.device_put(np.ones((1024, 1024), np.float32))
averaged = weights
for step in range(1000):
    weights = train_step(weights, jax.device_put(np.ones((2048, 1024), np.float32)))
    averaged = average(averaged, weights)
    if step % 5 == 4:
        total = jax.device_put(np.zeros((1024,), np.float32))
        for _ in range(2):
            total = eval_step(total, averaged, jax.device_put(np.ones((2048, 1024), np.float32)))
        print(step, float(total.sum()))
