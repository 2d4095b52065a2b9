"""Qwen3 with experts."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.families.fields import (
    LAYER,
    attention,
    config_of,
    dense,
    ends,
    follow,
    kinds_of_layers,
    mixture,
    norms,
    rotary,
    rotary_fields,
    shared_fields,
    tied,
)
from systolic.models.decoder.options import Router
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion

DEFAULTS: Config = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151_936,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "sliding_window": 4096,
}
"""Values of absent fields."""


def decoder(config: Config) -> Decoder:
    """The sizes of a Qwen3-MoE's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"hidden_act": "silu", "attention_bias": False})
    config = {**DEFAULTS, **config}
    theta, scaling = rotary(config)
    first, every = dense_pattern(config)
    heads = config["num_attention_heads"]
    return Decoder(
        layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        d_ff=config["moe_intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_scale=1.0,
        experts=config.get("num_experts") or config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        dispatch=Dispatch.dropless,
        dense_layers=first,
        mixture_every=every,
        dense_d_ff=config["intermediate_size"] if first or every > 1 else 0,
        router=Router(normalise=config.get("norm_topk_prob", False)),
        router_loss=config.get("router_aux_loss_coef", 0.001),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qk_norm=True,
        window=(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0,
    )


def dense_pattern(config: Config) -> tuple[int, int]:
    """Number of dense first layers, and period of the layers with experts, of ``mlp_only_layers`` and ``decoder_sparse_step``.

    Raises:
        OptionError: another pattern.
    """
    layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    sparse = [layer for layer in range(layers) if layer not in only and (layer + 1) % step == 0]
    first = sparse[0] if sparse else layers
    if sparse == list(range(first, layers)):
        return first, 1
    if layers % (first + 1) == 0 and sparse == list(range(first, layers, first + 1)):
        return 0, first + 1
    raise OptionError(
        f"mlp_only_layers {only} and decoder_sparse_step {step} make layers {sparse} of {layers} sparse and only dense first layers, or experts in the last layer of each period, are known"
    )


def conversion(config: Config) -> Conversion:
    """Rules of a Qwen3-MoE's config.json."""
    model = decoder(config)
    rules = ends(model)
    for path, layers in kinds_of_layers(model).items():
        rules += [*norms(path, layers), *attention(model, path, layers)]
        sparse = path == "blocks"
        rules += mixture(model, layers, f"{LAYER}mlp.") if sparse else dense(model, layers)
    return Conversion(rules=rules, unused=tied(model))


@config_of("qwen3_moe", "Qwen3MoeForCausalLM", decoder)
def config(model: Decoder) -> dict[str, Any]:
    """A Qwen3-MoE's config.json."""
    return {
        **shared_fields(model),
        "head_dim": model.head_dim,
        "intermediate_size": model.dense_width,
        "moe_intermediate_size": model.d_ff,
        "num_experts": model.experts,
        "norm_topk_prob": model.router.normalise,
        "mlp_only_layers": list(range(model.dense_layers)),
        "decoder_sparse_step": model.mixture_every,
        "router_aux_loss_coef": model.router_loss,
        "attention_bias": False,
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        **rotary_fields(model),
    }


FAMILIES = {"qwen3_moe": Family(model=decoder, conversion=conversion, config=config)}
