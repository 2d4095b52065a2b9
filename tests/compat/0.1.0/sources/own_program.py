"""A trainer that knows nothing of Systolic, for ``systolic forecast --keep FOLDER -- python own_program.py``."""

import jax
import jax.numpy as jnp


@jax.jit
def step(weights, rows):
    loss = lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2)  # noqa: E731
    return weights - 0.1 * jax.grad(loss)(weights)


weights, rows = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
for _ in range(100):
    weights = step(weights, rows)
