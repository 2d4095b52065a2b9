"""Gathers gradients of four batches outside of jit before each update, and compiles the update itself."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
weights = jax.device_put(np.zeros((1024, 1024), np.float32), whole)


@jax.jit
def gradient(weights, batch):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


def move(weights, total):
    return weights - 1e-3 * total


update = jax.jit(move, donate_argnums=0).lower(weights, weights).compile()
for step in range(30):
    total = None
    for _ in range(4):
        batch = jax.device_put(np.ones((512, 1024), np.float32), split)
        one = gradient(weights, batch)
        total = one if total is None else total + one
    weights = update(weights, total)
    if step % 10 == 0:
        print(step, float(jnp.mean(weights)))
