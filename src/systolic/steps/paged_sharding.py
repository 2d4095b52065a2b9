"""Shardings of a served language model: what lies on which devices of an engine's mesh.

| what | over the mesh |
|---|---|
| matrices of heads, hidden units and the vocabulary | ``tensor`` |
| pages of keys and values | ``tensor``, by heads; latents whole on every device |
| experts | ``expert``, and the hidden units of each ``tensor`` |
| a step's input, the last tokens, chosen tokens | whole on every device |
| logits | ``tensor``, by the vocabulary, until a token is chosen |

A step then has two sums over the axis in each layer, one for the embedding, and what the choice of tokens takes.
A replica of the engine has a mesh of its own, so that the axis ``data`` is 1 in all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import NamedSharding

from systolic.core.errors import LayoutError
from systolic.job import Job, Layout
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.decoder.checks import check_served, served_kv_heads
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.page_ragged import LANES
from systolic.models.quantized.codes import NARROW_DTYPES, QUANTILES
from systolic.models.quantized.placement import plain_path
from systolic.steps.decode import EXPERT_ORDERS, PROJECTIONS
from systolic.steps.network import Arrays, ModelStructure
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget

PAGED: Mapping[str, tuple[str, ...]] = {
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("expert",),
    "routed": ("expert",),
}
"""Logical name of a dim to the mesh axes that split it, as :data:`systolic.steps.target.RULES`; no other is split."""
LOGITS = (None, "vocab")
"""Logical names of the dims of a step's logits."""
EMBEDDING = ("vocab", "embed")
"""Logical dims of the embedding."""
GATHERED_BYTES = 32 << 20
"""Logits of a choice up to which they are gathered once. Over split ones it has 14 collectives of a few bytes, which take
as long as gathering 30 MB where a collective takes 13 us and 179 GB/s (an all-gather on TPU7x, as published for five sizes)."""
KV_MATRICES = ("key", "value")
KV_BIASES = ("key_bias", "value_bias")


def paged_target(target: MeshTarget) -> MeshTarget:
    """The target under the rules of serving."""
    return replace(target, rules=PAGED, serves=True)


def whole(target: MeshTarget) -> NamedSharding:
    """Sharding of what all devices hold whole."""
    return target.sharding(target.spec())


def sharding(target: MeshTarget, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
    """Sharding of an array by the logical names of its dims; one that its axis does not divide is whole."""
    return target.sharding(target.fit(shape, axes))


def in_order(steps: StepFunctions, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Shardings of weights by path, with the order of dims that matmuls read where XLA would copy a weight in every step.

    By its own order the heads of a projection [embed, heads, head_dim] are rows of tiles, and a device may have fewer
    heads than a tile has rows. Heads that fill no register stay in XLA's order, which packs them. Kernels of experts read
    gate, up and down with the hidden units as rows: of a part of them that fills no register XLA takes another order for
    gate and up, or for down, than a kernel would, and copies all experts; so it does with an embedding whose rows do not
    fill whole registers, to pick a few of them.
    """
    model, placed = steps.job.model, dict(shardings)
    if steps.target.platform != "tpu" or not isinstance(model, Decoder):
        return placed
    orders: dict[Any, tuple[int, ...]] = {EMBEDDING: (0, 1)}
    orders |= EXPERT_ORDERS if model.experts > 1 else {}
    if not model.head_dim % LANES:
        orders |= dict.fromkeys(PROJECTIONS, (1, 0, 2))
    for path, axes in {**steps.network.axes, **steps.network.frozen}.items():
        inner = None if axes is None else orders.get(axes[-3:])
        if path not in placed or axes is None or inner is None:
            continue
        if axes[-3:] not in PROJECTIONS and not _read_as_it_lies(steps.network, path):
            continue
        outer = len(axes) - len(inner)
        order = (*range(outer), *(outer + dim for dim in inner))
        placed[path] = Format(Order(order), placed[path])
    return placed


def _read_as_it_lies(network: ModelStructure, path: str) -> bool:
    """Whether kernels read an array: a plain one, or codes of 8 bits with one scale an output; others are restored first, and scales have a short dim."""
    matrix = plain_path(path)
    if path == matrix:
        return True
    if path != f"{matrix}/{CODES}":
        return False
    codes, scales = (network.model_state[f"{matrix}/{name}"] for name in (CODES, SCALES))
    wide = codes.dtype.name not in (*NARROW_DTYPES, *QUANTILES)
    return wide and scales.shape[-2] == 1


def for_choice(target: MeshTarget, logits: jax.Array, *, always: bool = False) -> jax.Array:
    """Logits f32[texts, vocab] as a choice takes them: gathered where they are few, or ``always``."""
    if not always and logits.size * logits.dtype.itemsize > GATHERED_BYTES:
        return logits
    return target.constrain(logits, None, None)


def served_job(job: Job, layout: Layout) -> Job:
    """The job with key-value heads that the tensor axis divides: see :func:`with_copied_heads`.

    Raises: as :func:`systolic.models.decoder.checks.check_served`.
    """
    model = job.model
    if not isinstance(model, Decoder):
        return job
    check_served(model, layout)
    heads = served_kv_heads(model, layout.tensor)
    return job if heads == model.kv_heads else replace(job, model=replace(model, kv_heads=heads))


def with_copied_heads(arrays: Arrays, model: Any, served: Job) -> Arrays:
    """Weights of training with the key-value heads of :func:`served_job`, each a copy of one of the model's.

    Args:
        arrays: By path, of all layers of a stack: matrices [layers, d_model, kv_heads, head_dim], biases [layers, kv_heads x head_dim].
        model: Whose weights they are.
        served: The job that is served.

    Raises:
        LayoutError: the keys have an adapter.
    """
    ours: Any = served.model
    if ours == model:
        return arrays
    if served.adapter:
        raise LayoutError(
            f"layout.tensor does not divide the {model.kv_heads} key-value heads, and copies of heads have no adapters; export the run with its adapters merged, or use a layout.tensor that does"
        )
    times = ours.kv_heads // model.kv_heads

    def copied(path: str, array: jax.Array) -> jax.Array:
        block, _, name = plain_path(path).rpartition("/")
        # Factors of a matrix's inputs are those of all heads.
        if path.endswith(f"/{name}/{INPUTS}"):
            return array
        if block.endswith("blocks") and name in KV_MATRICES:
            return jnp.repeat(array, times, axis=-2)
        if block.endswith("blocks") and name in KV_BIASES:
            split = array.reshape(*array.shape[:-1], model.kv_heads, -1)
            return jnp.repeat(split, times, axis=-2).reshape(*array.shape[:-1], -1)
        return array

    return {path: copied(path, array) for path, array in arrays.items()}
