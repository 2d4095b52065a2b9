"""Sizes, rules and fields that dense families of Llama's shape share."""

from typing import Any

from systolic.models.decoder.config import Decoder
from systolic.models.decoder.families.fields import rotary_fields
from systolic.models.decoder.families.mixtures import LAYER, attention, ends, gated, norms, tied
from systolic.models.families import Config
from systolic.models.mapping import Conversion, Rule, plain


def sizes(config: Config) -> dict[str, Any]:
    """Arguments of :class:`Decoder` from fields that all of them name alike."""
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab": config["vocab_size"],
        "tie_embeddings": config["tie_word_embeddings"],
        "embedding_scale": 1.0,
        "norm_eps": config["rms_norm_eps"],
    }


def fields(model: Decoder) -> dict[str, Any]:
    """The inverse of :func:`sizes`, and the fields of rotary embeddings."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "rms_norm_eps": model.norm_eps,
        **rotary_fields(model),
    }


def conversion(model: Decoder) -> Conversion:
    """Rules of embeddings, norms, attention and gated feed-forward part, with their biases."""
    layers = {"layer": range(model.layers)}
    found = [*ends(model), *attention(model, "blocks", layers)]
    if model.post_norms:
        names = {
            "attention_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "post_mlp_norm": "post_feedforward_layernorm",
        }
        found += [
            plain(f"blocks/{ours}/scale", f"{LAYER}{theirs}.weight", layers)
            for ours, theirs in names.items()
        ]
    else:
        found += norms("blocks", layers)
    found += gated("blocks/mlp", f"{LAYER}mlp.", (model.d_model, model.d_ff), layers)
    if model.mlp_bias:
        found += _biases(layers)
    return Conversion(rules=found, unused=tied(model))


def _biases(layers: dict[str, range]) -> list[Rule]:
    return [
        plain(f"blocks/mlp/{name}_bias", f"{LAYER}mlp.{name}_proj.bias", layers)
        for name in ("gate", "up", "down")
    ]
