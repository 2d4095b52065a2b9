"""Batch norm over groups and tiny trainings on 8 virtual devices; prints one JSON object a case."""

import json
import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from systolic.job import Layout
from systolic.models.layers import GroupedBatchNorm
from systolic.models.vision.config import ResNet
from tests.models import encoders, images

ENCODERS = {
    "fsdp-tensor": Layout(fsdp=4, tensor=2),
    "data-context": Layout(data=4, fsdp=1, context=2),
}
GROUPS = (16, 4, 2, 1)
"""Examples that share statistics, of 16 over 8 devices: all, two devices', one device's, half of one's."""


def example() -> np.ndarray:
    return np.random.default_rng(0).normal(3.0, 2.0, (16, 2, 3, 5)).astype(np.float32)


def norm(examples: int) -> dict[str, Any]:
    """What a norm makes of the example, split over 8 devices, and which devices add up statistics."""
    with nnx.use_eager_sharding(False):
        module = GroupedBatchNorm(5, examples=examples, momentum=0.9, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    placed = jax.device_put(example(), NamedSharding(mesh, PartitionSpec("data")))

    def apply(state: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        made = nnx.merge(graph, state)
        return made(x), jnp.asarray(made.mean[...]), jnp.asarray(made.var[...])

    program = jax.jit(apply).lower(state, placed).compile()
    out, mean, var = program(state, placed)
    sent = re.findall(
        r"all-reduce(?:-start)?\([^\n]*replica_groups=([^\n]*?), use", program.as_text()
    )
    return {
        "out": np.asarray(out).tolist(),
        "mean": np.asarray(mean).tolist(),
        "var": np.asarray(var).tolist(),
        "groups": sorted(set(sent)),
    }


def grouped(examples: int, devices: int) -> list[float]:
    """Losses of a ResNet whose statistics are of so many examples."""
    model = images.MODELS["resnet-basic"]
    assert isinstance(model, ResNet)
    of = images.steps(replace(model, norm_examples=examples), batch=16, devices=devices)
    state = jax.jit(of.init, out_shardings=of.shardings)(jax.random.key(0))
    train = jax.jit(of.train, out_shardings=(of.shardings, None))
    losses = []
    for seed in range(3):
        made = images.batch(of, seed)
        batch = {name: jax.device_put(a, of.batch_shardings[name]) for name, a in made.items()}
        state, metrics = train(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def encoder(layout: Layout, devices: int) -> list[float]:
    return encoders.run(encoders.steps(encoders.job(layout=layout), devices))[0]


def main(what: str) -> None:
    if what == "norms":
        print(json.dumps({str(examples): norm(examples) for examples in GROUPS}))
        return
    # The numbers are the same, in less than half the time.
    jax.config.update("jax_disable_most_optimizations", True)
    found = {name: encoder(layout, 8) for name, layout in ENCODERS.items()}
    print(json.dumps({**found, "groups": grouped(4, 8)}))


if __name__ == "__main__":
    main(sys.argv[1])
