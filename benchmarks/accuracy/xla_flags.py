"""Compiler flags as records state them: spelt out, by the names of groups, or in words."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VMEM = "--xla_tpu_scoped_vmem_limit_kib"
WINDOWED = "--xla_jf_spmd_threshold_for_windowed_einsum_mib"
NO_WINDOWS = f"{WINDOWED}=1000000"
_SHARDING = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
)
# The groups that MaxText's recipes name (benchmarks/xla_flags_library.py and _v2 there). Flags that
# choose another chip configuration are left out: the topology decides it here.
GROUPS: Mapping[str, Sequence[str]] = {
    "DENSE_VMEM_LIMIT_FLAG": (f"{VMEM}=98304",),
    "MOE_VMEM_LIMIT_FLAG": (f"{VMEM}=81920",),
    "LAYOUT_FOR_ALL_REDUCE_SCATTER": (
        *_SHARDING,
        "--xla_tpu_assign_all_reduce_scatter_layout=true",
    ),
    "REDUCE_SCATTER_FUSION": _SHARDING,
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
    "DISABLE_COLLECTIVE_MATMUL": (NO_WINDOWS,),
}
RECIPE = (
    "DENSE_VMEM_LIMIT_FLAG",
    "LAYOUT_FOR_ALL_REDUCE_SCATTER",
    "DATA_PARALLEL_OVERLAP",
    "CF_FOR_ALL_GATHER",
    "HOST_OFFLOAD_FLAGS",
    "DISABLE_COLLECTIVE_MATMUL",
)
"""What MaxText's recipes of Llama 3.1 8B and Qwen3 8B on v6e name, without SparseCores."""
README = "DENSE_VMEM_LIMIT_FLAG CF_FOR_ALL_GATHER ENABLE_SPARSECORE_OFFLOADING_FOR_ALL_REDUCE"
"""The flags of torchprime's README, as groups."""
MAXTEXT_128B_V5E = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
    NO_WINDOWS,
)
"""MaxText/configs/v5e/128b.sh, without windowed einsums: on more than 16 chips of v5e today's compiler can't begin their permutes
asynchronously (limited ICI routing), so that each partial matmul waits for its window."""
WITHOUT_WINDOWS = (
    "windowed einsums turned off: today's compiler runs their permutes synchronously on v5e"
)
"""Departure of the runs with :data:`MAXTEXT_128B_V5E`."""
TORCHPRIME_405B = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_decompose_all_gather_einsum=true",
    "--xla_tpu_decompose_einsum_reduce_scatter=true",
    "--xla_tpu_scoped_vmem_limit_kib=98304",
    "--xla_tpu_spmd_rng_bit_generator_unsafe=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_tpu_use_enhanced_launch_barrier=true",
)
"""Of torchprime's README of February 2025 for 405B on two slices, with a global batch of 128."""
IMAGE = "DENSE_VMEM_LIMIT_FLAG CF_FOR_ALL_GATHER"
"""LIBTPU_INIT_ARGS of torchprime's image (torchprime/launcher/Dockerfile), in which its runs and those of its CI start."""

GPT3_V5P = (
    "--xla_tpu_enable_experimental_fusion_cost_model=false",
    "--xla_tpu_dot_dot_fusion_duplicated=false",
    "--xla_tpu_dot_dot_fusion=false",
    "--xla_jf_conv_input_fusion=true",
    "--xla_jf_conv_output_fusion=false",
    "--xla_tpu_rwb_fusion=false",
    "--xla_tpu_copy_fusion_pad_unpad_ratio=300",
    "--xla_tpu_enable_aggressive_loop_fusion_layout_opt=false",
    "--xla_tpu_enable_copy_fusion=false",
    "--xla_tpu_reduce_loop_fusion_dup_with_unfusable_user=false",
    "--xla_tpu_scavenge_vmem_for_fusions=false",
    "--xla_tpu_vector_load_fusion_window=256",
    "--xla_tpu_vector_store_fusion_window=64",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_spmd_rng_bit_generator_unsafe=true",
    "--xla_tpu_enable_megacore_fusion=true",
    "--xla_enable_async_all_gather=true",
    "--xla_enable_async_collective_permute=true",
    "--xla_always_enable_all_gather_2d_asymmetric=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_tpu_dcn_max_overlap_estimation=32",
)
"""LIBTPU_INIT_ARGS of MLPerf's GPT-3 175B on v5p without ``xla_tpu_decompose_all_gather_einsum``, which their libtpu may have
kept to the tensor axis: today's makes 64 partial sums of a matmul whose weights are split over fsdp."""
GPT3_V6E = (
    "--xla_tpu_use_megascale_host_reduction=false",
    "--xla_tpu_spmd_rng_bit_generator_unsafe=true",
    "--xla_tpu_scoped_vmem_limit_kib=98304",
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_use_bundle_aware_cost_model_for_fusions=false",
)
"""LIBTPU_INIT_ARGS of MLPerf's GPT-3 175B on v6e (Trillium)."""

