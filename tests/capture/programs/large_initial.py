"""Weights that are made on one device, which they do not fit, before a step that fits; loops of unknown length in the step."""

import jax
import jax.numpy as jnp
import numpy as np

initial = jax.jit(lambda key: jax.random.normal(key, (24, 16384, 16384)))
made = initial(jax.random.key(0))
made.delete()


def until(most):
    def body(state):
        return jnp.tanh(weights @ state[0]), state[1] + 1

    def runs(state):
        return (state[1] < most) & (jnp.sum(state[0]) > 1e-3)

    weights = jnp.zeros((256, 256), jnp.bfloat16)
    return lambda x: jax.lax.while_loop(runs, body, (x, 0))[0]


@jax.jit
def inner(x):
    return until(10)(x)


@jax.jit
def outer(x):
    return until(100)(x)


x = jax.device_put(np.zeros((256, 256), jnp.bfloat16), jax.devices()[0])
for _ in range(10):
    x = outer(inner(x))
