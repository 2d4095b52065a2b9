"""Each process trains on its own devices; the initialization is compiled ahead of time and has constraints within."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH = 2048
mesh = Mesh(np.array(jax.local_devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))


def initial(key):
    made = [jax.random.normal(jax.random.fold_in(key, n), (WIDTH, WIDTH)) for n in range(2)]
    return [jax.lax.with_sharding_constraint(one, split) for one in made]


@functools.partial(jax.jit, donate_argnums=0)
def step(weights, batch):
    def loss(weights):
        return jnp.mean((batch @ weights[0] @ weights[1]) ** 2)

    gradient = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


key = jax.random.key(0)
weights = jax.jit(initial).lower(key).compile()(key)
assert all(one.sharding.is_equivalent_to(split, 2) for one in weights), weights[0].sharding
batch = jax.device_put(np.zeros((1024, WIDTH), np.float32), split)
for _ in range(10):
    weights = step(weights, batch)
