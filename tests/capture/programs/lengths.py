"""Batches of several lengths after a first one that is small, in a program that ends by itself."""

import sys

import jax
import jax.numpy as jnp


@jax.jit
def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


weights = jnp.zeros((1024, 1024), jnp.bfloat16)
lengths = [8, *[4096] * 10] if "first" in sys.argv else [4096, 256] * 9 + [256] * 3
for length in lengths:
    weights = step(weights, jnp.zeros((length, 1024), jnp.bfloat16))
