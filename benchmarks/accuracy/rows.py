"""Published results as jobs: each record's model, slice, batch, layout, rematerialisation and flags, by rule.

A record has the schema of ``published.json``: fields that a source states, null where it does not.
What a rule can't say becomes a :class:`Skipped` with its reason; what it says only nearly is a departure.
"""

import hashlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import encoders_and_vision
import known
import mixtures
import xla_flags
from fields import each

from systolic.chips import slice
from systolic.core.errors import SystolicError
from systolic.models.decoder.config import Decoder
from systolic.recipes.lm import lm

HERE = Path(__file__).parent
PUBLISHED = HERE / "published.json"
CORES_IN_NAME = ("v2", "v3", "v4", "v5p", "tpu7x")
GENERATIONS = (*CORES_IN_NAME, "v5e", "v6e")
AXES = {
    "data": "data",
    "replica": "data",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "tensor": "tensor",
    "model": "tensor",
    "context": "context",
    "expert": "expert",
    "pipeline": "pipeline",
}
"""Published axes that the layout has, by their published name."""
KINDS = {
    "vision_vit": "the record's student, teacher or patch sizes are no recipe here",
    "vision_detection": "no detection model here",
    "vision_3d": "no volumetric model here",
    "diffusion": "no diffusion model here",
    "diffusion_image": "no diffusion model here",
    "diffusion_video": "no diffusion model here",
}
"""Categories that no recipe covers, with the reason."""
BESIDE_LM = {"encoder_lm": ("mlm", "encoder"), "vision_cnn": ("image", "convolutional")}
"""Categories of the recipes ``mlm`` and ``image``, and their kind."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published result and what is run for it."""

    id: str
    generation: str
    slice: str
    family: str
    """See :func:`family`."""
    kind: str
    """``dense``, ``mixture``, ``encoder`` or ``convolutional``."""
    published_seconds: float
    recipe: str
    options: Mapping[str, Any]
    flags: Sequence[str] = ()
    departures: Sequence[str] = field(default=())
    """Where the program differs from theirs."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A record that no recipe can say."""

    id: str
    family: str
    reason: str


class _SkipError(Exception):
    pass


def half(text: str) -> str:
    """``fit`` or ``judge``: by the first digit of the SHA-256 of a text; causes are looked for in ``fit`` only.

    Of a whole step that text is its :func:`family`, so that no model of a trainer on a chip lies in both.
    """
    return "fit" if int(hashlib.sha256(text.encode()).hexdigest()[0], 16) % 2 == 0 else "judge"


def family(name: str, generation: str, model: str) -> str:
    """What shares its error: one trainer's runs of one model on one generation of chips."""
    words = name.split("-")
    trainer = "-".join(words[:2]) if words[0] == "wiki" else words[0]
    return f"{generation} {trainer} {model}"


def expressed(path: Path = PUBLISHED) -> list[Row | Skipped]:
    """Every record of a file, in its order."""
    return each(path, row_of)


def rows(path: Path = PUBLISHED) -> list[Row]:
    """Every published result that a recipe can express."""
    return [row for row in expressed(path) if isinstance(row, Row)]


def row_of(record: Mapping[str, Any]) -> Row | Skipped:
    """A record as a job, or why not."""
    try:
        return _row(record)
    except _SkipError as reason:
        return Skipped(id=record["id"], family=_family(record), reason=str(reason))


def _family(record: Mapping[str, Any]) -> str:
    return family(record["id"], _generation(record) or "", str(record.get("model")))


def _generation(record: Mapping[str, Any]) -> str | None:
    name = str(record["generation"]).lower()
    return next((g for g in GENERATIONS if name.startswith(g)), None)


def _row(record: Mapping[str, Any]) -> Row:
    category = record.get("category") or "dense_llm"
    if category not in ("dense_llm", "moe_llm", *BESIDE_LM):
        raise _SkipError(KINDS.get(category, f"no recipe for {category}"))
    if record.get("usable_for_validation") is False:
        raise _SkipError("the record says that it is not fit for validation")
    generation = _generation(record)
    if generation is None:
        raise _SkipError(f"generation {record['generation']!r} is not in the catalogue")
    for key in ("step_time_best_s", "seq_len", "num_chips"):
        if not record.get(key) and (key, category) != ("seq_len", "vision_cnn"):
            raise _SkipError(f"{key} is not stated")
    departures: list[str] = []
    on = _slice(generation, record)
    layout = _layout(record, generation, on, departures)
    if category in BESIDE_LM:
        return _encoder_or_vision(record, generation, on, layout, departures)
    model = _model(record, departures) | known.rounding_of(record)
    if (script := known.script_of(record)) is not None:
        departures += script.departures
        layout |= script.layout
    return Row(
        id=record["id"],
        generation=generation,
        slice=on,
        family=_family(record),
        kind="mixture" if model["experts"] > 1 else "dense",
        published_seconds=record["step_time_best_s"],
        recipe="lm",
        options={
            "model": model,
            "sequence": record["seq_len"],
            "batch": _batch(record, on),
            "layout": layout,
            "precision": _precision(record, departures),
            **_optimizer(record),
            **_stored(record, departures),
        },
        flags=script.flags if script is not None else xla_flags.of_record(record, departures),
        departures=tuple(departures),
    )


