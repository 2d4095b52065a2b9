"""Trains on four of eight devices and keeps arrays beside its step: some count, some do not."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
GIB = (1024, 1024, 256)  # float32


@jax.jit
def init():
    return jnp.ones(GIB)


def step(weights, batch):
    slope = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)
    return weights - 0.1 * slope, jnp.mean(slope)


step = jax.jit(step, donate_argnums=0)
reference = [jax.device_put(jnp.zeros(GIB), whole) for _ in range(16)]  # 16 GiB on each of four
cached = jax.device_put(init(), split)  # 256 MiB on each
alone = jax.device_put(jnp.zeros(GIB), SingleDeviceSharding(jax.devices()[0]))  # 1 GiB on the first
elsewhere = jax.device_put(jnp.zeros(GIB), SingleDeviceSharding(jax.devices()[7]))
on_host = jax.device_put(jnp.zeros(GIB), split.with_memory_kind("pinned_host"))
views = [shard.data for shard in cached.addressable_shards]
same = jax.device_put(cached, split)
dropped = jax.device_put(jnp.zeros(GIB), whole)
del dropped
deleted = jax.device_put(jnp.zeros(GIB), whole)
deleted.delete()
gc.disable()
garbage = [jax.device_put(jnp.zeros(GIB), whole)]
garbage.append(garbage)
del garbage

weights = jax.device_put(jnp.ones((1024, 1024)), whole)
batch = jax.device_put(jnp.ones((4096, 1024)), split)
kept = weights  # donated by the first step
for _ in range(1000):
    weights, value = step(weights, batch)
