"""Checks of a decoder against a layout; imports without jax."""

import math
from typing import TYPE_CHECKING

from systolic.core.errors import LayoutError, nearest
from systolic.job import Layout, Remat
from systolic.models.decoder.config import Dispatch

if TYPE_CHECKING:
    from systolic.models.decoder.config import Decoder

ACTIVATIONS = ("layer_input", "latent", "query", "key", "value", "attention", "out", "mlp", "down")
"""Names of a layer's activations, which rematerialisation policies may keep."""


def served_kv_heads(config: "Decoder", tensor: int) -> int:
    """Key-value heads of a server with a tensor axis of this size: copies of a head lie on several devices where there are fewer heads than devices.

    The least common multiple divides the heads, since the axis and the model's key-value heads both do.
    """
    return config.kv_heads if config.latent else math.lcm(config.kv_heads, tensor)


def check_served(config: "Decoder", layout: Layout) -> None:
    """Checks a layout that serves a decoder: unlike in training, key-value heads are copied and a vocabulary stays whole where the tensor axis does not divide them.

    Raises:
        LayoutError: for the first axis that does not divide what it splits; names the sizes that do.
    """
    divides = [("tensor", layout.tensor, "heads", config.heads)]
    divides.append(("tensor", layout.tensor, "d-ff", config.d_ff))
    if config.experts > 1 and config.mixtures < config.layers:
        divides.append(("tensor", layout.tensor, "dense-d-ff", config.dense_width))
    if config.experts > 1:
        divides.append(("expert", layout.expert, "experts", config.experts))
    elif layout.expert > 1:
        raise LayoutError(
            f"layout.expert is {layout.expert} but the model is dense; use layout.tensor or layout.data"
        )
    for axis, ways, dim, size in divides:
        if size % ways:
            least = math.gcd(*(other for name, _, _, other in divides if name == axis))
            fitting = ", ".join(str(n) for n in range(1, least + 1) if least % n == 0)
            raise LayoutError(
                f"layout.{axis} {ways} does not divide the {dim} of {size}; this model is served with layout.{axis} {fitting}"
            )


def check_layout(config: "Decoder", layout: Layout) -> None:
    """Checks that each axis divides the dims that it splits.

    Raises:
        LayoutError: for the first that does not.
    """
    divides = [
        ("tensor", layout.tensor, "heads", config.heads),
        ("tensor", layout.tensor, "d-ff", config.d_ff),
        ("tensor", layout.tensor, "vocab", config.vocab),
        ("fsdp", layout.fsdp, "d-model", config.d_model),
    ]
    if not config.latent:
        divides.append(("tensor", layout.tensor, "kv-heads", config.kv_heads))
    piped = config.layers - config.dense_layers
    less = f" less dense-layers {config.dense_layers}" if config.dense_layers else ""
    divides.append(("pipeline", layout.pipeline, f"layers{less}", piped))
    if config.experts > 1 and config.mixtures < config.layers:
        divides.append(("tensor", layout.tensor, "dense-d-ff", config.dense_width))
    if config.experts > 1:
        divides.append(("expert", layout.expert, "experts", config.experts))
        if config.dispatch is Dispatch.dropless and layout.pipeline > 1:
            raise LayoutError(
                f"layout.pipeline is {layout.pipeline} and model.dispatch dropless, whose grouped matmuls do not run in a pipeline; set --model.dispatch slots, or layout.fsdp and layout.expert"
            )
    elif layout.expert > 1:
        raise LayoutError(
            f"layout.expert is {layout.expert} but the model is dense; set model.experts, or use layout.fsdp"
        )
    if layout.remat in (Remat.save_names, Remat.offload):
        for name in (*layout.remat_names, *layout.saved_names):
            if name not in ACTIVATIONS:
                raise LayoutError(
                    f"layout.remat-names has {name!r}{nearest(name, ACTIVATIONS)}; a decoder names {', '.join(ACTIVATIONS)}"
                )
    if (piped // layout.pipeline) % config.mixture_every and layout.pipeline > 1:
        raise LayoutError(
            f"layout.pipeline {layout.pipeline} makes stages of {piped // layout.pipeline} layers, which model.mixture-every {config.mixture_every} does not divide; each stage repeats the whole pattern of mixtures"
        )
    if (piped // layout.pipeline) % math.lcm(
        config.mixture_every, len(config.windows)
    ) and layout.pipeline > 1:
        raise LayoutError(
            f"layout.pipeline {layout.pipeline} makes stages of {piped // layout.pipeline} layers, which model.global-every {config.global_every} does not divide; each stage repeats the whole pattern of windows"
        )
    for axis, ways, dim, size in divides:
        if size % ways:
            raise LayoutError(
                f"layout.{axis} {ways} does not divide model.{dim} {size}; use a divisor of {size}, or change model.{dim}"
            )
