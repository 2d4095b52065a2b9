"""Facts that records refer to without stating them: sizes of models by name, meshes of trainers, names of activations.

Sizes are those of the models' published configurations (``config.json`` on Hugging Face, or MaxText's
``configs/models``); the rest names its source.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xla_flags

_GATED = "silu gated (3 matrices)"


def _sizes(layers: int, d: int, ff: int, heads: int, kv: int, vocab: int, **more: Any) -> dict:
    base = {"layers": layers, "d_model": d, "d_ff": ff, "heads": heads, "kv_heads": kv}
    rest = {"vocab": vocab, "head_dim": 128, "activation": _GATED, "tied_embeddings": False}
    return base | rest | more


_MAXTEXT = {"head_dim": 256, "activation": "relu (2 matrices)", "tied_embeddings": True}
MODELS: Mapping[str, Mapping[str, Any]] = {
    r"llama-?2-?7b": _sizes(32, 4096, 11008, 32, 32, 32000),
    r"llama-?2-?13b": _sizes(40, 5120, 13824, 40, 40, 32000),
    r"llama-?2-?70b": _sizes(80, 8192, 28672, 64, 8, 32000),
    r"llama-?3(\.1)?-?8b": _sizes(32, 4096, 14336, 32, 8, 128256),
    r"llama-?3(\.[13])?-?70b": _sizes(80, 8192, 28672, 64, 8, 128256),
    r"llama-?3(\.1)?-?405b": _sizes(126, 16384, 53248, 128, 8, 128256),
    r"llama-?3\.2-?1b": _sizes(16, 2048, 8192, 32, 8, 128256, head_dim=64, tied_embeddings=True),
    r"llama-?3\.2-?3b": _sizes(28, 3072, 8192, 24, 8, 128256, tied_embeddings=True),
    r"qwen-?3-?0\.6b": _sizes(28, 1024, 3072, 16, 8, 151936, tied_embeddings=True, qk_norm=True),
    r"qwen-?3-?1\.7b": _sizes(28, 2048, 6144, 16, 8, 151936, tied_embeddings=True, qk_norm=True),
    r"qwen-?3-?4b": _sizes(36, 2560, 9728, 32, 8, 151936, tied_embeddings=True, qk_norm=True),
    r"qwen-?3-?8b": _sizes(36, 4096, 12288, 32, 8, 151936, qk_norm=True),
    r"qwen-?3-?14b": _sizes(40, 5120, 17408, 40, 8, 151936, qk_norm=True),
    r"qwen-?3-?32b": _sizes(64, 5120, 25600, 64, 8, 151936, qk_norm=True),
    r"mistral-?7b": _sizes(32, 4096, 14336, 32, 8, 32000),
    r"mixtral-?8x7b": _sizes(32, 4096, 14336, 32, 8, 32000, experts=8, top_k=2),
    r"mixtral-?8x22b": _sizes(56, 6144, 16384, 48, 8, 32768, experts=8, top_k=2),
    r"gemma-?2b\b": _sizes(
        18, 2048, 16384, 8, 1, 256128, head_dim=256, activation="gelu gated", tied_embeddings=True
    ),
    r"gemma-?7b\b": _sizes(
        28, 3072, 24576, 16, 16, 256128, head_dim=256, activation="gelu gated", tied_embeddings=True
    ),
    r"gpt-?3[- ]175b": _sizes(
        96, 12288, 49152, 96, 96, 50304, activation="gelu (2 matrices)", tied_embeddings=True
    ),
    r"gemma-?4[- ]e?4b": _sizes(
        42, 2560, 10240, 8, 2, 262144, head_dim=256, activation="gelu gated", tied_embeddings=True
    ),
    # MaxText's own models by global_parameter_scale (its README of 2023 and 2024).
    r"maxtext (\w+-)?16b": _sizes(32, 5120, 32768, 32, 32, 32768, **_MAXTEXT),
    r"maxtext (\w+-)?32b": _sizes(32, 10240, 32768, 32, 32, 32768, **_MAXTEXT),
    r"maxtext (\w+-)?128b": _sizes(64, 10240, 65536, 64, 64, 32768, **_MAXTEXT),
    r"maxtext (\w+-)?256b": _sizes(64, 20480, 65536, 64, 64, 32768, **_MAXTEXT),
    r"fuji.*7b": _sizes(32, 4096, 11008, 32, 32, 32768, tied_embeddings=True),
}
"""Patterns of a model's name, lower case, to its sizes."""

