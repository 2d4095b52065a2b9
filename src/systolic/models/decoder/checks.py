"""Checks of a decoder's switches against each other and a layout; imports without jax."""

import math
from typing import TYPE_CHECKING

from systolic.core.errors import LayoutError, OptionError
from systolic.job import Axis, Layout, OptimizerKind
from systolic.job.layout import check_divides, check_names
from systolic.models.decoder.config import Dispatch
from systolic.models.decoder.options import Score

if TYPE_CHECKING:
    from systolic.models.decoder.config import Decoder

ACTIVATIONS = ("layer_input", "latent", "query", "key", "value", "attention", "out", "mlp", "down")
"""Names of a layer's activations, which rematerialisation policies may keep."""

RULES = (
    OptimizerKind.adamw,
    OptimizerKind.lion,
    OptimizerKind.adafactor,
    OptimizerKind.muon,
)
"""Update rules whose steps have a size of their own, whatever that of the gradients."""


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
        (Axis.tensor, "heads", config.heads),
        (Axis.tensor, "d-ff", config.d_ff),
        (Axis.tensor, "vocab", config.vocab),
        (Axis.fsdp, "d-model", config.d_model),
    ]
    if not config.latent:
        divides.append((Axis.tensor, "kv-heads", config.kv_heads))
    piped = config.layers - config.dense_layers
    less = f" less dense-layers {config.dense_layers}" if config.dense_layers else ""
    divides.append((Axis.pipeline, f"layers{less}", piped))
    if config.experts > 1 and config.mixtures < config.layers:
        divides.append((Axis.tensor, "dense-d-ff", config.dense_width))
    if config.experts > 1:
        divides.append((Axis.expert, "experts", config.experts))
        if config.dispatch is Dispatch.dropless and layout.pipeline > 1:
            raise LayoutError(
                f"layout.pipeline is {layout.pipeline} and model.dispatch dropless, whose grouped matmuls do not run in a pipeline; set --model.dispatch slots, or layout.fsdp and layout.expert"
            )
    elif layout.expert > 1:
        raise LayoutError(
            f"layout.expert is {layout.expert} but the model is dense; set model.experts, or use layout.fsdp"
        )
    check_names(layout, "a decoder", ACTIVATIONS)
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
    check_divides(layout, divides)


def check_mixture(config: "Decoder") -> None:
    """Checks a mixture against the other sizes.

    Raises:
        OptionError: the first that contradicts another.
    """
    if config.experts == 1:
        return
    if config.mlp_bias:
        raise OptionError(
            f"model.mlp-bias is for dense models and model.experts is {config.experts}; leave mlp-bias out"
        )
    if not config.mlp.gated:
        raise OptionError(
            f"model.mlp {config.mlp.value} has no mixture of experts; use swiglu or geglu"
        )
    if config.dense_layers >= config.layers:
        raise OptionError(
            f"model.dense-layers {config.dense_layers} leaves no mixture of model.layers {config.layers}; lower it"
        )
    if config.mixture_every > 1 and (config.dense_layers or config.layers % config.mixture_every):
        if config.dense_layers:
            raise OptionError(
                f"model.mixture-every {config.mixture_every} and model.dense-layers {config.dense_layers} both set which layers are dense; leave one out"
            )
        raise OptionError(
            f"model.mixture-every {config.mixture_every} does not divide model.layers {config.layers}; the last layer of each period has the mixture, change one"
        )
    groups = config.router.groups
    least = 2 if config.router.score is Score.sigmoid and config.router.top_groups < groups else 1
    if config.experts % groups or config.experts // groups < least:
        raise OptionError(
            f"model.router.groups {groups} does not make equal groups of {least} or more of model.experts {config.experts}; change one"
        )
    choice = config.experts // groups * config.router.top_groups
    if config.experts_per_token > choice:
        of = "its" if choice == config.experts else "the"
        inside = "" if choice == config.experts else " of its router.top-groups"
        raise OptionError(
            f"model.experts-per-token {config.experts_per_token} is more than {of} {choice} experts{inside}; lower one or raise the other"
        )


def check_latent(config: "Decoder") -> None:
    """Checks latent attention against the other switches.

    Raises:
        OptionError: one is for plain attention.
    """
    if not config.latent:
        return
    if config.qk_norm:
        raise OptionError(
            "model.qk-norm is for plain attention, model.latent has norms on its latents; leave qk-norm out"
        )
    if config.qkv_bias:
        raise OptionError(
            "model.qkv-bias is for plain attention, model.latent has none; leave qkv-bias out"
        )
    if config.learned_positions:
        raise OptionError(
            f"model.learned-positions {config.learned_positions} is for plain attention, model.latent has rotary embeddings; leave learned-positions out"
        )


def check_mup(config: "Decoder") -> None:
    """Checks that muP has rules for all parts of a decoder.

    Raises:
        OptionError: it has none for a part.
    """
    if not config.mup:
        return
    if config.latent:
        raise OptionError(
            "model.mup.base-width is set, and muP has no rule for model.latent; leave one out"
        )
    if config.mup.base_head_dim and config.query_pre_attn_scalar:
        raise OptionError(
            f"model.mup.base-head-dim {config.mup.base_head_dim} and model.query-pre-attn-scalar {config.query_pre_attn_scalar:g} both set the scale of attention logits; leave one out"
        )


def check_rule(config: "Decoder", kind: OptimizerKind) -> None:
    """Checks that muP supports an update rule.

    Raises:
        OptionError: it does not.
    """
    if config.mup and kind not in RULES:
        raise OptionError(
            f"model.mup.base-width is set and optimizer.kind is {kind.value}, whose learning rates are not known to transfer between widths; use {', '.join(rule.value for rule in RULES)}"
        )
