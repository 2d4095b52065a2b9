"""A step of one jitted method with two lengths, and weights that lie sharded and on hosts between steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH = 2048
mesh = Mesh(np.array(jax.devices()), ("data",))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
on_host = whole.with_memory_kind("pinned_host")


class Layers:
    def __init__(self, number):
        self.number = number

    @functools.partial(jax.jit, static_argnums=0)
    def block(self, weights, x):
        def layer(x, _):
            return jnp.tanh(x @ weights), None

        return jax.lax.scan(layer, x, None, length=self.number)[0]


cache = [jnp.full((128, 1024), float(n)) for n in range(64)]
few, many = Layers(1), Layers(8)
x = jax.device_put(np.zeros((WIDTH, WIDTH), jnp.bfloat16), whole)
weights = jax.device_put(np.zeros((WIDTH, WIDTH), jnp.bfloat16), split)
moments = jax.device_put(np.zeros((WIDTH, WIDTH), np.float32), on_host)
x = few.block(jax.device_put(weights, whole), x)
for _ in range(20):
    gathered = jax.device_put(weights, whole)
    moments = jax.device_put(jax.device_put(moments, whole), on_host)
    x = many.block(gathered, few.block(gathered, x))
