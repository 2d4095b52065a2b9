"""GPT-2, whose Conv1D matrices are [inputs, outputs] with queries, keys and values in one; gpt-oss."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Dispatch, Mlp, NormKind
from systolic.models.decoder.families.fields import (
    FULL,
    LAYER,
    SLIDING,
    Layers,
    activation,
    attention,
    config_of,
    ends,
    follow,
    kinds_of_layers,
    layer_types,
    named,
    norms,
    rotary,
    rotary_fields,
    shared_fields,
    tied,
    windows,
)
from systolic.models.decoder.options import CLAMP_LIMIT, CLAMP_SLOPE, Router
from systolic.models.families import Config, Family
from systolic.models.mapping import (
    Array,
    Conversion,
    Pieces,
    Rule,
    Tensors,
    layer_norm,
    matrix,
    plain,
    shaped,
)

GPT2: Config = {
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
GPT2_LAYER = f"{PREFIX}h.{{layer}}."
MXFP4 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    np.float32,
)
"""Values of the 16 codes of a 4-bit float (OCP Microscaling Formats 1.0, section 5.3.3)."""
SCALE_BIAS = 127
"""Exponent bias of a block's scale (section 5.4.1 of the same)."""
YARN: Config = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS: Config = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
}
"""Values of absent fields; those of ``YARN`` where neither rope_parameters nor rope_scaling is given."""


