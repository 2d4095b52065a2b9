"""Mixtral."""

from typing import Any

from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.families.fields import (
    LAYER,
    attention,
    config_of,
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
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion

DEFAULTS: Config = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Values of absent fields."""


def decoder(config: Config) -> Decoder:
    """The sizes of a Mixtral's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"hidden_act": "silu"})
    config = {**DEFAULTS, **config}
    theta, scaling = rotary(config, 1e6)
    heads = config["num_attention_heads"]
    return Decoder(
        layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_scale=1.0,
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        dispatch=Dispatch.dropless,
        router_loss=config.get("router_aux_loss_coef", 0.001),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        window=config.get("sliding_window") or 0,
    )


def conversion(config: Config) -> Conversion:
    """Rules of a Mixtral's config.json."""
    model = decoder(config)
    layers = kinds_of_layers(model)["blocks"]
    rules = [
        *ends(model),
        *norms("blocks", layers),
        *attention(model, "blocks", layers),
        *mixture(model, layers, f"{LAYER}block_sparse_moe.", ("w1", "w3", "w2")),
    ]
    return Conversion(rules=rules, unused=tied(model))


@config_of("mixtral", "MixtralForCausalLM", decoder)
def config(model: Decoder) -> dict[str, Any]:
    """A Mixtral's config.json."""
    return {
        **shared_fields(model),
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "num_local_experts": model.experts,
        "router_aux_loss_coef": model.router_loss,
        "sliding_window": model.window or None,
        **rotary_fields(model),
    }


FAMILIES = {"mixtral": Family(model=decoder, conversion=conversion, config=config)}