def _encoder_or_vision(
    record: Mapping[str, Any],
    generation: str,
    on: str,
    layout: dict[str, Any],
    departures: list[str],
) -> Row:
    """A record of the recipes ``mlm`` and ``image``."""
    recipe, kind = BESIDE_LM[record["category"]]
    batch, other = _batch(record, on), record.get("other_settings") or {}
    if recipe == "mlm":
        options = encoders_and_vision.encoder(record, departures)
        if not options["model"]["vocab"]:
            raise _SkipError("the vocabulary is not stated")
    else:
        options = encoders_and_vision.residual(record, batch, departures)
    if not record.get("remat") and not known.mesh_of(str(record.get("model")), generation):
        # A trainer that states no policy of a model that fits without one has none.
        layout = {**layout, "remat": "none"}
        departures[:] = [d for d in departures if not d.startswith("rematerialisation")]
    if other.get("use_bfloat16_all_reduce"):
        options["dtypes"] = {"gradients": "bf16"}
    return Row(
        id=record["id"],
        generation=generation,
        slice=on,
        family=_family(record),
        kind=kind,
        published_seconds=record["step_time_best_s"],
        recipe=recipe,
        options={
            **options,
            "batch": batch,
            "layout": layout,
            "precision": _precision(record, departures),
            **_optimizer(record),
        },
        departures=tuple(departures),
    )


def _batch(record: Mapping[str, Any], on: str) -> int:
    if record.get("global_batch"):
        return int(record["global_batch"])
    if record.get("per_device_batch"):
        return round(record["per_device_batch"] * slice(on).num_devices)
    raise _SkipError("the batch is not stated")


def _model(record: Mapping[str, Any], departures: list[str]) -> dict[str, Any]:
    arch = dict(known.sizes_of(record.get("model") or "") or {})
    stated = {k: v for k, v in (record.get("arch") or {}).items() if v is not None}
    arch |= stated
    if not arch.get("layers"):
        raise _SkipError(f"the sizes of {record.get('model')} are neither stated nor known by name")
    experts = arch.get("experts") or 1
    activation = str(arch.get("activation") or "silu gated")
    model = {
        "layers": arch["layers"],
        "d_model": arch["d_model"],
        "d_ff": (arch.get("moe_d_ff") if experts > 1 else None) or arch["d_ff"],
        "mlp": _mlp(activation),
        "heads": arch["heads"],
        "kv_heads": arch.get("kv_heads") or arch["heads"],
        "head_dim": arch.get("head_dim") or arch["d_model"] // arch["heads"],
        "vocab": _vocab(arch["vocab"], departures),
        "tie_embeddings": bool(arch.get("tied_embeddings")),
        "qk_norm": bool(arch.get("qk_norm")),
        "experts": experts,
        "experts_per_token": arch.get("top_k") or 2,
    }
    if experts > 1:
        model |= mixtures.dispatch(record, arch, departures) | _beside(record, arch, departures)
    if "parallel attention" in activation:
        departures.append("attention and MLP one after the other here, side by side there")
    return model | _attention(arch, departures)


def _beside(
    record: Mapping[str, Any], arch: Mapping[str, Any], departures: list[str]
) -> dict[str, Any]:
    """Shared experts, dense first layers and the router of a mixture."""
    found: dict[str, Any] = {}
    width, every = arch.get("moe_d_ff") or arch["d_ff"], arch.get("moe_layer_step") or 1
    if shared := arch.get("shared_experts"):
        # Without dense layers d_ff is the width of the part that all tokens share (Gemma 4, Llama 4 Scout).
        if not arch.get("first_dense_layers") and every == 1:
            if arch["d_ff"] % width:
                raise _SkipError("a shared expert of another width than several routed ones")
            shared = arch["d_ff"] // width
        found["shared_experts"] = int(shared)
    if dense := arch.get("first_dense_layers"):
        found |= {"dense_layers": int(dense), "dense_d_ff": arch["d_ff"]}
    if every > 1:
        found |= {"mixture_every": int(every), "dense_d_ff": arch["d_ff"]}
    if (router := known.router_of(str(record.get("model")))) is not None:
        found["router"] = dict(router)
    other = record.get("other_settings") or {}
    for setting, what in (
        ("use_random_routing", "tokens routed evenly by chance there, by the router here"),
        ("mu_dtype", "first moments in bf16 there, f32 here"),
    ):
        if other.get(setting):
            departures.append(what)
    return found


