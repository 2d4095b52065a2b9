"""GPT-2: Conv1D matrices [inputs, outputs], queries, keys and values in one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from systolic.models.decoder.config import Decoder, Mlp, NormKind
from systolic.models.decoder.families.fields import activation, config_of, follow, named
from systolic.models.families import Config, Family
from systolic.models.mapping import (
    Conversion,
    Pieces,
    Rule,
    Tensors,
    layer_norm,
    matrix,
    plain,
    shaped,
)

DEFAULTS: Config = {
    "vocab_size": 50_257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""Values of absent fields."""
FOLLOWED: Config = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
ACTIVATION_NAMES = {
    "gelu_new": Mlp.gelu,
    "gelu_pytorch_tanh": Mlp.gelu,
    "gelu_fast": Mlp.gelu,
    "gelu": Mlp.gelu_exact,
    "relu": Mlp.relu,
}
PREFIX = "transformer."
"""Beginning of names in files of the whole language model; the first files were of the trunk alone."""
LAYER = f"{PREFIX}h.{{layer}}."


def decoder(config: Config) -> Decoder:
    """The sizes of a GPT-2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, FOLLOWED)
    config = {**DEFAULTS, **config}
    heads = config["n_head"]
    return Decoder(
        layers=config["n_layer"],
        d_model=config["n_embd"],
        d_ff=config["n_inner"] or 4 * config["n_embd"],
        mlp=activation(config, "activation_function", ACTIVATION_NAMES),
        mlp_bias=True,
        heads=heads,
        kv_heads=heads,
        head_dim=config["n_embd"] // heads,
        qkv_bias=True,
        out_bias=True,
        vocab=config["vocab_size"],
        tie_embeddings=config["tie_word_embeddings"],
        embedding_scale=1.0,
        learned_positions=config["n_positions"],
        norm=NormKind.layer,
        norm_eps=config["layer_norm_epsilon"],
    )


def conversion(config: Config) -> Conversion:
    """Rules of a GPT-2's config.json."""
    model = decoder(config)
    d, h, e = model.d_model, model.heads, model.head_dim
    layers = {"layer": range(model.layers)}
    rules = [
        plain("embedding", f"{PREFIX}wte.weight"),
        plain("positions", f"{PREFIX}wpe.weight"),
        *layer_norm("norm", f"{PREFIX}ln_f"),
        *layer_norm("blocks/attention_norm", f"{LAYER}ln_1", layers),
        *layer_norm("blocks/mlp_norm", f"{LAYER}ln_2", layers),
        _fused("", f"{LAYER}attn.c_attn.weight", (d, h, e), layers),
        _fused("_bias", f"{LAYER}attn.c_attn.bias", (h * e,), layers),
        shaped("blocks/out", f"{LAYER}attn.c_proj.weight", (h, e, d), (h * e, d), layers),
        plain("blocks/out_bias", f"{LAYER}attn.c_proj.bias", layers),
        plain("blocks/mlp/up", f"{LAYER}mlp.c_fc.weight", layers),
        plain("blocks/mlp/up_bias", f"{LAYER}mlp.c_fc.bias", layers),
        plain("blocks/mlp/down", f"{LAYER}mlp.c_proj.weight", layers),
        plain("blocks/mlp/down_bias", f"{LAYER}mlp.c_proj.bias", layers),
    ]
    if not model.tie_embeddings:
        rules.append(matrix("unembedding", "lm_head.weight", (d, model.vocab)))
    tied = ("lm_head.weight",) if model.tie_embeddings else ()
    masks = r".*\.attn\.(masked_)?bias"
    return Conversion(rules=rules, unused=(masks, *tied))


def _fused(
    ending: str, theirs: str, shape: tuple[int, ...], layers: Mapping[str, Sequence[int]]
) -> Rule:
    """Queries, keys and values of one tensor, beside each other in its last dim; ``shape`` is that of each here."""
    rows = shape[:1] if len(shape) > 1 else ()

    def read(pieces: Pieces) -> Pieces:
        return [part.reshape(shape) for part in np.split(pieces[0], 3, axis=-1)]

    def write(pieces: Pieces) -> Pieces:
        return [np.concatenate([piece.reshape(*rows, -1) for piece in pieces], axis=-1)]

    ours = tuple(f"blocks/{name}{ending}" for name in ("query", "key", "value"))
    return Rule(ours=ours, theirs=(theirs,), stack=layers, read=read, write=write)


@config_of("gpt2", "GPT2LMHeadModel", decoder)
def config(model: Decoder) -> dict[str, Any]:
    """A GPT-2's config.json."""
    return {
        "vocab_size": model.vocab,
        "n_positions": model.learned_positions,
        "n_embd": model.d_model,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.d_ff,
        "activation_function": named(model.mlp, ACTIVATION_NAMES),
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
    }


def whole(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Tensors of a file by the names of the whole language model."""
    if any(name.startswith(PREFIX) for name in tensors):
        return config, tensors
    own = "lm_head."
    return config, {
        name if name.startswith(own) else PREFIX + name: tensor for name, tensor in tensors.items()
    }


FAMILIES = {"gpt2": Family(model=decoder, conversion=conversion, config=config, canonical=whole)}