def gpt2(config: Config) -> Decoder:
    """The sizes of a GPT-2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, FOLLOWED)
    config = {**GPT2, **config}
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


def gpt2_conversion(config: Config) -> Conversion:
    """Rules of a GPT-2's config.json."""
    model = gpt2(config)
    d, h, e = model.d_model, model.heads, model.head_dim
    layers = {"layer": range(model.layers)}
    rules = [
        plain("embedding", f"{PREFIX}wte.weight"),
        plain("positions", f"{PREFIX}wpe.weight"),
        *layer_norm("norm", f"{PREFIX}ln_f"),
        *layer_norm("blocks/attention_norm", f"{GPT2_LAYER}ln_1", layers),
        *layer_norm("blocks/mlp_norm", f"{GPT2_LAYER}ln_2", layers),
        _fused("", f"{GPT2_LAYER}attn.c_attn.weight", (d, h, e), layers),
        _fused("_bias", f"{GPT2_LAYER}attn.c_attn.bias", (h * e,), layers),
        shaped("blocks/out", f"{GPT2_LAYER}attn.c_proj.weight", (h, e, d), (h * e, d), layers),
        plain("blocks/out_bias", f"{GPT2_LAYER}attn.c_proj.bias", layers),
        plain("blocks/mlp/up", f"{GPT2_LAYER}mlp.c_fc.weight", layers),
        plain("blocks/mlp/up_bias", f"{GPT2_LAYER}mlp.c_fc.bias", layers),
        plain("blocks/mlp/down", f"{GPT2_LAYER}mlp.c_proj.weight", layers),
        plain("blocks/mlp/down_bias", f"{GPT2_LAYER}mlp.c_proj.bias", layers),
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


@config_of("gpt2", "GPT2LMHeadModel", gpt2)
def gpt2_config(model: Decoder) -> dict[str, Any]:
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


def gpt_oss(config: Config) -> Decoder:
    """The sizes of a gpt-oss's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(
        config,
        {
            "hidden_act": "silu",
            "attention_bias": True,
            "swiglu_limit": CLAMP_LIMIT,
            "swiglu_alpha": CLAMP_SLOPE,
        },
    )
    config = {**GPT_OSS, **config}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_parameters"] = YARN
    theta, scaling = rotary(config, 150_000.0)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    types = config.get("layer_types") or [FULL if n % 2 else SLIDING for n in range(layers)]
    window, every = windows(types, config.get("sliding_window"))
    return Decoder(
        layers=layers,
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        mlp=Mlp.swiglu_clamped,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        vocab=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_scale=1.0,
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        dispatch=Dispatch.dropless,
        expert_bias=True,
        router=Router(logit_bias=True),
        router_loss=config.get("router_aux_loss_coef", 0.001),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-5),
        window=window,
        global_every=every,
    )


def gpt_oss_conversion(config: Config) -> Conversion:
    """Rules of a gpt-oss's config.json; experts in MXFP4 are read and not written."""
    model = gpt_oss(config)
    layers = kinds_of_layers(model)["blocks"]
    router = f"{LAYER}mlp.router."
    rules = [
        *ends(model),
        *norms("blocks", layers),
        *attention(model, "blocks", layers),
        matrix(
            "blocks/mlp/router", f"{router}weight", (model.d_model, model.experts), stack=layers
        ),
        plain("blocks/mlp/router_bias", f"{router}bias", layers),
        *experts(layers, packed=_packed(config)),
    ]
    return Conversion(rules=rules, unused=tied(model))


def experts(layers: Layers, *, packed: bool) -> list[Rule]:
    """Rules for the experts of a layer, which the file keeps in one tensor of each kind; ``packed`` ones in MXFP4."""
    there = f"{LAYER}mlp.experts."

    def split(pieces: Pieces) -> Pieces:
        return [pieces[0][..., ::2], pieces[0][..., 1::2]]

    def joined(pieces: Pieces) -> Pieces:
        return [np.stack(list(pieces), axis=-1).reshape(*pieces[0].shape[:-1], -1)]

    biases = [
        Rule(
            ours=("blocks/mlp/gate_bias", "blocks/mlp/up_bias"),
            theirs=(f"{there}gate_up_proj_bias",),
            stack=layers,
            read=split,
            write=joined,
        ),
        plain("blocks/mlp/down_bias", f"{there}down_proj_bias", layers),
    ]
    into, out = ("blocks/mlp/gate", "blocks/mlp/up"), ("blocks/mlp/down",)
    if packed:
        return [
            *biases,
            _unpacking(into, f"{there}gate_up_proj", layers),
            _unpacking(out, f"{there}down_proj", layers),
        ]
    return [
        *biases,
        Rule(ours=into, theirs=(f"{there}gate_up_proj",), stack=layers, read=split, write=joined),
        plain(*out, f"{there}down_proj", layers),
    ]


def unpacked(blocks: Array, scales: Array) -> Array:
    """Matrices in MXFP4 as float32.

    Args:
        blocks: uint8[experts, outputs, blocks, 16]: two codes a byte, the lower half first.
        scales: uint8[experts, outputs, blocks]: exponents of two.

    Returns:
        [experts, inputs, outputs], 32 inputs a block.
    """
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    wide = np.ldexp(MXFP4[codes], (scales.astype(np.int32) - SCALE_BIAS)[..., None])
    return wide.reshape(*wide.shape[:2], -1).swapaxes(1, 2)


def _unpacking(ours: tuple[str, ...], theirs: str, layers: Layers) -> Rule:
    """Matrices of experts in MXFP4, the outputs of gate and up in turn where there are both."""
    count = len(ours)

    def read(pieces: Pieces) -> Pieces:
        whole = unpacked(*pieces)
        return [whole[..., place::count] for place in range(count)]

    def write(pieces: Pieces) -> Pieces:
        raise OptionError(
            "weights in MXFP4 are read and not written; leave quantization_config out of config.json, so that plain ones are written"
        )

    names = (f"{theirs}_blocks", f"{theirs}_scales")
    return Rule(ours=ours, theirs=names, stack=layers, read=read, write=write)


def _packed(config: Config) -> bool:
    """Whether the experts are in MXFP4."""
    quantization = config.get("quantization_config")
    if not quantization:
        return False
    if quantization.get("quant_method") != "mxfp4":
        raise OptionError(
            f"quantization_config says that the weights are in {quantization.get('quant_method')} and only mxfp4 is read; save the model in bfloat16 with transformers (dequantize=True) and import that"
        )
    return True


@config_of("gpt_oss", "GptOssForCausalLM", gpt_oss)
def gpt_oss_config(model: Decoder) -> dict[str, Any]:
    """A gpt-oss's config.json."""
    return {
        **shared_fields(model),
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "num_local_experts": model.experts,
        "router_aux_loss_coef": model.router_loss,
        "attention_bias": True,
        "swiglu_limit": CLAMP_LIMIT,
        "swiglu_alpha": CLAMP_SLOPE,
        "sliding_window": model.window or None,
        "layer_types": layer_types(model),
        **rotary_fields(model),
    }


FAMILIES = {
    "gpt2": Family(model=gpt2, conversion=gpt2_conversion, config=gpt2_config, canonical=whole),
    "gpt_oss": Family(model=gpt_oss, conversion=gpt_oss_conversion, config=gpt_oss_config),
}
