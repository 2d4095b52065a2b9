"""gpt-oss."""

from typing import Any

import numpy as np

from systolic.core.errors import OptionError
from systolic.models.decoder.config import Decoder, Dispatch, Mlp
from systolic.models.decoder.families.fields import (
    FULL,
    LAYER,
    SLIDING,
    Layers,
    attention,
    config_of,
    ends,
    follow,
    kinds_of_layers,
    layer_types,
    norms,
    rotary,
    rotary_fields,
    shared_fields,
    tied,
    windows,
)
from systolic.models.decoder.options import CLAMP_LIMIT, CLAMP_SLOPE, Router
from systolic.models.families import Config, Family
from systolic.models.mapping import Array, Conversion, Pieces, Rule, matrix, plain

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
DEFAULTS: Config = {
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


def decoder(config: Config) -> Decoder:
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
    config = {**DEFAULTS, **config}
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


def conversion(config: Config) -> Conversion:
    """Rules of a gpt-oss's config.json; experts in MXFP4 are read and not written."""
    model = decoder(config)
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


@config_of("gpt_oss", "GptOssForCausalLM", decoder)
def config(model: Decoder) -> dict[str, Any]:
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


FAMILIES = {"gpt_oss": Family(model=decoder, conversion=conversion, config=config)}
