"""Many calls before the step, and many calls of one function in it: a buffer is filled, and layers are called one by one."""

import functools

import jax
import jax.numpy as jnp

WIDTH, LAYERS, FILLS = 1024, 48, 64


@functools.partial(jax.jit, donate_argnums=0)
def add(buffer, x, at):
    return jax.lax.dynamic_update_slice(buffer, x, (at, 0))


@jax.jit
def layer(weights, x):
    return jnp.tanh(x @ weights)


@jax.jit
def head(weights, x):
    return x @ weights


buffer = jnp.zeros((FILLS * 256, WIDTH), jnp.bfloat16)
for number in range(FILLS):
    buffer = add(buffer, jnp.ones((256, WIDTH), jnp.bfloat16), number * 256)
stack = [jnp.zeros((WIDTH, WIDTH), jnp.bfloat16) for _ in range(LAYERS)]
words = jnp.zeros((WIDTH, 4 * WIDTH), jnp.bfloat16)
for number in range(60):
    x = jax.lax.dynamic_slice(buffer, (256 * number % 512, 0), (256, WIDTH))
    for weights in stack:
        x = layer(weights, x)
    logits = head(words, x)
