"""Llama 2 and 3, SmolLM2, Mistral, Mixtral, and Qwen2 and Qwen3, dense and with experts."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.families import fields
from systolic.models.decoder.families.fields import (
    FULL,
    LAYER,
    SLIDING,
    activation,
    attention,
    config_of,
    dense,
    ends,
    follow,
    kinds_of_layers,
    layer_types,
    mixture,
    named,
    norms,
    rotary,
    rotary_fields,
    shared_fields,
    tied,
    windows,
)
from systolic.models.decoder.options import Router
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion

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
MIXTRAL: Config = {
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
QWEN_MOE: Config = {
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


def llama(config: Config) -> Decoder:
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


@config_of("llama", "LlamaForCausalLM", llama)
def llama_config(model: Decoder) -> dict[str, Any]:
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


def mixtral(config: Config) -> Decoder:
    """The sizes of a Mixtral's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"hidden_act": "silu"})
    config = {**MIXTRAL, **config}
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


def mixtral_conversion(config: Config) -> Conversion:
    """Rules of a Mixtral's config.json."""
    model = mixtral(config)
    layers = kinds_of_layers(model)["blocks"]
    rules = [
        *ends(model),
        *norms("blocks", layers),
        *attention(model, "blocks", layers),
        *mixture(model, layers, f"{LAYER}block_sparse_moe.", ("w1", "w3", "w2")),
    ]
    return Conversion(rules=rules, unused=tied(model))


@config_of("mixtral", "MixtralForCausalLM", mixtral)
def mixtral_config(model: Decoder) -> dict[str, Any]:
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


def qwen2(config: Config) -> Decoder:
    """The sizes of a Qwen2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    return Decoder(**_qwen({**QWEN2, **config}), qkv_bias=True)


def qwen3(config: Config) -> Decoder:
    """The sizes of a Qwen3's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**QWEN3, **config}
    bias = config["attention_bias"]
    return Decoder(**_qwen(config), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen(config: Config) -> dict[str, Any]:
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
    return _qwen_config(model)


@config_of("qwen3", "Qwen3ForCausalLM", qwen3)
def qwen3_config(model: Decoder) -> dict[str, Any]:
    """A Qwen3's config.json."""
    return {**_qwen_config(model), "attention_bias": model.qkv_bias}


def _qwen_config(model: Decoder) -> dict[str, Any]:
    return {
        **fields.fields(model),
        "hidden_act": named(model.mlp),
        "use_sliding_window": model.window > 0,
        "sliding_window": model.window or None,
        "layer_types": layer_types(model),
    }


def qwen_moe(config: Config) -> Decoder:
    """The sizes of a Qwen3-MoE's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"hidden_act": "silu", "attention_bias": False})
    config = {**QWEN_MOE, **config}
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


def qwen_moe_conversion(config: Config) -> Conversion:
    """Rules of a Qwen3-MoE's config.json."""
    model = qwen_moe(config)
    rules = ends(model)
    for path, layers in kinds_of_layers(model).items():
        rules += [*norms(path, layers), *attention(model, path, layers)]
        sparse = path == "blocks"
        rules += mixture(model, layers, f"{LAYER}mlp.") if sparse else dense(model, layers)
    return Conversion(rules=rules, unused=tied(model))


@config_of("qwen3_moe", "Qwen3MoeForCausalLM", qwen_moe)
def qwen_moe_config(model: Decoder) -> dict[str, Any]:
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


FAMILIES = {
    "llama": Family(
        model=llama, conversion=lambda config: fields.conversion(llama(config)), config=llama_config
    ),
    "mistral": Family(
        model=mistral,
        conversion=lambda config: fields.conversion(mistral(config)),
        config=mistral_config,
    ),
    "mixtral": Family(model=mixtral, conversion=mixtral_conversion, config=mixtral_config),
    "qwen2": Family(
        model=qwen2, conversion=lambda config: fields.conversion(qwen2(config)), config=qwen2_config
    ),
    "qwen3": Family(
        model=qwen3, conversion=lambda config: fields.conversion(qwen3(config)), config=qwen3_config
    ),
    "qwen3_moe": Family(model=qwen_moe, conversion=qwen_moe_conversion, config=qwen_moe_config),
}