_COLLECTIVES = {
    "all_gather": r"all[- ]gather|\bAG\b",
    "reduce_scatter": r"reduce[- ]scatter|\bRS\b",
    "all_reduce": r"all[- ]reduce(?![- ]scatter)|\bAR\b",
}
_OFF = r"\b(?:off|disabled?|without|no)\b"


def recipe() -> tuple[str, ...]:
    """The flags of :data:`RECIPE`."""
    return tuple(flag for name in RECIPE for flag in GROUPS[name])


def of_record(record: Mapping[str, Any], unknown: list[str]) -> list[str]:
    """The flags that a record states; those of its trainer's image where it states none."""
    text = record.get("xla_flags") or ""
    early = "early version" in str((record.get("source") or {}).get("path"))
    if early and "405b" in record["id"]:
        return list(TORCHPRIME_405B)
    if not text and "MaxText 128B" in str(record.get("model")) and record["generation"] == "v5e":
        unknown.append(WITHOUT_WINDOWS)
        return list(MAXTEXT_128B_V5E)
    if not text and str(record["id"]).startswith("torchprime"):
        text = IMAGE
    return stated(text, unknown)


def stated(text: str, unknown: list[str]) -> list[str]:
    """The flags that a record's text gives, in its order; what is not understood is added to ``unknown``."""
    spelt = [part.rstrip(",;") for part in text.split() if part.startswith("--xla")]
    if spelt:
        return [one for one in spelt if "megascale" not in one and "chip_config" not in one]
    if "README" in text:
        unknown.append("flags that a README lists taken as three groups")
        text = README
    flags: list[str] = []
    for name in re.findall(r"[A-Z][A-Z_]{8,}", text.replace("CUSTOM_VMEM_LIMIT_FLAG", "")):
        if name in GROUPS:
            flags += GROUPS[name]
        else:
            unknown.append(f"flags {name} are not known")
    for part in re.split(r";", re.sub(r"\([^()]*\)", _kept, text)):
        flags += phrase(part)
    return flags


def _kept(match: re.Match[str]) -> str:
    """Of a remark in brackets only a limit: ``(vmem_limit=122880)``."""
    return f"; {match[0][1:-1]}" if "limit=" in match[0] else ""


