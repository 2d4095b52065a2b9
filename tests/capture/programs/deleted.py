"""A program that uses an array which a step took for its result."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(weights, scale, x):
    return weights - scale * jnp.mean(x @ weights)


@jax.jit
def distance(first, second):
    return jnp.sum((first - second) ** 2)


weights = start = jax.device_put(jnp.zeros((1024, 1024)), jax.devices()[0])
scale = jax.device_put(jnp.zeros((16,)), jax.devices()[0])
x = jnp.zeros((1024, 1024))
for _ in range(10):
    weights = step(weights, scale[0], x)
    assert not x.is_deleted()
    assert start.is_deleted()
    distance(start, weights)