def _latent(text: str) -> dict[str, Any]:
    """Latent attention in words: ``MLA: q_lora_rank 1536, kv_lora_rank 512, qk_nope 128, ...``."""
    names = {"qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim"}
    sizes = {names.get(n, n): int(size) for n, size in re.findall(r"(\w+) (\d+)", text)}
    return {"latent": sizes}


def _attention(arch: Mapping[str, Any], departures: list[str]) -> dict[str, Any]:
    """Windows and caps, where this version's decoder has them."""
    ours = {one.name for one in fields(Decoder)}
    text = f"{arch.get('attention_pattern') or ''} {arch.get('attention_type') or ''}"
    if "MLA" in text:
        return _latent(str(arch["attention_type"]))
    window = arch.get("sliding_window") or _number(r"window (\d+)", text)
    found: dict[str, Any] = {}
    if window and "window" in ours:
        local = _number(r"(\d+) local", text)
        found |= {"window": int(window), "global_every": (local or 5) + 1}
    elif window:
        departures.append("windowed layers attend to all tokens here")
    if (cap := arch.get("logit_softcap")) and "logit_cap" in ours:
        found["logit_cap"] = float(cap)
    elif cap:
        departures.append("no cap on logits here")
    if wide := arch.get("global_head_dim"):
        departures.append(
            f"layers that see everything have heads of {wide} there and share keys and values, here all have the same heads"
        )
    if arch.get("post_norms"):
        departures.append("norms after attention and MLP there, before them only here")
    if "NoPE" in text:
        departures.append("every fourth layer without rotary embeddings there, all with here")
    return found


def _precision(record: Mapping[str, Any], departures: list[str]) -> str:
    rounded = str(record.get("quantization") or "")
    if not rounded:
        return "bf16"
    departures.append(f"{rounded}: here Qwix, scaled per channel, attention and logits in bf16")
    found = next((name for name in ("int8", "fp8") if rounded.startswith(name)), None)
    if found is None:
        raise _SkipError(f"precision {rounded!r} is not a precision here")
    return found


def _optimizer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Where it is not AdamW, or something that keeps as much."""
    rules = ("adafactor", "lion", "sgd", "muon", "lamb", "lars")
    text = str(record.get("optimizer") or "").lower()
    kind = next((name for name in rules if text.startswith(name)), None)
    return {} if kind is None else {"optimizer": {"kind": kind}}


def _stored(record: Mapping[str, Any], departures: list[str]) -> dict[str, Any]:
    """What weights, gradients and optimizer state are kept in, where it is not f32."""
    other = record.get("other_settings") or {}
    if other.get("grad_dtype") == "bfloat16" and not str(record.get("weight_dtype")).startswith(
        "bfloat16"
    ):
        return {"dtypes": {"gradients": "bf16"}}
    return narrow(record.get("weight_dtype"), departures)


def narrow(dtype: str | None, departures: list[str]) -> dict[str, Any]:
    """Options of weights, gradients and optimizer state in bf16, where this version's recipe has them."""
    if not str(dtype or "").startswith("bfloat16"):
        return {}
    if "dtypes" in inspect.signature(lm).parameters:
        return {"dtypes": dict.fromkeys(("parameters", "gradients", "moments"), "bf16")}
    departures.append("weights and optimizer state in bf16 there, f32 here")
    return {}


def _mlp(text: str) -> str:
    gated = "3 ma" in text or "gated" in text or "glu" in text
    if "relu" in text:
        return "relu"
    if "silu" in text or "swi" in text:
        return "swiglu"
    return "geglu" if gated else "gelu"


