"""Published results as jobs: each row's model, batch, layout, rematerialisation and flags, as far as a recipe can say them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

VMEM_DENSE = "--xla_tpu_scoped_vmem_limit_kib=98304"
VMEM_MOE = "--xla_tpu_scoped_vmem_limit_kib=81920"
# The groups that MaxText's recipes name (benchmarks/xla_flags_library.py and _v2 there). Flags that
# choose another chip configuration are left out: the topology decides it here.
FLAG_GROUPS: Mapping[str, Sequence[str]] = {
    "DENSE_VMEM_LIMIT_FLAG": (VMEM_DENSE,),
    "MOE_VMEM_LIMIT_FLAG": (VMEM_MOE,),
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": (
        "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
        "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
        "--xla_tpu_assign_all_reduce_scatter_layout=true",
    ),
    "REDUCE_SCATTER_FUSION": (
        "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
        "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    ),
    "DATA_PARALLEL_OVERLAP": (
        "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
        "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    ),
    "CF_FOR_ALL_GATHER": (
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
    ),
    "ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE": (
        "--xla_sc_disable_megacore_partitioning=true",
        "--xla_tpu_enable_all_reduce_offload_tracing=true",
        "--xla_tpu_use_tc_device_shape_on_sc=true",
        "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true",
        "--xla_sc_enable_instruction_fusion=false",
        "--xla_sc_disjoint_spmem=false",
    ),
    "HOST_OFFLOAD_FLAGS": (
        "--xla_tpu_enable_all_experimental_scheduler_features=true",
        "--xla_tpu_enable_scheduler_memory_pressure_tracking=true",
        "--xla_tpu_host_transfer_overlap_limit=24",
        "--xla_tpu_aggressive_opt_barrier_removal=ENABLED",
        "--xla_lhs_prioritize_async_depth_over_stall=ENABLED",
        "--xla_tpu_enable_ag_backward_pipelining=true",
        "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED",
        "--xla_should_add_loop_invariant_op_in_chain=ENABLED",
        "--xla_max_concurrent_host_send_recv=100",
        "--xla_tpu_scheduler_percent_shared_memory_limit=100",
        "--xla_latency_hiding_scheduler_rerun=2",
    ),
    "DISABLE_BUNDLE_AWARE_COST_MODEL": ("--xla_tpu_use_bundle_aware_cost_model_for_fusions=false",),
    "DISABLE_COLLECTIVE_MATMUL": ("--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",),
}
# MaxText's names of activations, in the decoder's.
NAMES = {
    "decoder_layer_input": ("layer_input",),
    "query_proj": ("query",),
    "key_proj": ("key",),
    "value_proj": ("value",),
    "qkv_proj": ("query", "key", "value"),
    "context": ("attention",),
    "out_proj": ("out",),
    "mlpwi": ("mlp",),
    "mlpwi_0": ("mlp",),
    "mlpwi_1": ("mlp",),
    "mlpwo": ("down",),
}
GENERATIONS = {
    "v2": "v2",
    "v3": "v3",
    "v4": "v4",
    "v5e": "v5e",
    "v5p": "v5p",
    "v6e": "v6e",
    "tpu7x": "tpu7x",
}
CORES_IN_NAME = ("v2", "v3", "v4", "v5p", "tpu7x")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published result and what is run for it."""

    id: str
    generation: str
    slice: str
    kind: str
    """``dense``, ``mixture``, ``vision``."""
    published_seconds: float
    recipe: str
    options: Mapping[str, Any]
    flags: Sequence[str] = ()
    departures: Sequence[str] = field(default=())
    """Where the program differs from theirs."""


def rows() -> list[Row]:
    """Every published result that a recipe can express."""
    records = json.loads((HERE / "published.json").read_text())
    return [row for record in records if (row := row_of(record)) is not None]


def row_of(record: Mapping[str, Any]) -> Row | None:
    """None when no recipe says what it ran."""
    generation = next((g for g in GENERATIONS if record["generation"].lower().startswith(g)), None)
    if generation is None or record["category"] not in ("dense_llm", "moe_llm"):
        return None
    arch = record["arch"]
    if arch.get("attention_type") or arch.get("shared_experts") or not arch.get("head_dim"):
        return None
    if not record["global_batch"]:
        return None
    departures: list[str] = []
    rounded = str(record["quantization"] or "")
    precision = (
        "int8" if rounded.startswith("int8") else "fp8" if rounded.startswith("fp8") else "bf16"
    )
    if rounded:
        departures.append(f"{rounded}: here Qwix, scaled per channel, attention and logits in bf16")
    layout = _layout(record, departures)
    if layout is None:
        return None
    experts = arch.get("experts") or 1
    model = {
        "layers": arch["layers"],
        "d_model": arch["d_model"],
        "d_ff": arch["d_ff"],
        "mlp": _mlp(arch["activation"]),
        "heads": arch["heads"],
        "kv_heads": arch["kv_heads"],
        "head_dim": arch["head_dim"],
        "vocab": _vocab(arch["vocab"], departures),
        "tie_embeddings": bool(arch["tied_embeddings"]),
        "experts": experts,
        "experts_per_token": arch.get("top_k") or 2,
    }
    return Row(
        id=record["id"],
        generation=generation,
        slice=_slice(generation, record),
        kind="mixture" if experts > 1 else "dense",
        published_seconds=record["step_time_best_s"],
        recipe="lm",
        options={
            "model": model,
            "sequence": record["seq_len"],
            "batch": record["global_batch"],
            "layout": layout,
            "precision": precision,
            **_optimizer(record),
        },
        flags=_flags(record, departures),
        departures=tuple(departures),
    )