NORMS: Mapping[str, Any] = {"qk_norm": True, "post_norms": True}
"""Of Gemma 3 and 4: norms on queries and keys, and after attention and MLP (MaxText, models/gemma3.py and gemma4.py)."""

MESHES: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("fuji", "v4"): {"data": -1, "fsdp": 16},
    ("fuji", "v5e"): {"data": -1, "fsdp": 16},
    ("fuji", "v5p"): {"data": -1, "fsdp": 8},
    ("maxtext 128b", "v5e"): {"fsdp": 16, "tensor": 16},
    ("200b parameter dense", "v4"): {"fsdp": 64, "tensor": 16},
    ("480b parameter dense", "v4"): {"fsdp": 256, "tensor": 8},
}
"""Meshes by model and chip: apple/axlearn, experiments/text/gpt/fuji.py, as it was when the times were put
there; MaxText's README of 2024 for its 128B on v5e-256; the meshes (data, model) that the records of MLPerf's
open division state, over both of which Lingvo splits weights."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the script of a published run sets, where its record does not."""

    flags: Sequence[str]
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Options of the layout."""
    rounded: str | None = None
    """``model.rounding.backward``."""
    departures: Sequence[str] = ()


SCRIPTS: Mapping[tuple[str, str], Script] = {
    (r"gpt-?3[- ]175b", "v5p"): Script(
        flags=xla_flags.GPT3_V5P,
        departures=(
            "xla_tpu_decompose_all_gather_einsum left out: today's compiler takes gathers of weights over fsdp apart with it",
            "one matmul for queries, keys and values there, three here",
        ),
    ),
    (r"gpt-?3[- ]175b", "v6e"): Script(
        flags=xla_flags.GPT3_V6E, layout={"attention_block": 1024}, rounded="heads"
    ),
}
"""Scripts of runs in int8 by model and chip: mlcommons/training_results_v4.0 and v4.1, Google/benchmarks/gpt3/implementations
(v5p-3072.sh; cloud-tpu-v5p/v5p-4096.sh; cloud-tpu-trillium/trillium-512.sh and maxtext_fork/MaxText/layers/gpt3.py, which
rounds the MLP and the attention's output in the forward pass only). All of a chip set the same flags, and so does MaxText's
configs/v5p/gpt3_175b, which AI-Hypercomputer/tpu-recipes runs."""

ROUTERS: Mapping[str, Mapping[str, Any]] = {
    r"deepseek-?v?3": {
        "score": "sigmoid",
        "groups": 8,
        "top_groups": 4,
        "bias": True,
        "scale": 2.5,
    },
    r"deepseek-?v?2": {"normalise": False},
    r"llama-?4": {"score": "sigmoid", "normalise": False},
}
"""Routers by model: config.json of deepseek-ai/DeepSeek-V3 and DeepSeek-V2-Lite, and of meta-llama/Llama-4-Scout-17B-16E."""

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "decoder_layer_input": ("layer_input",),
    "layer input": ("layer_input",),
    "decoder_input": ("layer_input",),
    "query_proj": ("query",),
    "q": ("query",),
    "key_proj": ("key",),
    "k": ("key",),
    "value_proj": ("value",),
    "v": ("value",),
    "qkv_proj": ("query", "key", "value"),
    "qkv": ("query", "key", "value"),
    "context": ("attention",),
    "attention outputs": (),
    "attention context + lse": ("attention",),
    "attention context": ("attention",),
    "out_proj": ("out",),
    "o_proj": ("out",),
    "mlpwi": ("mlp",),
    "mlpwi_0": ("mlp",),
    "mlpwi_1": ("mlp",),
    "mlpwo": ("down",),
}
"""Names of activations of MaxText and others, in the decoder's."""

DOTS = ("query", "key", "value", "attention", "out", "down")
POLICIES: Mapping[str, Mapping[str, Any]] = {
    r"offload_attn|offload attention": {"remat": "offload", "remat_names": ["attention"]},
    r"qkv_proj_offloaded": {"remat": "offload", "remat_names": ["query", "key", "value"]},
    r"save_qkv_ctx": {
        "remat": "save-names",
        "remat_names": ["query", "key", "value", "attention"],
    },
    r"save_qkv(_proj)?\b": {"remat": "save-names", "remat_names": ["query", "key", "value"]},
    r"save_dot_for_mlperf_200b": {
        "remat": "save-names",
        "remat_names": ["query", "key", "value", "attention", "out"],
    },
    r"save_out_proj": {"remat": "save-names", "remat_names": ["out"]},
    r"save_dot_except|save_dot_with_context": {"remat": "save-names", "remat_names": [*DOTS]},
    r"minimal_offloaded": {
        "remat": "offload",
        "remat_names": ["query", "key", "value", "out", "mlp", "down"],
    },
    r"offload.*(layer[ _]input|decoder_input)|(layer[ _]input|decoder_input).*offload": {
        "remat": "offload",
        "remat_names": ["layer_input"],
    },
    r"selective|minimal|dots": {"remat": "minimal"},
    r"full|nothing_saveable|checkpointing true|nn\.checkpoint|nnx\.remat": {"remat": "full"},
    r"^none\b|no remat": {"remat": "none"},
}
"""Patterns of a rematerialisation policy, lower case, to the layout's options; the first that fits."""


def sizes_of(name: str) -> Mapping[str, Any] | None:
    """Sizes of the model that a text names."""
    text = name.lower()
    found = next((sizes for pattern, sizes in MODELS.items() if re.search(pattern, text)), None)
    return {**(found or {}), **NORMS} if re.search(r"gemma-?[34]", text) else found


def router_of(name: str) -> Mapping[str, Any] | None:
    """Switches of the router of the model that a text names."""
    text = name.lower()
    return next((router for pattern, router in ROUTERS.items() if re.search(pattern, text)), None)


def name_of(text: str) -> str:
    """The part of a text that names a model, lower case; the text itself where none does."""
    lower = text.lower()
    found = (re.search(pattern, lower) for pattern in MODELS)
    return next((match[0] for match in found if match), lower)


def policy_of(text: str) -> Mapping[str, Any] | None:
    """Options of a layout for a policy in words."""
    lower = text.lower()
    return next(
        (dict(what) for pattern, what in POLICIES.items() if re.search(pattern, lower)), None
    )


def script_of(record: Mapping[str, Any]) -> Script | None:
    """What the script of a record sets; None for records that state their flags, and where no script is known."""
    if record.get("xla_flags") or not str(record.get("quantization") or "").startswith("int8"):
        return None
    name, chip = str(record.get("model")).lower(), str(record["generation"]).lower()
    return next(
        (s for (model, on), s in SCRIPTS.items() if re.search(model, name) and chip.startswith(on)),
        None,
    )


def rounding_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The model's options of how int8 and fp8 matmuls round, where a record or its script says more than the precision."""
    other, found = record.get("other_settings") or {}, dict[str, Any]()
    ranges = [
        str(other.get(f"{what}_quantization_calibration_method")) for what in ("weight", "act")
    ]
    fixed = re.fullmatch(r"fixed,-(\d+),(\d+)", ranges[0])
    if fixed and fixed[1] == fixed[2] and ranges[0] == ranges[1]:
        found["largest"] = float(fixed[1])
    if (script := script_of(record)) is not None and script.rounded:
        found["backward"] = script.rounded
    return {"rounding": found} if found else {}


def mesh_of(model: str, generation: str) -> Mapping[str, int] | None:
    """The mesh of a trainer's rule."""
    for (name, chip), mesh in MESHES.items():
        if name in model.lower() and chip == generation:
            return mesh
    return None
