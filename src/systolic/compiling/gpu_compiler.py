"""XLA's GPU compiler on a machine without a GPU: where it is installed, how a slice is described to it, and what it is told.

The wheel of JAX's CUDA plugin holds the whole compiler; it needs no driver, no CUDA and no ptxas for a described GPU.
Kernels are not timed, so that the choice among them is the compiler's default.
"""

import importlib.metadata
import os
from typing import Any

from systolic.chips import Chip, Slice

PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""Packages with the compiler, each of the same version as jax."""
EXTRA = "gpu-forecast"
FLAGS = ("--xla_gpu_enable_triton_gemm=false",)
"""Flags of compiles for a described GPU, but for :data:`FEW_ROWS`. Triton's matmuls take their tiles from timing them on a GPU;
without one they get tiles of 16 x 8, which none would run. cuBLAS's take theirs from its own heuristics, at run time."""
FEW_ROWS = ("decode", "step")
"""Steps whose matmuls have few rows, but for a prompt's part in a server's, in which Triton reads weights that are multiplied by
the same rows one after another. Without it XLA joins them to one array first, in each step, unless a server on one GPU has them
joined (:func:`systolic.models.decoder.paged.joined`): 2.7 ms for 16 texts of a decoder of 1B parameters on H100, timed at 1.7."""
PREALLOCATED = 0.75
"""Share of a GPU's memory that XLA takes unless the environment says more (JAX's documentation)."""
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables for that share; jaxlib has deprecated the second, and refuses both."""
CUDNN_VERSION = 91000
"""Version that tracing for an absent GPU assumes: cuDNN 9.10, the first with all of JAX's kernels."""
_OF_BLOCK = 1024
"""Bytes of a multiprocessor's shared memory that no block may take."""


def compiler() -> str | None:
    """Package and version of the installed compiler, ``jax-cuda12-pjrt 0.10.2``; None without one that fits the installed jax."""
    version = importlib.metadata.version("jax")
    for name in PLUGINS:
        try:
            if importlib.metadata.version(name) == version:
                return f"{name} {version}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_described(chip: Chip) -> bool:
    """Whether the catalogue has what the compiler is told of a GPU."""
    facts = (chip.compute_capability, chip.num_sms, chip.l2_bytes, chip.driver_hbm_bytes)
    return None not in (*facts, chip.f32_lanes_per_sm, chip.shared_memory_bytes_per_sm)


def compiles(on: Slice) -> bool:
    """Whether an absent GPU of this slice is compiled for: its compiler is installed, and the catalogue describes the GPU."""
    return on.platform == "gpu" and is_described(on.chip) and compiler() is not None


def overlaps_unasked(chip: Chip) -> bool:
    """Whether XLA schedules collectives beside compute without a flag: from Hopper on, whose kernels it estimates."""
    return int((chip.compute_capability or "9").partition(".")[0]) >= 9


def flags_for(verb: str) -> tuple[str, ...]:
    """Flags of a compile for a described GPU, by the kind of step."""
    return () if verb in FEW_ROWS else FLAGS


def pool_bytes(chip: Chip) -> float:
    """Bytes of a GPU's memory that XLA's allocator takes at most; all of it where the environment names one without a pool."""
    memory = chip.driver_hbm_bytes or chip.hbm_bytes or 0
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform":
        return memory
    text = next(filter(None, map(os.environ.get, FRACTIONS)), "")
    try:
        return float(text or PREALLOCATED) * memory
    except ValueError:  # which XLA refuses
        return PREALLOCATED * memory


def advice(on: Slice) -> str:
    """Line that says how a GPU's forecast comes from its own compiler; empty where it can't."""
    if not is_described(on.chip):
        return ""
    return f"XLA's GPU compiler can compile it here, without a GPU: pip install 'systolic[{EXTRA}]'"


def described(on: Slice) -> list[Any]:
    """JAX's devices of a described GPU slice, host after host."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="cuda", **topology(on)).devices


def topology(on: Slice) -> dict[str, str]:
    """The GPU and the hosts of a slice, as JAX takes them for a described one."""
    per_host = on.num_devices // on.num_hosts
    return {
        "target_config": target_config(on.chip),
        "topology": f"1x{on.num_hosts}x{per_host}",
    }


def target_config(chip: Chip) -> str:
    """Text of the GpuTargetConfigProto of a GPU, from the catalogue.

    Limits without a name here are those of compute capability 8.0, 9.0 and 10.x, as every described GPU of the catalogue has.
    """
    assert chip.compute_capability is not None
    major, minor = chip.compute_capability.split(".")
    assert chip.shared_memory_bytes_per_sm is not None
    shared = chip.shared_memory_bytes_per_sm
    # Tensor cores of Hopper and later need the features that only their own architecture has (sm_90a, sm_100a).
    features = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - _OF_BLOCK} shared_memory_per_core: {shared}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {chip.num_sms} fpus_per_core: {chip.f32_lanes_per_sm} clock_rate_ghz: {(chip.clock_hz or 0.0) / 1e9:g}
  memory_bandwidth: {round(chip.hbm_bytes_per_second or 0)} device_memory_size: {chip.driver_hbm_bytes} l2_cache_size: {chip.l2_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  device_interconnect_info {{ active_links: {chip.num_nvlinks or 0} }}
  name: "{chip.device_kind}" device_vendor: "NVIDIA Corporation"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{chip.device_kind}"
"""


def take_cudnn_as_there(on: Slice) -> None:
    """Lets JAX trace and lower cuDNN's attention for an absent NVIDIA GPU, although it asks the local library and GPU.

    If a version of JAX asks in another way, the model falls back to plain attention with a note.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as attention
    except ImportError:
        return
    capability = tuple(map(int, (on.chip.compute_capability or "9.0").split(".")))
    answers = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: capability >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda other: capability == _numbers(other),
    }
    for name, answer in answers.items():
        if name in vars(attention):
            vars(attention)[name] = answer


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
