"""Qwen2 and Qwen3, dense."""

from typing import Any

from systolic.job import Model
from systolic.models.decoder.config import Decoder
from systolic.models.decoder.families import fields
from systolic.models.decoder.families.fields import (
    FULL,
    SLIDING,
    activation,
    faithful,
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


def _written(model: Decoder, kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        **fields.fields(model),
        "hidden_act": named(model.mlp),
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "layer_types": layer_types(model),
    }


def qwen2_config(model: Model) -> dict[str, Any]:
    """A Qwen2's config.json.

    Raises:
        OptionError: a Qwen2 of transformers can't be this model.
    """
    assert isinstance(model, Decoder)
    return faithful(model, _written(model, "qwen2"), qwen2)


def qwen3_config(model: Model) -> dict[str, Any]:
    """A Qwen3's config.json.

    Raises:
        OptionError: a Qwen3 of transformers can't be this model.
    """
    assert isinstance(model, Decoder)
    written = {**_written(model, "qwen3"), "attention_bias": model.qkv_bias}
    return faithful(model, written, qwen3)


FAMILIES = {
    "qwen2": Family(
        model=qwen2, conversion=lambda config: fields.conversion(qwen2(config)), config=qwen2_config
    ),
    "qwen3": Family(
        model=qwen3, conversion=lambda config: fields.conversion(qwen3(config)), config=qwen3_config
    ),
}