def _optimizer(record: Mapping[str, Any]) -> dict[str, Any]:
    """Where it is not AdamW, or something that keeps as much."""
    known = ("adafactor", "lion", "sgd")
    text = str(record["optimizer"] or "").lower()
    kind = next((name for name in known if text.startswith(name)), None)
    return {} if kind is None else {"optimizer": {"kind": kind}}


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
    slices = record["num_slices"] or 1
    chips = record["num_chips"] // slices
    topology = record["topology"] or ""
    shaped = re.match(r"(\d+x\d+(?:x\d+)?)", topology)
    number = 2 * chips if generation in CORES_IN_NAME else chips
    body = f"{generation}-{number}"
    if shaped:
        dims = [int(n) for n in shaped[1].split("x")]
        size = 1
        for dim in dims:
            size *= dim
        if size == chips:
            body = f"{generation}:{shaped[1]}"
    return body if slices == 1 else f"{slices}x{body}"


def _layout(record: Mapping[str, Any], departures: list[str]) -> dict[str, Any] | None:
    parallel = record["parallelism"] or {}
    ici, dcn = parallel.get("ici") or {}, parallel.get("dcn") or {}
    known = {"data", "fsdp", "tensor", "context", "expert", "pipeline", "fsdp_transpose"}
    if not ici or set(ici) - known or set(dcn) - {"data", "fsdp"}:
        return None
    layout: dict[str, Any] = {"fsdp": 1}
    for axis, size in ici.items():
        name = "fsdp" if axis == "fsdp_transpose" else axis
        if name != axis:
            departures.append("fsdp_transpose taken as fsdp")
        layout[name] = layout.get(name, 1) * size
    for axis, size in dcn.items():
        layout[axis] = layout.get(axis, 1) * size
        layout["slices"] = axis
    other = record["other_settings"] or {}
    if other.get("sa_block_q"):
        layout["attention_block"] = int(other["sa_block_q"])
    if (other.get("num_vocab_tiling") or 1) > 1:
        layout["loss_tiles"] = int(other["num_vocab_tiling"])
    policy = record["remat"] or {}
    text = str(policy.get("policy") or "full").lower()
    if text == "custom":
        _custom(policy, layout, departures)
    elif "offload" in text and "layer input" in text:
        layout |= {"remat": "offload", "remat_names": ["layer_input"]}
    elif text.startswith("full") or "full" in text or "checkpointing true" in text:
        layout["remat"] = "full"
    elif text.startswith("save_dot_except_mlpwi"):
        layout |= {
            "remat": "save-names",
            "remat_names": ["query", "key", "value", "attention", "out", "down"],
        }
    elif text == "minimal":
        layout["remat"] = "minimal"
    else:
        layout["remat"] = "full"
        departures.append(f"rematerialisation {policy.get('policy')!r} taken as full")
    return layout


def _custom(policy: Mapping[str, Any], layout: dict[str, Any], departures: list[str]) -> None:
    def ours(names: Sequence[str]) -> list[str]:
        found: list[str] = []
        for one in names:
            if one not in NAMES:
                departures.append(f"activation {one} is not named here")
            found += [n for n in NAMES.get(one, ()) if n not in found]
        return found

    kept, moved = ours(policy.get("device") or ()), ours(policy.get("offload_to_host") or ())
    if moved:
        layout |= {"remat": "offload", "remat_names": moved, "saved_names": kept}
    elif kept:
        layout |= {"remat": "save-names", "remat_names": kept}
    else:
        layout["remat"] = "full"


def _flags(record: Mapping[str, Any], departures: list[str]) -> list[str]:
    text = record["xla_flags"] or ""
    flags = [part for part in text.split() if part.startswith("--xla")]
    if limit := re.search(r"vmem_limit=(\d+)", text):
        flags.append(f"--xla_tpu_scoped_vmem_limit_kib={limit[1]}")
    named = text.replace("CUSTOM_VMEM_LIMIT_FLAG", "") if "--xla" not in text else ""
    if "as listed in the README" in text:  # torchprime: the same three groups, in words
        named = (
            "DENSE_VMEM_LIMIT_FLAG CF_FOR_ALL_GATHER ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE"
        )
    for group in re.findall(r"[A-Z][A-Z_]{8,}", named):
        if group in FLAG_GROUPS:
            flags += FLAG_GROUPS[group]
        else:
            departures.append(f"flags {group} are not known")
    return [flag for flag in flags if "megascale" not in flag and "chip_config" not in flag]
