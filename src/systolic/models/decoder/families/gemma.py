"""Gemma 2, and Gemma 3 for text: alone, or the text part of a multimodal one."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, NormKind
from systolic.models.decoder.families import fields
from systolic.models.decoder.families.fields import (
    FULL,
    SLIDING,
    activation,
    config_of,
    follow,
    layer_types,
    named,
    rotary,
    windows,
)
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Tensors

SHARED: Config = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""Values of absent fields; the text part of a multimodal Gemma 3 relies on them."""
GEMMA2: Config = {
    **SHARED,
    "vocab_size": 256_000,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3: Config = {
    **SHARED,
    "vocab_size": 262_208,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
}
PERIOD2 = 2
"""Period of Gemma 2's layers of full attention; transformers reads no sliding_window_pattern of it."""
PREFIXES = ("language_model.model.", "model.language_model.")
"""Beginnings of names of a multimodal file's text part, in files of old and new versions of transformers."""
OTHER_PARTS = r"(model\.)?(vision_tower|multi_modal_projector)\..*"
"""Names of the tensors of a multimodal file's other parts."""


def gemma2(config: Config) -> Decoder:
    """The sizes of a Gemma 2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**GEMMA2, **config}
    theta, scaling = rotary(config)
    return Decoder(
        **_shared(config, PERIOD2),
        attention_cap=config["attn_logit_softcapping"] or 0.0,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def gemma3(config: Config) -> Decoder:
    """The sizes of a Gemma 3's config.json, or of the text part of a multimodal one's.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    config = {**GEMMA3, **config.get("text_config", config)}
    # Its attention never passes attn_logit_softcapping (transformers 5.23).
    shared = _shared(config, config["sliding_window_pattern"])
    theta, scaling = rotary(config, 1e6, FULL)
    base = config.get("rope_local_base_freq")
    alone = {**config, "rope_scaling": None, "rope_theta": base}
    local, stretched = rotary(alone, 1e4, SLIDING)
    if stretched:
        raise OptionError(
            f"rope_parameters stretch the layers of {SLIDING} ({stretched.kind.value}) and only stretched layers of {FULL} are known"
        )
    return Decoder(
        **shared,
        qk_norm=True,
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local if shared["window"] else None,
    )


def _shared(config: Config, every: int) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        follow(config, {"use_bidirectional_attention": False})
    layers = config["num_hidden_layers"]
    types = [FULL if (number + 1) % every == 0 else SLIDING for number in range(layers)]
    window, every = windows(config.get("layer_types") or types, config["sliding_window"])
    return {
        **fields.sizes(config),
        "mlp": activation(config, "hidden_activation"),
        "norm": NormKind.rms_offset,
        "post_norms": True,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "qkv_bias": config["attention_bias"],
        "out_bias": config["attention_bias"],
        "query_pre_attn_scalar": config["query_pre_attn_scalar"],
        "logit_cap": config["final_logit_softcapping"] or 0.0,
        "window": window,
        "global_every": every,
    }


def _written(model: Decoder) -> dict[str, Any]:
    scalar = model.query_pre_attn_scalar or model.head_dim
    return {
        **fields.fields(model),
        "hidden_activation": named(model.mlp),
        "attention_bias": model.qkv_bias,
        # transformers takes a whole number as such only.
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "final_logit_softcapping": model.logit_cap or None,
        "sliding_window": model.window or None,
        "layer_types": layer_types(model),
    }


@config_of("gemma2", "Gemma2ForCausalLM", gemma2)
def gemma2_config(model: Decoder) -> dict[str, Any]:
    """A Gemma 2's config.json."""
    return {
        **_written(model),
        "attn_logit_softcapping": model.attention_cap or None,
    }


@config_of("gemma3_text", "Gemma3ForCausalLM", gemma3)
def gemma3_config(model: Decoder) -> dict[str, Any]:
    """A config.json of a Gemma 3 for text."""
    return {
        **_written(model),
        "rope_local_base_freq": model.local_rope_theta or model.rope_theta,
    }


def gemma3_conversion(config: Config) -> Conversion:
    """Rules of a Gemma 3's config.json; other parts of a multimodal one are left out."""
    base = fields.conversion(gemma3(config))
    return Conversion(rules=base.rules, unused=(*base.unused, OTHER_PARTS))


def text_part(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """A multimodal file's tensors, those of its text part by the names of a Gemma 3 for text."""

    def name(theirs: str) -> str:
        for prefix in PREFIXES:
            if theirs.startswith(prefix):
                return "model." + theirs.removeprefix(prefix)
        return theirs.removeprefix("language_model.")

    return config, {name(theirs): tensor for theirs, tensor in tensors.items()}


TEXT = Family(model=gemma3, conversion=gemma3_conversion, config=gemma3_config)
FAMILIES = {
    "gemma2": Family(
        model=gemma2,
        conversion=lambda config: fields.conversion(gemma2(config)),
        config=gemma2_config,
    ),
    "gemma3_text": TEXT,
    "gemma3": Family(
        model=gemma3, conversion=gemma3_conversion, config=gemma3_config, canonical=text_part
    ),
}
