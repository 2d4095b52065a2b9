"""Makes sixty arrays of one shape by one jitted function each, casts them by another, and trains."""

import jax
import jax.numpy as jnp


@jax.jit
def make(key, number):
    return jax.random.normal(jax.random.fold_in(key, number), (256, 256))


@jax.jit
def cast(weights):
    return weights.astype(jnp.bfloat16)


@jax.jit
def gradient(weights, batch):
    def loss(weights):
        x = batch
        for matrix in weights:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x)

    return jax.grad(loss)(weights)


key = jax.device_put(jax.random.PRNGKey(0), jax.devices()[0])
weights = [make(key, number) for number in range(60)]
weights = [cast(one) for one in weights]
for _ in range(1000):
    slopes = gradient(weights, jnp.ones((512, 256), jnp.bfloat16))
    weights = [w - 0.1 * g for w, g in zip(weights, slopes, strict=True)]
