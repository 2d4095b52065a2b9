"""Metadata of a decoder in GGUF, and what llama.cpp computes otherwise than a decoder of ours."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from systolic.core.errors import OptionError
from systolic.formats.gguf.reader import ARCHITECTURES, LAYERS_27B, ORIGINAL, PUBLISHED
from systolic.models.decoder.config import Decoder, Mlp
from systolic.models.decoder.rotary import Stretching
from systolic.models.families import Config, family

Away = list[str]
"""Differences as text: ``model.window is 64, not 0``."""
LINEAR = (Stretching.none, Stretching.linear)
POSITIONS = "max_position_embeddings"
USUAL = 1024
"""Tokens at once of a model that does not say it."""


@dataclass(frozen=True, kw_only=True)
class GgufWriting:
    """How decoders are written as an architecture."""

    fields: Callable[[Decoder], dict[str, Any]]
    """Metadata beside the sizes, without the architecture's name before them."""
    away: Callable[[Decoder], Away]
    """What llama.cpp computes otherwise."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A decoder in the terms of llama.cpp."""

    architecture: str
    model: Decoder
    fields: dict[str, Any]
    """Metadata by name."""


def describe(config: Config, source: str) -> Described:
    """The architecture and the metadata of the model of a config.json.

    Args:
        config: Its fields.
        source: Its name in messages.

    Raises:
        OptionError: llama.cpp has no such architecture, or none that is read here, or computes something else.
    """
    kind = config["model_type"]
    if kind not in KINDS:
        raise OptionError(
            f"{source} is a {kind}, which is not written as GGUF; written are {', '.join(KINDS)}: give --to hf, and llama.cpp's own converter that folder"
        )
    model = family(config, source).model(config)
    assert isinstance(model, Decoder)
    name = KINDS[kind]
    if away := WRITTEN[name].away(model):
        raise OptionError(
            f"{source} is not what llama.cpp computes for {name}: {'; '.join(away)}; give --to hf or keep it as a Bundle"
        )
    context = _context(config, model)
    own = {**_sizes(model, context), **WRITTEN[name].fields(model)}
    return Described(
        architecture=name, model=model, fields={f"{name}.{key}": own[key] for key in own}
    )


def _context(config: Config, model: Decoder) -> int:
    said = config.get("text_config", config).get(POSITIONS)
    scaling = model.rope_scaling
    return said or int(scaling.factor * (scaling.original_positions if scaling else USUAL))


def _sizes(model: Decoder, context: int) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab,
        "context_length": context,
        "embedding_length": model.d_model,
        "block_count": model.layers,
        "feed_forward_length": model.d_ff,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": float(model.norm_eps),
        "rope.dimension_count": model.head_dim,
        "rope.freq_base": float(model.rope_theta),
    }


def _rope(model: Decoder) -> dict[str, Any]:
    """Stretched rotary embeddings; those of llama3 are a tensor."""
    scaling = model.rope_scaling
    if scaling.kind is Stretching.linear:
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind is Stretching.llama3:
        return {ORIGINAL: scaling.original_positions}
    return {}


def _gemma(model: Decoder) -> dict[str, Any]:
    made = _rope(model)
    if model.window:
        made["attention.sliding_window"] = model.window
        # Without layers of full attention the period is one that no layer ends.
        made["attention.sliding_window_pattern"] = model.global_every or model.layers + 1
    if model.logit_cap:
        made["final_logit_softcapping"] = float(model.logit_cap)
    return made


def _gemma2(model: Decoder) -> dict[str, Any]:
    return {**_gemma(model), "attn_logit_softcapping": float(model.attention_cap)}


def _gemma3(model: Decoder) -> dict[str, Any]:
    local = model.local_rope_theta or model.rope_theta
    return {**_gemma(model), "rope.freq_base_swa": float(local)}


def _holding(*facts: tuple[bool, str]) -> Away:
    """The texts of the facts that hold."""
    return [text for holds, text in facts if holds]


def _shared_away(model: Decoder, mlp: Mlp, kinds: tuple[Stretching, ...]) -> Away:
    scaling = model.rope_scaling.kind
    known = " or ".join(kind.value for kind in kinds)
    return _holding(
        (model.mlp is not mlp, f"model.mlp is {model.mlp.value}, not {mlp.value}"),
        (scaling not in kinds, f"model.rope-scaling.kind is {scaling.value}, not {known}"),
    )


def _plain_away(model: Decoder, *more: Stretching) -> Away:
    window = f"model.window is {model.window}, and it has full attention alone"
    return [
        *_shared_away(model, Mlp.swiglu, (*LINEAR, *more)),
        *_holding((model.window > 0, window)),
    ]


def _llama_away(model: Decoder) -> Away:
    scaling = model.rope_scaling
    own = {name: vars(scaling)[name] for name in PUBLISHED}
    told = ", ".join(f"{name} {value:g}" for name, value in own.items())
    known = ", ".join(f"{name} {value:g}" for name, value in PUBLISHED.items())
    return [
        *_plain_away(model, Stretching.llama3),
        *_holding((own != PUBLISHED, f"model.rope-scaling has {told}, not {known}")),
    ]


def _qwen2_away(model: Decoder) -> Away:
    width = model.heads * model.head_dim
    told = f"model.heads times model.head-dim is {width}, not model.d-model {model.d_model}"
    return [*_plain_away(model), *_holding((width != model.d_model, told))]


def _gemma_away(name: str, model: Decoder) -> Away:
    largest = model.layers == LAYERS_27B[name]
    scalar = model.d_model // model.heads if largest else model.head_dim
    own = model.query_pre_attn_scalar or model.head_dim
    return [
        *_shared_away(model, Mlp.geglu, LINEAR),
        *_holding(
            (own != scalar, f"model.query-pre-attn-scalar is {own:g}, not {scalar}"),
            (model.qkv_bias, "model.qkv-bias is on, not off"),
            (model.out_bias, "model.out-bias is on, not off"),
        ),
    ]


def _gemma2_away(model: Decoder) -> Away:
    return [
        *_gemma_away("gemma2", model),
        *_holding(
            (not model.logit_cap, "model.logit-cap is 0, and it always has one"),
            (not model.attention_cap, "model.attention-cap is 0, and it always has one"),
            (not model.tie_embeddings, "model.tie-embeddings is off, not on"),
            (not model.window, "model.window is 0, and it always has one"),
        ),
    ]


WRITTEN = {
    "llama": GgufWriting(fields=_rope, away=_llama_away),
    "qwen2": GgufWriting(fields=_rope, away=_qwen2_away),
    "qwen3": GgufWriting(fields=_rope, away=_plain_away),
    "gemma2": GgufWriting(fields=_gemma2, away=_gemma2_away),
    "gemma3": GgufWriting(fields=_gemma3, away=partial(_gemma_away, "gemma3")),
}
"""Architectures of :data:`ARCHITECTURES` to how they are written."""
assert set(WRITTEN) == set(ARCHITECTURES)
KINDS = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
"""``model_type`` of a config.json to the architecture that it is written as."""