def _vocab(size: int, departures: list[str]) -> int:
    rounded = -(-size // 128) * 128
    if rounded != size:
        departures.append(f"vocabulary {size} rounded up to {rounded}")
    return rounded


def _slice(generation: str, record: Mapping[str, Any]) -> str:
    slices = record.get("num_slices") or 1
    chips = record["num_chips"] // slices
    shaped = re.match(r"(\d+x\d+(?:x\d+)?)", record.get("topology") or "")
    body = f"{generation}-{2 * chips if generation in CORES_IN_NAME else chips}"
    if shaped and math.prod(int(n) for n in shaped[1].split("x")) == chips:
        body = f"{generation}:{shaped[1]}"
    name = body if slices == 1 else f"{slices}x{body}"
    try:
        slice(name)
    except SystolicError as error:
        raise _SkipError(str(error)) from error
    return name


def _layout(
    record: Mapping[str, Any], generation: str, on: str, departures: list[str]
) -> dict[str, Any]:
    layout = _mesh(record, generation, on, departures)
    other = record.get("other_settings") or {}
    text = str(record.get("attention_kernel") or "")
    if block := other.get("sa_block_q") or _number(r"(?:bq|blocks) (\d+)", text):
        layout["attention_block"] = int(block)
    if other.get("sa_use_fused_bwd_kernel") or "fused backward" in text or "tokamax" in text:
        layout["attention_backward"] = "fused"  # tokamax's kernel has no other
    elif "splash" in text or text.startswith("flash"):
        layout["attention_backward"] = "split"  # what MaxText and torch_xla do unless told
    if strategy := re.search(r"strategy (ring|usp\w*)", text):
        raise _SkipError(f"context strategy {strategy[1]}: keys and values are gathered here")
    if "load balancing off" in text:
        layout["context_order"] = "natural"
    if text.startswith("dot_product"):
        departures.append("plain attention there, a kernel here")
    if (other.get("num_vocab_tiling") or 1) > 1:
        layout["loss_chunks"] = int(other["num_vocab_tiling"])
    elif "chunked" in str(other.get("ce") or ""):
        layout["loss_chunks"] = 8
        departures.append("a loss in chunks: here 8 of them")
    if other.get("scan_layers") is False:
        departures.append("layers are scanned here")
    if (record.get("grad_accum") or 1) > 1:
        layout["accumulate"] = int(record["grad_accum"])
    return layout | _remat(record.get("remat") or {}, departures)


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def _mesh(
    record: Mapping[str, Any], generation: str, on: str, departures: list[str]
) -> dict[str, Any]:
    parallel = record.get("parallelism") or {}
    ici, dcn = parallel.get("ici") or {}, parallel.get("dcn") or {}
    if not ici and not dcn:
        ici = known.mesh_of(str(record.get("model")), generation) or {}
        if not ici and slice(on).num_devices > 1:
            raise _SkipError("the mesh is not stated")
    layout: dict[str, Any] = {"fsdp": 1}
    for axis, size in ici.items():
        if size == 1:
            continue
        if axis not in AXES:
            raise _SkipError(f"mesh axis {axis!r} is not in the layout")
        if AXES[axis] != axis:
            departures.append(f"axis {axis} taken as {AXES[axis]}")
        if size is None or size < 0:
            layout[AXES[axis]] = -1
        else:
            layout[AXES[axis]] = layout.get(AXES[axis], 1) * size
    for axis, size in dcn.items():
        if axis not in ("data", "fsdp", "pipeline") and size != 1:
            raise _SkipError(f"axis {axis!r} across slices is not in the layout")
        layout[axis] = layout.get(axis, 1) * size
        layout["slices"] = axis
    devices, sizes = slice(on).num_devices, [n for n in layout.values() if isinstance(n, int)]
    ways = math.prod(sizes)
    if ways == 2 * devices and not layout.get("data", 1) % 2:
        layout["data"] //= 2
        ways = devices
        departures.append("a replica for each of a chip's two cores there, one for both here")
    if -1 not in sizes and ways != devices:
        raise _SkipError(f"the stated mesh has {ways} devices, {on} has {devices}")
    return layout


def _remat(policy: Mapping[str, Any], departures: list[str]) -> dict[str, Any]:
    text = str(policy.get("policy") or "")
    kept = _ours(policy.get("device") or (), departures)
    moved = _ours(policy.get("offload_to_host") or (), departures)
    if "attention outputs" in (policy.get("offload_to_host") or ()):
        # Without the sums of its softmax, which their later runs save as "lse", the kernel runs again.
        departures.append("attention's results go to the host there, and its kernel runs again")
        return {"remat": "full"}
    if moved:
        return {"remat": "offload", "remat_names": moved, "saved_names": kept}
    if kept and kept != ["layer_input"]:
        return {"remat": "save-names", "remat_names": kept}
    if kept or text.lower() == "custom":
        return {"remat": "full"}
    if (options := known.policy_of(text)) is not None:
        return dict(options)
    departures.append(f"rematerialisation {policy.get('policy')!r} taken as full")
    return {"remat": "full"}


def _ours(names: Sequence[str], departures: list[str]) -> list[str]:
    found: list[str] = []
    for one in names:
        if one not in known.ACTIVATIONS:
            departures.append(f"activation {one} is not named here")
        found += [n for n in known.ACTIVATIONS.get(one, ()) if n not in found]
    return found
