"""Decode steps of DeepSeek R1 and Llama 3.1 70B in jax-llm-examples' own code.

    git clone https://github.com/jax-ml/jax-llm-examples
    python benchmarks/serve/published.py FILE.json --kind measured_engine --engine jax-llm-examples

DeepSeek's cache has keys and values of each head, which its 64 devices split, where a rebuilt step has the latent; its dense layers are in bf16; and its
experts run in a Pallas kernel that reads those of four at a time that a text chose. What a kernel reads by its data no schedule says: its
seconds are counted here (:func:`kernel_seconds`). Llama's key-value heads lie over 8 devices, each of which has a copy on the next, where a rebuilt step has 16 heads.
"""

import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=64"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from systolic.chips import slice as find_slice
from systolic.core.errors import SystolicError
from systolic.forecasting import Forecast
from systolic.forecasting.function import forecast_function
from systolic.sim.calibration import constant
from systolic.sim.rates import rates_of
from systolic.sim.simulate import memory_seconds

COMMIT = "ef1a60c041c958bb8a7184e26f2be2c883423968"
"""The table of DeepSeek R1 is in this commit of 2025-03-06, which also changed its kernel; the rates are those of today's README."""
LLAMA_COMMIT = "202fcd375d44d887f94386fe5d0e60d53cd633e2"
"""Llama's table is older (345dab9, 2025-04-25), in code that JAX of today does not run; this commit's step is the same."""
TODAY = {
    "model.py": (
        ("map, builtin_map = jax.util.safe_map, map", "builtin_map = map"),
        ("from jax.experimental.shard_map import shard_map", "shard_map = jax.shard_map"),
        ("check_rep=False", "check_vma=False"),
    ),
    "decode_ragged_dot.py": (
        ("pl.load(y_ref, (", "y_ref.__getitem__(("),
        ("pl.load(x_ref, (", "x_ref.__getitem__(("),
        ("pl.load(A_ref, (", "A_ref.__getitem__(("),
        ("pl.store(y_ref, (", "y_ref.__setitem__(("),
        ("pl.ds(None)", "slice(None)"),
    ),
}
"""What JAX calls otherwise today, by file."""
MESH = {"x": 1, "y": 4, "z": 16}
DEVICES, EXPERTS, GROUPS, CHOSEN, KEPT_GROUPS, BLOCK = 4, 256, 8, 8, 4, 4
"""Devices of the expert axis; routed experts and groups of them; experts and groups of a text; experts that the kernel reads at once."""
D_MODEL, UNITS = 7168, 2048 // MESH["z"]
LAYERS, LLAMA_LAYERS = 61, 80
DEPTHS, LLAMA_DEPTHS = (5, 7), (4, 8)
"""Layers of the two programs that are compiled, whose difference each further layer costs its part of."""
LEAST_CONTEXT = 128
DRAWS = 200


def unpacked(clone: Path) -> Path:
    """A folder with the package of that commit, on ``sys.path``.

    Raises:
        SystolicError: the clone lacks the commit, or a line to change.
    """
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    for commit, part in ((COMMIT, "deepseek_r1_jax"), (LLAMA_COMMIT, "llama3")):
        command = ["git", "-C", str(clone), "archive", commit, part]
        archive = subprocess.run(command, capture_output=True, check=False)
        if archive.returncode:
            fault = archive.stderr.decode().strip()
            raise SystolicError(f"{clone}: {fault}; clone all of its history")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    package = folder / "deepseek_r1_jax" / "deepseek_r1_jax"
    for (name, changes), path in ((item, package / item[0]) for item in TODAY.items()):
        text = path.read_text()
        for before, now in changes:
            if before not in text:
                raise SystolicError(f"{name} has no {before!r}")
            text = text.replace(before, now)
        path.write_text(text)
    sys.path[:0] = [str(package.parent), str(folder / "llama3")]
    return package


