"""Qwen2 and Qwen3, dense."""

from typing import Any

from systolic.models.decoder.config import Decoder
from systolic.models.decoder.families import fields
from systolic.models.decoder.families.fields import (
    FULL,
    SLIDING,
    activation,
    config_of,
    layer_types,
    named,
    rotary,
    windows,
)
from systolic.models.families import Config, Family

QWEN2: Config = {
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""Values of absent fields."""
QWEN3: Config = {**QWEN2, "head_dim": 128, "attention_bias": False}


def qwen2(config: Config) -> Decoder:
    """The sizes of a Qwen2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    return Decoder(**_shared({**QWEN2, **config}), qkv_bias=True)


def qwen3(config: Config) -> Decoder:
    """The sizes of a Qwen3's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**QWEN3, **config}
    bias = config["attention_bias"]
    return Decoder(**_shared(config), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _shared(config: Config) -> dict[str, Any]:
    theta, scaling = rotary(config)
    layers, first = config["num_hidden_layers"], config["max_window_layers"]
    types = [FULL if number < first else SLIDING for number in range(layers)]
    window = config["sliding_window"] if config["use_sliding_window"] else None
    window, every = windows(config.get("layer_types") or types, window)
    return {
        **fields.sizes(config),
        "mlp": activation(config, "hidden_act"),
        "window": window,
        "global_every": every,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


@config_of("qwen2", "Qwen2ForCausalLM", qwen2)
def qwen2_config(model: Decoder) -> dict[str, Any]:
    """A Qwen2's config.json."""
    return _written(model)


@config_of("qwen3", "Qwen3ForCausalLM", qwen3)
def qwen3_config(model: Decoder) -> dict[str, Any]:
    """A Qwen3's config.json."""
    return {**_written(model), "attention_bias": model.qkv_bias}


def _written(model: Decoder) -> dict[str, Any]:
    return {
        **fields.fields(model),
        "hidden_act": named(model.mlp),
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "layer_types": layer_types(model),
    }


FAMILIES = {
    "qwen2": Family(
        model=qwen2, conversion=lambda config: fields.conversion(qwen2(config)), config=qwen2_config
    ),
    "qwen3": Family(
        model=qwen3, conversion=lambda config: fields.conversion(qwen3(config)), config=qwen3_config
    ),
}
