"""A trainer of several hosts: each process reads its own part of a batch of 32 examples for each device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

jax.distributed.initialize()
assert jax.process_index() == 0
assert {one.process_index for one in jax.devices()} == set(range(jax.process_count()))
assert len(jax.local_devices()) == jax.device_count() // jax.process_count()
slices = 1 + max(one.slice_index for one in jax.devices())
inside = jax.device_count() // slices
if slices > 1:
    devices = mesh_utils.create_hybrid_device_mesh((1, inside), (slices, 1))
else:
    devices = mesh_utils.create_device_mesh((1, inside))
mesh = jax.sharding.Mesh(devices, ("slice", "data"))
split = NamedSharding(mesh, PartitionSpec(("slice", "data")))
whole = NamedSharding(mesh, PartitionSpec(None, "data"))
multihost_utils.sync_global_devices("begin")
seed = multihost_utils.broadcast_one_to_all(np.int32(7))
local = 32 * jax.local_device_count()
weights = jax.jit(lambda key: jax.random.normal(key, (2048, 2048)), out_shardings=whole)(
    jax.random.PRNGKey(int(seed))
)
assert weights.is_fully_addressable == (jax.process_count() == 1)
assert len(weights.addressable_shards) == jax.local_device_count()


@jax.jit
def train_step(weights, batch):
    def loss(w):
        return jnp.mean(jnp.square(jnp.tanh(batch @ w)))

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.lax.with_sharding_constraint(weights - 0.1 * gradient, whole), value


by_host = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
data = np.ones((local, 2048), np.float32)
spec = PartitionSpec("data")
batch = multihost_utils.host_local_array_to_global_array(data, by_host, spec)
assert batch.shape == (32 * jax.device_count(), 2048), batch.shape
own = multihost_utils.global_array_to_host_local_array(batch, by_host, spec)
assert own.shape == (local, 2048), own.shape
for step in range(1000):
    batch = jax.make_array_from_process_local_data(split, data)
    assert batch.shape == (32 * jax.device_count(), 2048), batch.shape
    weights, loss = train_step(weights, batch)
    gathered = multihost_utils.process_allgather(np.float32(1))
    assert gathered.shape == (jax.process_count(),) or jax.process_count() == 1, gathered.shape
    if step == 0:
        print(f"{jax.process_count()} processes, batch {batch.shape}, loss {float(loss):.3f}")
