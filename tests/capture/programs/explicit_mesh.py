"""A batch that a jitted function makes split over a mesh whose axes are part of an array's type, as `jax.make_mesh` makes it."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

count = jax.device_count()
mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
split = NamedSharding(mesh, PartitionSpec("data"))


@jax.jit
def step(weights, batch):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights) - batch) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


weights = jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, PartitionSpec()))
batch = jax.jit(lambda: jnp.ones((4096 * count, 1024)), out_shardings=split)()
for _ in range(60):
    weights, value = step(weights, batch)
