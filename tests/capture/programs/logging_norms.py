"""A step that always sees one batch, and a norm of the weights after each ten of them."""

import jax
import jax.numpy as jnp
import numpy as np


@jax.jit
def train_step(weights, batch):
    return weights - jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


@jax.jit
def norm(weights):
    return jnp.sqrt(jnp.sum(weights**2))


weights = jax.device_put(np.ones((1024, 1024), np.float32))
batch = jax.device_put(np.ones((2048, 1024), np.float32))
for step in range(200):
    weights = train_step(weights, batch)
    if step % 10 == 9:
        print(step, float(norm(weights)))
