"""Devices of this machine, with its CPU as a stand-in for absent GPUs.

Tracing, partitioning, fusion and scheduling need no GPU: XLA does them for as many virtual CPU
devices. The result has the shapes, collectives and memory of one device's program, in its own dtypes
where the passes that rewrite them for a CPU are disabled; no code is generated.
"""

import enum
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from systolic.chips import Slice
from systolic.chips.catalogue import by_device_kind
from systolic.compiling import gpu_compiler
from systolic.compiling.dump import POLL_SECONDS, dump_options, peak_bytes, scheduled_for_cpu
from systolic.core.errors import OptionError
from systolic.core.machine import sound_flags

MOST_DEVICES = 2048
"""Most virtual devices of one process: XLA's CPU client uses larger ids for other processes."""
CPU_PASSES = (
    "float-normalization-bf16",  # bf16 to f32
    "float-normalization-f8e4m3fn",  # fp8 to f16
    "float-normalization-f8e5m2",
    "operand_upcaster",  # operands of matmuls in fp8 to f32, in int8 to s32
    "all-reduce-promotion",  # reductions of bf16 in f32
    "dot-library-rewriter",  # matmuls into a CPU library's
    "cpu-parallel-task-assigner",  # large ops into calls for threads
)
_CHAIN = 32
_ROUNDS = 3


class Built(enum.Enum):
    """Kind of hardware that a program was compiled for."""

    topology = "topology"
    """A described slice of TPUs or GPUs, by their own compiler."""
    host = "host"
    """Devices of this machine, by their own compiler."""
    stand_in = "stand-in"
    """An absent GPU: scheduled for virtual CPU devices, without code."""


def devices(on: Slice) -> list[Any]:
    """Devices of a CPU or GPU slice, present or described, else as many virtual CPU devices."""
    import jax

    if on.platform == "gpu":
        cards = [device for device in _gpus() if by_device_kind(device.device_kind) == on.chip]
        if len(cards) >= on.num_devices:
            return cards[: on.num_devices]
        if gpu_compiler.compiles(on):
            return gpu_compiler.described(on)
    return jax.devices("cpu")[: on.num_devices]


def check(on: Slice, save: bool) -> None:
    """Checks a compile for this slice before any process starts.

    Raises:
        OptionError: more devices than this machine can have, or code to save for an absent GPU.
    """
    if on.platform == "tpu":
        return
    if on.num_devices > MOST_DEVICES and not gpu_compiler.compiles(on):
        raise OptionError(
            f"{on.name} has {on.num_devices} devices, and a forecast without them takes up to {MOST_DEVICES} virtual ones; choose a smaller slice of that chip"
        )
    if save and on.platform == "gpu" and not _cards():
        refuse_to_save(on)


def refuse_to_save(on: Slice) -> NoReturn:
    """Refuses to save, since a stand-in has no code."""
    raise OptionError(
        f"there is nothing to save for {on.name}: this machine has no such devices, and only they can time the kernels to choose from; leave --save out"
    )


def take_as_there(on: Slice, save: bool) -> None:
    """Prepares this process to trace for an absent GPU, of which there is nothing to save."""
    if save:
        refuse_to_save(on)
    if lowering_platform(on) == "cuda":
        gpu_compiler.take_cudnn_as_there(on)


def built_for(on: Slice, targets: list[Any]) -> Built:
    """Kind of hardware that a program for these devices is compiled for."""
    if on.platform == "tpu":
        return Built.topology
    if targets[0].platform != on.platform:
        return Built.stand_in
    return Built.host if on.platform == "cpu" or targets[0] in _gpus() else Built.topology


def seen(on: Slice, environ: Mapping[str, str]) -> list[str]:
    """Facts of this machine that decide which devices a slice gets, without starting JAX."""
    if on.platform == "tpu":
        return []
    if on.platform == "cpu":
        return [on.chip.title, str(on.chip.host_vcpus)]
    facts = [*_cards(), environ.get("JAX_PLATFORMS", ""), environ.get("CUDA_VISIBLE_DEVICES", "")]
    if not gpu_compiler.compiles(on):
        return [*facts, *CPU_PASSES]
    compiler = gpu_compiler.compiler() or ""
    return [
        *facts,
        compiler,
        gpu_compiler.target_config(on.chip),
        *gpu_compiler.FLAGS,
        *gpu_compiler.FEW_ROWS,
    ]


