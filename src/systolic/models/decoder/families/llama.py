"""Llama 2 and 3, SmolLM2; Mistral."""

from typing import Any

from systolic.models.decoder.config import Decoder
from systolic.models.decoder.families import fields
from systolic.models.decoder.families.fields import activation, config_of, named, rotary
from systolic.models.families import Config, Family

LLAMA: Config = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
"""Values of absent fields, as in transformers 5.23; so in all families."""
MISTRAL: Config = {
    **LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def decoder(config: Config) -> Decoder:
    """The sizes of a Llama's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**LLAMA, **config}
    theta, scaling = rotary(config)
    return Decoder(
        **fields.sizes(config),
        mlp=activation(config, "hidden_act"),
        mlp_bias=config["mlp_bias"],
        qkv_bias=config["attention_bias"],
        out_bias=config["attention_bias"],
        rope_theta=theta,
        rope_scaling=scaling,
    )


@config_of("llama", "LlamaForCausalLM", decoder)
def config(model: Decoder) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        **fields.fields(model),
        "hidden_act": named(model.mlp),
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
    }


def mistral(config: Config) -> Decoder:
    """The sizes of a Mistral's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**MISTRAL, **config}
    theta, scaling = rotary(config)
    return Decoder(
        **fields.sizes(config),
        mlp=activation(config, "hidden_act"),
        window=config["sliding_window"] or 0,
        rope_theta=theta,
        rope_scaling=scaling,
    )


@config_of("mistral", "MistralForCausalLM", mistral)
def mistral_config(model: Decoder) -> dict[str, Any]:
    """A Mistral's config.json."""
    return {
        **fields.fields(model),
        "hidden_act": named(model.mlp),
        "sliding_window": model.window or None,
    }


FAMILIES = {
    "llama": Family(
        model=decoder, conversion=lambda config: fields.conversion(decoder(config)), config=config
    ),
    "mistral": Family(
        model=mistral,
        conversion=lambda config: fields.conversion(mistral(config)),
        config=mistral_config,
    ),
}
