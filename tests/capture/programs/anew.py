"""A function that is jitted in each step, on the last of the slices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

last = max(device.slice_index for device in jax.devices())
devices = [device for device in jax.devices() if device.slice_index == last]
mesh = Mesh(np.array(devices), ("data",))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
weights = jax.device_put(jnp.zeros((1024, 1024), jnp.bfloat16), whole)
batch = jax.device_put(jnp.zeros((8192, 1024), jnp.bfloat16), split)
for _ in range(10):
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
    weights = step(weights, batch)
