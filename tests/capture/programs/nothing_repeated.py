"""Makes three arrays by one function, and trains once or never."""

import sys

import jax
import jax.numpy as jnp


@jax.jit
def make(key, number):
    return jax.random.normal(jax.random.fold_in(key, number), (512, 512))


@jax.jit
def train_step(weights, batch):
    return weights - jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


key = jax.random.PRNGKey(0)
count = 1 if sys.argv[1] == "once" else 3
weights = [jax.device_put(make(key, number), jax.devices()[0]) for number in range(count)]
if sys.argv[1] == "once":
    weights = train_step(weights[0], jnp.ones((1024, 512)))
