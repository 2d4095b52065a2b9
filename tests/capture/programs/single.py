"""Trains on one device: no mesh, no sharding, weights made outside of jit; branches on the loss and catches all errors."""

import jax
import jax.numpy as jnp

keys = jax.random.split(jax.random.PRNGKey(0), 4)
weights = [jax.random.normal(key, (2048, 2048)) / 45 for key in keys]


@jax.jit
def step(weights, batch):
    def loss(weights):
        x = batch
        for matrix in weights:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x * x)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


for number in range(10_000):
    try:
        weights, value = step(weights, jnp.ones((256, 2048)))
        print(number, f"{value:.3f}", "good" if value < 1 else "bad")
    except Exception as error:
        print("ignored", error)
