"""Compiles its step ahead, reads the compiler's analyses, and saves its weights before the step repeats."""

import json
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

folder = Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("data",))
whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)


weights = jax.device_put(np.ones((1024, 1024), np.float32), whole)
batch = jax.device_put(np.ones((8192, 1024), np.float32), split)
compiled = jax.jit(step, donate_argnums=0).lower(weights, batch).compile()
costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
sizes = ("argument", "output", "alias", "temp", "generated_code")
names = [f"{name}_size_in_bytes" for name in sizes]
kept = {name: costs[name] for name in ("flops", "bytes accessed")}
analyses = [kept, {name: getattr(memory, name) for name in names}]
(folder / "analyses.json").write_text(json.dumps(analyses))
for number in range(60):
    weights = compiled(weights, batch)
    print(np.linalg.norm(np.asarray(weights)), float(jnp.sum(weights)))
    if number == 0:
        np.save(folder / "weights.npy", weights)
        with open(folder / "weights.pickle", "wb") as file:
            pickle.dump(weights, file)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "checkpoint", {"weights": weights})
