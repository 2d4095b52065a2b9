"""Attention by blocks of queries, whose softmax the compiler fuses with the product; and a matmul that nothing needs."""

import jax
import jax.numpy as jnp


@jax.jit
def attend(query, key, value):
    def block(rows):
        return jax.nn.softmax(rows @ key.T) @ value

    _ = query @ (key.T @ value)
    return jax.lax.map(block, query.reshape(-1, 512, 1024)).reshape(8192, 1024) + 1


x = jnp.zeros((8192, 1024), jnp.bfloat16)
for _ in range(50):
    x = attend(x, x, x)