def phrase(text: str) -> list[str]:
    """Flags of one phrase in words; empty where it names none that is known here."""
    flags: list[str] = []
    for name, value in re.findall(r"\b([a-z][a-z0-9_]{7,}) ?= ?(true|false|[A-Z]+|\d+)\b", text):
        if (flag := spelt_out(name)) is not None:
            flags.append(f"--{flag}={value}")
    if found := re.search(r"(?:v|V)(?:mem|MEM)\D{0,20}?(\d{4,6})", text):
        flags.append(f"{VMEM}={found[1]}")
    off = re.search(_OFF, text, re.I) is not None
    word = "false" if off else "true"
    if re.search(r"windowed einsum|collective[ -]matmul", text, re.I):
        limit = re.search(r"threshold (\d+)", text)
        flags.append(NO_WINDOWS if off else f"{WINDOWED}={limit[1] if limit else 4}")
    if found := re.search(r"(?:shared memory limit|shmem)\D{0,3}(\d+)", text):
        flags.append(f"--xla_tpu_scheduler_percent_shared_memory_limit={found[1]}")
    if re.search(r"memory[- ]pressure", text):
        flags.append(f"--xla_tpu_enable_scheduler_memory_pressure_tracking={word}")
    if re.search(r"all experimental scheduler features", text):
        flags.append(f"--xla_tpu_enable_all_experimental_scheduler_features={word}")
    if re.search(r"selective resources", text):
        flags.append(f"--xla_latency_hiding_scheduler_enable_selective_resources={word}")
    if re.search(r"pipelined[_ ]loop[_ ]unrolling", text):
        flags.append(f"--xla_tpu_enable_pipelined_loop_unrolling={word}")
    if re.search(r"aggregator", text):
        flags.append(f"--xla_tpu_enable_sparse_core_collective_aggregator={word}")
    if re.search(r"bundle[- ]aware", text):
        flags.append(f"--xla_tpu_use_bundle_aware_cost_model_for_fusions={word}")
    return flags + _of_collectives(text, word)


def _of_collectives(text: str, word: str) -> list[str]:
    """Of phrases about kinds of collectives: where they run, how they are fused, how they are weighed."""
    named = [name for name, pattern in _COLLECTIVES.items() if re.search(pattern, text, re.I)]
    flags: list[str] = []
    if re.search(r"offload tracing", text, re.I):
        return [f"--xla_tpu_enable_{name}_offload_tracing={word}" for name in named or _COLLECTIVES]
    for name, pattern in _COLLECTIVES.items():
        if found := re.search(
            rf"(?:{pattern})s?[- ](?:SparseCore )?(?:latency )?mult\w* (\d+)", text, re.I
        ):
            flags.append(f"--xla_tpu_sparse_core_{name}_latency_multiplier={found[1]}")
        if found := re.search(rf"concurrent (?:async )?(?:{pattern})s? ?=? ?(\d+)", text, re.I):
            flags.append(f"--xla_max_concurrent_async_{name}s={found[1]}")
    if flags:
        return flags
    if re.search(r"SparseCore", text, re.I) and re.search(r"offload|\bRS\b|\bAR\b|\bAG\b", text):
        flags += offloaded(named or list(_COLLECTIVES), word, only="only" in text)
    elif re.search(r"async(?:hronous)? collective fusion|\bACF\b", text, re.I):
        base = "--xla_tpu_enable_async_collective_fusion"
        if not named:
            flags.append(f"{base}={word}")
        flags += [f"{base}_fuse_{name}={word}" for name in named]
    return flags


def offloaded(named: Sequence[str], word: str = "true", only: bool = False) -> list[str]:
    """Flags that run these kinds of collectives on the SparseCores; with ``only`` the other kinds on the TensorCore."""
    flags = []
    for name in _COLLECTIVES:
        if name not in named and not only:
            continue
        value = word if name in named else "false"
        fused = "false" if value == "true" else "true"
        flags += [
            f"--xla_tpu_enable_sparse_core_collective_offload_{name}={value}",
            f"--xla_tpu_enable_{name}_offload_tracing={value}",
        ]
        if name == "all_gather" or value == "true":
            flags.append(f"--xla_tpu_enable_async_collective_fusion_fuse_{name}={fused}")
    return flags


@cache
def spelt_out(name: str) -> str | None:
    """The flag of the installed libtpu that a name with or without its usual prefixes stands for; None without one."""
    prefixes = ("", "xla_tpu_", "xla_tpu_enable_", "xla_", "xla_sc_", "xla_lhs_")
    return next((p + name for p in prefixes if p + name in _names()), None)


@cache
def _names() -> frozenset[str]:
    spec = find_spec("libtpu")
    if spec is None or spec.origin is None:
        return frozenset()
    library = (Path(spec.origin).parent / "libtpu.so").read_bytes()
    found = re.findall(rb"\0(xla_[a-z0-9_]{4,120})(?=\0)", library)
    return frozenset(one.decode() for one in found)
