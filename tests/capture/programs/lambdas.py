"""A step of two jitted lambdas."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
gradient = jax.jit(lambda w, x: jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
update = jax.jit(lambda w, slope: w - 0.1 * slope)
weights, batch = jax.device_put((jnp.zeros((1024, 1024)), jnp.zeros((2048, 1024))), rows)
for _ in range(10):
    weights = update(weights, gradient(weights, batch))
