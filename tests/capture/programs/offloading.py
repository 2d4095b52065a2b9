"""Keeps moments and activations in the memory of the host: on one device without a mesh, and on a mesh."""

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

SHAPE = (1024, 1024)  # 4 MiB

if sys.argv[1] == "mesh":
    device = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec())
else:
    device = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
host = device.with_memory_kind("pinned_host")


@functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(device, host, None))
def step(w, moment, x):
    """One step: the moment comes from the host and goes back."""
    slope = jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    moment = 0.9 * jax.device_put(moment, device) + slope
    return w - 0.1 * moment, moment, slope


@jax.jit
def activation(x, kept):
    """An activation in the memory of the host, and what lies there stays there."""
    return jax.device_put(x @ x, host), kept


w, moment = jnp.zeros(SHAPE), jax.device_put(jnp.zeros(SHAPE), host)
x = jax.device_put(jnp.ones((128, 1024)), device)
kept = []
for _ in range(10):
    w, moment, slope = step(w, moment, x)
    y, moment = activation(slope, moment)
    kept.append(y)
    assert [one.sharding.memory_kind for one in (y, moment, w)] == ["pinned_host"] * 2 + ["device"]
