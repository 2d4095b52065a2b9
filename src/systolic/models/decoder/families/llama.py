"""Llama 2 and 3, SmolLM2."""

from typing import Any

from systolic.job import Model
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.families.fields import follow, rotary, rotary_fields
from systolic.models.families import Config, Family
from systolic.models.mapping import Conversion, Rule, matrix, plain

LAYER = "model.layers.{layer}."
UNUSED = (r".*rotary_emb\.inv_freq",)
"""Tensors of old checkpoints that hold nothing but the wavelengths."""


def decoder(config: Config) -> Decoder:
    """The sizes of a Llama's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    theta, scaling = rotary(config)
    heads = config["num_attention_heads"]
    return Decoder(
        layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        mlp=Mlp.swiglu,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_scale=1.0,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def rules(model: Decoder) -> list[Rule]:
    """Rules for attention, gated MLP, norms and embeddings, as most decoders name them."""
    d, h, k, e = model.d_model, model.heads, model.kv_heads, model.head_dim
    layers = {"layer": range(model.layers)}
    attention, mlp = f"{LAYER}self_attn.", f"{LAYER}mlp."
    found = [
        plain("embedding", "model.embed_tokens.weight"),
        plain("norm/scale", "model.norm.weight"),
        plain("blocks/attention_norm/scale", f"{LAYER}input_layernorm.weight", layers),
        plain("blocks/mlp_norm/scale", f"{LAYER}post_attention_layernorm.weight", layers),
        matrix("blocks/query", f"{attention}q_proj.weight", (d, h, e), stack=layers),
        matrix("blocks/key", f"{attention}k_proj.weight", (d, k, e), stack=layers),
        matrix("blocks/value", f"{attention}v_proj.weight", (d, k, e), stack=layers),
        matrix("blocks/out", f"{attention}o_proj.weight", (h, e, d), inputs=2, stack=layers),
        matrix("blocks/mlp/gate", f"{mlp}gate_proj.weight", (d, model.d_ff), stack=layers),
        matrix("blocks/mlp/up", f"{mlp}up_proj.weight", (d, model.d_ff), stack=layers),
        matrix("blocks/mlp/down", f"{mlp}down_proj.weight", (model.d_ff, d), stack=layers),
    ]
    if not model.tie_embeddings:
        found.append(matrix("unembedding", "lm_head.weight", (d, model.vocab)))
    return found


def conversion(config: Config) -> Conversion:
    """Rules of a Llama's config.json."""
    model = decoder(config)
    tied = ("lm_head.weight",) if model.tie_embeddings else ()
    return Conversion(rules=rules(model), unused=(*UNUSED, *tied))


def config(model: Model) -> dict[str, Any]:
    """A Llama's config.json."""
    assert isinstance(model, Decoder)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "hidden_act": "silu",
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        **rotary_fields(model),
        "rms_norm_eps": model.norm_eps,
    }


FAMILIES = {"llama": Family(model=decoder, conversion=conversion, config=config)}