def decode_call(
    layers: int, batch: int, context: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Step of so many layers, and its abstract arguments."""
    from deepseek_r1_jax import model

    sizes, axes = tuple(MESH.values()), (AxisType.Auto,) * len(MESH)
    mesh = jax.make_mesh(sizes, tuple(MESH), devices=jax.devices(), axis_types=axes)
    config = dataclasses.replace(
        model.Config(), mesh=mesh, num_layers=layers, max_seq_len=max(context, LEAST_CONTEXT)
    )

    def placed(info: Any) -> jax.ShapeDtypeStruct:
        where = model.logical_to_sharding(info.logical_axes, mesh, config.rules)
        return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=where)

    def abstract(kind: Any, *sizes: int) -> Any:
        return jax.tree.map(placed, kind.abstract(config, *sizes), is_leaf=model.is_param)

    whole = NamedSharding(mesh, PartitionSpec())
    token = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=whole)
    cache = abstract(model.KVCache, batch, config.max_seq_len)
    return model.decode_step, (token, abstract(model.Weights), cache, config)


@cache
def busiest(batch: int) -> tuple[float, float]:
    """Blocks of experts that the device with most of them reads, and products of an expert with eight rows there: means over
    random routings, since sums over all devices wait for it."""
    draw = np.random.default_rng(0)
    blocks, products = [], []
    for _ in range(DRAWS):
        scores = draw.random((batch, GROUPS, EXPERTS // GROUPS))
        best = np.sort(scores, -1)[..., -2:].sum(-1)
        kept = np.argsort(np.argsort(-best, -1), -1) < KEPT_GROUPS
        scores = np.where(kept[..., None], scores, -1.0).reshape(batch, EXPERTS)
        chosen = np.argsort(-scores, -1)[:, :CHOSEN].ravel()
        each = [chosen[chosen * DEVICES // EXPERTS == device] for device in range(DEVICES)]
        blocks.append(max(len(set(own // BLOCK)) for own in each))
        products.append(max(len(set(own)) + own.size / 8 for own in each))
    return float(np.mean(blocks)), float(np.mean(products))


def kernel_seconds(batch: int, on: str) -> float:
    """Seconds of a call of ``decode_ragged_dot`` on its busiest device.

    Blocks of four experts come from device memory beside the products of those before; a product of eight rows takes as long
    as an expert takes to enter the units, a row of a tile a cycle.
    """
    rates = rates_of(find_slice(on))
    chip, (blocks, products) = rates.chip, busiest(batch)
    rows, columns = chip.mxu_shape or (128, 128)
    read = blocks * BLOCK * D_MODEL * UNITS / (constant("simulate.dma_share") * rates.hbm)
    tiles = (D_MODEL / rows) * max(UNITS / columns, 1.0)
    product = tiles * rows / ((chip.num_mxu_per_core or 1) * rates.clock_hz)
    steps = EXPERTS // DEVICES // BLOCK
    return max(read, products * product) + steps * constant("kernels.step_seconds")


def llama_call(
    layers: int, batch: int, context: int, data: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Step of so many layers of Llama 3.1 70B on 16 devices, and its abstract arguments; the mesh is that of the table's commit."""
    from llama3_jax import model

    sizes, axes = (data, 8, 2 // data), (AxisType.Explicit,) * len(MESH)
    mesh = jax.make_mesh(sizes, tuple(MESH), devices=jax.devices()[:16], axis_types=axes)
    config = model.Config(
        embed=8192,
        ffw_size=28672,
        q_heads=64,
        kv_heads=8,
        num_layers=layers,
        head_dim=128,
        vocab_size=128256,
        max_seq_len=context,
        causal=True,
        use_prefill_attn_kernel=False,
        use_decode_attn_kernel=False,
        mesh=mesh,
    )

    def abstract(kind: Any, *sizes: int) -> Any:
        infos, places = kind.abstract(config, *sizes), kind.shardings(config, *sizes)
        return jax.tree.map(
            lambda info, where: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=where),
            infos,
            places,
            is_leaf=model.is_param,
        )

    with jax.sharding.set_mesh(mesh):
        weights, cache = abstract(model.Weights), abstract(model.KVCache, batch)
    rows = NamedSharding(mesh, PartitionSpec("x" if data > 1 else None, None))
    token = jax.ShapeDtypeStruct((batch, 1), jnp.int32, sharding=rows)
    return model.decode_step, (token, weights, cache, config)


def forecast_engine(model: str, batch: int, context: int, on: str, data: int, quick: bool) -> float:
    """Seconds of a token of each text, carried on from two programs of a few layers."""
    deepseek = "deepseek" in model.lower()
    depths, layers = (DEPTHS, LAYERS) if deepseek else (LLAMA_DEPTHS, LLAMA_LAYERS)
    costs = {"decode_ragged_dot": kernel_seconds(batch, on)} if deepseek else {}

    def few(layers: int) -> Forecast:
        if deepseek:
            function, given = decode_call(layers, batch, context)
            return forecast_function(function, *given, on=on, quick=quick, costs=costs)
        function, given = llama_call(layers, batch, context, data)
        with jax.sharding.set_mesh(given[-1].mesh):
            return forecast_function(function, *given, on=on, quick=quick)

    def whole(low: float, high: float) -> float:
        return high + (high - low) / (depths[1] - depths[0]) * (layers - depths[1])

    low, high = (few(layers) for layers in depths)
    seconds = whole(low.step_seconds or 0.0, high.step_seconds or 0.0)
    if deepseek or low.timeline is None or high.timeline is None:
        return seconds
    # A few layers find all of their weights fetched beside the ends of the program; all layers do not.
    rates = rates_of(find_slice(on))
    return max(seconds, whole(*(memory_seconds(made.timeline, rates) for made in (low, high))))