def lowering_platform(on: Slice) -> str:
    """Platform name in JAX: ``cuda`` or ``rocm`` for a GPU."""
    if on.platform != "gpu":
        return on.platform
    return "rocm" if (on.chip.device_kind or "").startswith("AMD") else "cuda"


def schedule(lowered: Any, folder: Path) -> str:
    """The partitioned, fused and scheduled module of ``lowered``, in its own dtypes.

    Code generation would fail, since a CPU has no bf16 matmul. The caller must end the process.

    Raises:
        Exception: an error of the compiler before it has a schedule.
    """
    failed: list[BaseException] = []
    options = {**dump_options(folder), "xla_disable_hlo_passes": ",".join(CPU_PASSES)}

    def run() -> None:
        try:
            lowered.compile(compiler_options=options)
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    # The memory report is the last file before code generation.
    while worker.is_alive() and peak_bytes(folder) is None:
        time.sleep(POLL_SECONDS)
    text = scheduled_for_cpu(folder)
    if text is None:
        worker.join()
        text = scheduled_for_cpu(folder)
    if text is not None and peak_bytes(folder) is not None:
        return text
    raise failed[0] if failed else RuntimeError(f"the compiler wrote no schedule into {folder}")


class CpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one virtual device of this machine's CPU."""

    matmul_flops_per_second: float
    memory_bytes_per_second: float
    vector_operations_per_second: float


def measured_rates(num_devices: int) -> CpuRates:
    """Measured rates of this CPU: FLOP/s of f32 matmuls, bytes/s of sums, elementwise operations/s.

    Rates of each virtual device when all run, since they share cores and memory.
    """
    import jax
    import jax.numpy as jnp

    here = jax.devices("cpu")[0]
    size, length = 1024, 1 << 24
    matrix = jax.device_put(jnp.ones((size, size), jnp.float32), here)
    row = jax.device_put(jnp.ones((length,), jnp.float32), here)
    short = jax.device_put(jnp.ones((1 << 18,), jnp.float32), here)

    def chain(x: Any) -> Any:
        for _ in range(_CHAIN):
            x = x * 0.5 + 0.25
        return x

    matmul = 2.0 * size**3 / _best(lambda a: a @ a, matrix)
    memory = 8.0 * length / _best(lambda a: a + 1, row)
    vector = 2.0 * _CHAIN * short.size / _best(chain, short)
    return CpuRates(
        matmul_flops_per_second=matmul / num_devices,
        memory_bytes_per_second=memory / num_devices,
        vector_operations_per_second=vector / num_devices,
    )


def _best(function: Any, argument: Any) -> float:
    """Seconds of the fastest of several calls."""
    import jax

    compiled = jax.jit(function).lower(argument).compile()
    compiled(argument).block_until_ready()
    spent = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        compiled(argument).block_until_ready()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def _gpus() -> list[Any]:
    import jax

    try:
        return jax.devices("gpu")
    except RuntimeError:  # no such backend
        return []


def child_variables(
    environ: Mapping[str, str], on: Slice, flags: tuple[str, ...]
) -> dict[str, str]:
    """Environment variables of the compiling process of a CPU or GPU slice, beyond the common ones."""
    count = f"--xla_force_host_platform_device_count={min(on.num_devices, MOST_DEVICES)}"
    variables = {"XLA_FLAGS": sound_flags(" ".join((*flags, count)))}
    if on.platform == "gpu":
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the GPU may be in use
        variables["JAX_PLATFORMS"] = environ.get("JAX_PLATFORMS", "") if _cards() else "cpu"
    return variables


def _cards() -> list[str]:
    """Device files of GPUs: one per NVIDIA GPU, one for all of AMD's."""
    nvidia = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return [*nvidia, *(["/dev/kfd"] if Path("/dev/kfd").exists() else [])]
