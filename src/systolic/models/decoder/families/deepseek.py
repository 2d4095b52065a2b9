"""DeepSeek-V2 and V3."""

from typing import Any

from systolic.core.errors import OptionError
from systolic.job import Model
from systolic.models.decoder.config import Decoder, Dispatch
from systolic.models.decoder.families.fields import (
    LAYER,
    Layers,
    all_dim,
    dense,
    ends,
    follow,
    gated,
    kinds_of_layers,
    mixture,
    norms,
    refuse_quantized,
    required,
    rotary,
    rotary_fields,
    shared_fields,
    tied,
)
from systolic.models.decoder.options import Latent, Router, Score, Stretching
from systolic.models.families import Config, Family
from systolic.models.mapping import Array, Conversion, Pieces, Rule, matrix, plain

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is (transformers 5.23, DeepseekV3Attention)."""


LATENTS: Config = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Values of absent fields; V2's num_experts_per_tok, n_group and topk_group have none."""
THIRD: Config = {
    **LATENTS,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}


def second(config: Config) -> Decoder:
    """The sizes of a DeepSeek-V2's config.json.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"norm_topk_prob": False})
    config = {**LATENTS, **config}
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise OptionError(
            f"topk_method is {method!r} and only 'greedy' and 'group_limited_greedy' are known"
        )
    limited = method == "group_limited_greedy"
    router = Router(
        normalise=False,
        scale=config.get("routed_scaling_factor", 1.0),
        groups=required(config, "n_group") if limited else 1,
        top_groups=required(config, "topk_group") if limited else 1,
    )
    return _decoder(config, router)


def third(config: Config) -> Decoder:
    """The sizes of a DeepSeek-V3's config.json; its layers for more than one next token (MTP) are left out, as transformers does.

    Raises:
        OptionError: a field has a value that this decoder does not follow.
    """
    follow(config, {"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    config = {**THIRD, **config}
    router = Router(
        score=Score.sigmoid,
        normalise=config.get("norm_topk_prob", True),
        scale=config.get("routed_scaling_factor", 2.5),
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        bias=True,
    )
    return _decoder(config, router)


def _decoder(config: Config, router: Router) -> Decoder:
    plain_fields = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    follow(config, {**plain_fields, "moe_layer_freq": 1})
    theta, scaling = rotary(config)
    if scaling and scaling.kind is not Stretching.yarn and all_dim(config):
        raise OptionError(
            f"mscale_all_dim is {all_dim(config)} beside rope_type {scaling.kind.value} and is known with yarn only"
        )
    eps = config.get("rms_norm_eps", 1e-6)
    first = config.get("first_k_dense_replace", 0)
    return Decoder(
        layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        d_ff=config["moe_intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_attention_heads"],
        vocab=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        embedding_scale=1.0,
        experts=config["n_routed_experts"],
        experts_per_token=required(config, "num_experts_per_tok"),
        dispatch=Dispatch.dropless,
        shared_experts=config.get("n_shared_experts") or 0,
        dense_layers=first,
        dense_d_ff=config["intermediate_size"] if first else 0,
        router=router,
        latent=Latent(
            kv_lora_rank=config["kv_lora_rank"],
            q_lora_rank=config.get("q_lora_rank") or 0,
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
            norm_eps=0.0 if eps == LATENT_EPS else LATENT_EPS,
        ),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=eps,
    )


def halves(turned: Array) -> Array:
    """Dims [..., rope] that turn by neighbours, as ours do: by pairs half the width apart."""
    return turned.reshape(*turned.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(turned.shape)


def neighbours(turned: Array) -> Array:
    """The inverse of :func:`halves`."""
    return turned.reshape(*turned.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(turned.shape)


def latents(model: Decoder, path: str, layers: Layers, *, interleaved: bool) -> list[Rule]:
    """Rules for the latent attention of the blocks at ``path``; ``interleaved`` rotates neighbouring dims."""
    import numpy as np

    d, h, sizes = model.d_model, model.heads, model.latent
    q, r = sizes.q_lora_rank, sizes.kv_lora_rank
    there, ours = f"{LAYER}self_attn.", f"{path}/latent"

    def turned(ours: str, theirs: str, shape: tuple[int, ...], turning: int) -> Rule:
        """A matrix of ours whose last dims of the last axis, from ``turning`` on, are rotated."""

        def ordered(array: Array, order: Any) -> Array:
            parts = (array[..., :turning], order(array[..., turning:]))
            return np.concatenate(parts, axis=-1) if interleaved else array

        def read(pieces: Pieces) -> Pieces:
            return [ordered(pieces[0].T.reshape(shape), halves)]

        def write(pieces: Pieces) -> Pieces:
            return [ordered(pieces[0], neighbours).reshape(shape[0], -1).T]

        return Rule(ours=(ours,), theirs=(theirs,), stack=layers, read=read, write=write)

    def split(pieces: Pieces) -> Pieces:
        both = pieces[0].T.reshape(r, h, -1)
        return [both[..., : sizes.qk_nope_head_dim], both[..., sizes.qk_nope_head_dim :]]

    def joined(pieces: Pieces) -> Pieces:
        return [np.concatenate(list(pieces), axis=-1).reshape(r, -1).T]

    key_value = Rule(
        ours=(f"{ours}/key", f"{ours}/value"),
        theirs=(f"{there}kv_b_proj.weight",),
        stack=layers,
        read=split,
        write=joined,
    )
    query = "q_b_proj" if q else "q_proj"
    shape = (q or d, h, sizes.query_dim)
    down = (d, r + sizes.qk_rope_head_dim)
    rules = [
        turned(f"{ours}/query", f"{there}{query}.weight", shape, sizes.qk_nope_head_dim),
        turned(f"{ours}/down", f"{there}kv_a_proj_with_mqa.weight", down, r),
        plain(f"{ours}/norm/scale", f"{there}kv_a_layernorm.weight", layers),
        key_value,
        matrix(f"{path}/out", f"{there}o_proj.weight", (h, sizes.v_head_dim, d), 2, layers),
    ]
    if q:
        rules += [
            matrix(f"{ours}/query_down", f"{there}q_a_proj.weight", (d, q), stack=layers),
            plain(f"{ours}/query_norm/scale", f"{there}q_a_layernorm.weight", layers),
        ]
    return rules


def _conversion(config: Config, model: Decoder, *, interleaved: bool) -> Conversion:
    refuse_quantized(config)
    rules = ends(model)
    for path, layers in kinds_of_layers(model).items():
        rules += [*norms(path, layers), *latents(model, path, layers, interleaved=interleaved)]
        if path == "dense_blocks":
            rules += dense(model, layers)
            continue
        rules += mixture(model, layers, f"{LAYER}mlp.")
        if model.shared_experts:
            size = (model.d_model, model.shared_experts * model.d_ff)
            rules += gated(f"{path}/mlp/shared", f"{LAYER}mlp.shared_experts.", size, layers)
        if model.router.bias:
            name = f"{LAYER}mlp.gate.e_score_correction_bias"
            rules.append(plain(f"{path}/mlp/bias", name, layers))
    ahead = rf"model\.layers\.{model.layers}\..*"
    return Conversion(rules=rules, unused=(*tied(model), ahead))


def second_conversion(config: Config) -> Conversion:
    """Rules of a DeepSeek-V2's config.json."""
    return _conversion(config, second(config), interleaved=True)


