"""Asks JAX what a GPU is like, as trainers do, then trains with attention of cuDNN, data over all GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import NamedSharding, PartitionSpec

assert jax.default_backend() == "gpu"
devices = jax.devices("gpu")
assert devices == jax.devices("cuda") == jax.devices()
assert {device.compute_capability for device in devices} == {"9.0"}
assert [device.slice_index for device in devices] == [number // 8 for number in range(16)]
assert len(jax.local_devices()) == 8
assert jax.process_count() == 2
mesh = jax.sharding.Mesh(create_hybrid_device_mesh((1, 8), (2, 1), devices), ("data", "fsdp"))
rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
weight = jax.device_put(np.ones((1024, 1024), np.float32), NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, donate_argnums=0)
def step(weight, batch):
    def loss(weight):
        heads = (batch @ weight.astype(jnp.bfloat16)).reshape(*batch.shape[:2], 16, 64)
        out = jax.nn.dot_product_attention(
            heads, heads, heads, is_causal=True, implementation="cudnn"
        )
        return (out.astype(jnp.float32) ** 2).mean()

    return weight - 0.1 * jax.grad(loss)(weight)


batch = jax.device_put(np.ones((64, 2048, 1024), jnp.bfloat16), rows)
for _ in range(20):
    weight = step(weight, batch)
