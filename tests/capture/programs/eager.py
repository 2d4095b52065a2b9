"""Uses no jit."""

import jax.numpy as jnp

print(jnp.sum(jnp.ones((8, 8))))