def third_conversion(config: Config) -> Conversion:
    """Rules of a DeepSeek-V3's config.json, without its layers for more than one next token."""
    return _conversion(config, third(config), interleaved=config.get("rope_interleave", True))


def _config(model: Model) -> dict[str, Any]:
    assert isinstance(model, Decoder)
    sizes, router = model.latent, model.router
    return {
        **shared_fields(model),
        "intermediate_size": model.dense_width,
        "moe_intermediate_size": model.d_ff,
        "first_k_dense_replace": model.dense_layers,
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_experts,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "norm_topk_prob": router.normalise,
        "kv_lora_rank": sizes.kv_lora_rank,
        "q_lora_rank": sizes.q_lora_rank or None,
        "qk_nope_head_dim": sizes.qk_nope_head_dim,
        "qk_rope_head_dim": sizes.qk_rope_head_dim,
        "v_head_dim": sizes.v_head_dim,
        "attention_bias": False,
        **rotary_fields(model),
    }


def second_config(model: Model) -> dict[str, Any]:
    """A DeepSeek-V2's config.json."""
    assert isinstance(model, Decoder)
    limited = model.router.groups > 1
    return {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        **_config(model),
        "topk_method": "group_limited_greedy" if limited else "greedy",
    }


def third_config(model: Model) -> dict[str, Any]:
    """A DeepSeek-V3's config.json."""
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **_config(model),
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }


FAMILIES = {
    "deepseek_v2": Family(model=second, conversion=second_conversion, config=second_config),
    "deepseek_v3": Family(model=third, conversion=third_conversion, config=third_config),
}
