"""Sizes of a decoder for an analytic model of time and memory; imports without jax."""

import math
from typing import TYPE_CHECKING

from systolic.job import Layout, ModelStats, Remat
from systolic.models.decoder import sizes
from systolic.models.decoder.config import Dispatch

if TYPE_CHECKING:
    from systolic.models.decoder.config import Decoder

ATTENTION = 0.05
"""Rough share of attention's own products in the forward pass; the true one grows with the sequence, which is unknown here."""


def outline(config: "Decoder", layout: Layout) -> ModelStats:
    """Elements that each policy saves, by the names of the blocks' activations."""
    whole, split = activations(config)
    queries = config.heads * config.query_dim
    matmuls = ("latent", "query", "key", "value", "out", "mlp", "down")
    named = set(layout.remat_names)
    stays = set(layout.saved_names)

    def kept(names: set[str]) -> tuple[int, int]:
        return (
            sum(size for name, size in whole.items() if name in names),
            sum(size for name, size in split.items() if name in names),
        )

    everything = kept({*whole, *split})
    dropless = config.experts > 1 and config.dispatch is Dispatch.dropless
    expert_rows = split["mlp"] if dropless else 0
    # Grouped products are kernels, which a policy for matmuls does not save.
    saved = {name for name in matmuls if not (dropless and name in ("mlp", "down"))}
    some, more = kept({"layer_input", *saved})
    return ModelStats(
        parameters=config.num_parameters,
        layers=config.layers,
        stream=config.d_model,
        keys=_key_heads(config) * (config.query_dim + config.value_dim),
        routed=config.experts_per_token if config.experts > 1 else 0,
        vocab=config.vocab,
        experts=config.experts if dropless else 0,
        hidden={
            Remat.none: expert_rows + expert_rows // 2,
            Remat.minimal: 0,
            Remat.save_names: expert_rows if "mlp" in named else 0,
            Remat.offload: expert_rows if "mlp" in stays else 0,
            Remat.full: 0,
        },
        kept={
            # Besides what is named: the norms' results, the rotated queries and keys, the activation.
            Remat.none: (
                everything[0] + (6 if config.post_norms else 4) * config.d_model,
                everything[1] + queries + split["mlp"] // 2,
            ),
            Remat.minimal: (some, more),
            Remat.save_names: kept({"layer_input", *named}),
            Remat.offload: kept(({"layer_input"} - named) | stays),
            Remat.full: kept({"layer_input"}),
        },
        repeated={
            Remat.none: 0.0,
            Remat.minimal: _repeated(config, saved | {"attention"}) + ATTENTION,
            Remat.save_names: _repeated(config, {*named}),
            Remat.offload: _repeated(config, named | stays),
            Remat.full: 1.0,
        },
    )


def activations(config: "Decoder") -> tuple[dict[str, int], dict[str, int]]:
    """Elements per token and layer by name: those that the tensor axis leaves whole, and those that it splits."""
    heads, key_heads = config.heads, _key_heads(config)
    copies = float(config.experts_per_token) if config.experts > 1 else 1.0
    if config.dispatch is Dispatch.slots and config.experts > 1:
        copies *= config.capacity_factor
    width = config.d_ff * (max(copies, 1.0) + config.shared_experts)
    if config.mixtures < config.layers:
        width += (config.dense_width - width) * (1 - config.mixtures / config.layers)
    whole = {"layer_input": config.d_model, "out": config.d_model, "down": config.d_model}
    if latent := config.latent:
        whole["latent"] = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
    split = {
        "query": heads * config.query_dim,
        "key": key_heads * config.query_dim,
        "value": key_heads * config.value_dim,
        "attention": heads * config.value_dim,
        "mlp": math.ceil(width * (2 if config.mlp.gated else 1)),
    }
    return whole, split


def _key_heads(config: "Decoder") -> int:
    return config.heads if config.latent else config.kv_heads


def _costs(config: "Decoder") -> dict[str, float]:
    """Parameters of the matmul that makes each activation: its share of the FLOPs of a mean layer."""
    d, keys = config.d_model, config.kv_heads * config.head_dim
    hidden = sizes.feed_forward(config, config.experts_per_token) / config.layers
    router = d * config.experts * config.mixtures / config.layers
    down = (hidden - router) / config.mlp_matrices
    ends = {"out": sizes.out(config), "mlp": hidden - router - down, "down": down}
    if latent := config.latent:
        q, r = latent.q_lora_rank, latent.kv_lora_rank
        return ends | {
            "latent": d * (q + r + latent.qk_rope_head_dim),
            "query": (q or d) * config.heads * config.query_dim,
            "key": r * config.heads * latent.qk_nope_head_dim,
            "value": r * config.heads * latent.v_head_dim,
        }
    return ends | {"query": d * config.heads * config.head_dim, "key": d * keys, "value": d * keys}


def _repeated(config: "Decoder", names: set[str]) -> float:
    """Share of a layer's matmuls that are recomputed: those whose results are needed and not saved."""
    costs = _costs(config)
    # What a block ends in is never asked for again by itself.
    again = sum(
        cost for name, cost in costs.items() if name not in names and name not in ("out", "down")
    )
    if "attention" not in names:
        again += ATTENTION * sum(costs.values())
    return again / sum(costs.values())
