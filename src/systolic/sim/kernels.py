"""Pallas calls priced from their block structure.

A kernel's cost estimate counts when it has one, or what its body was counted to do where that is more. Attention kernels
are known by their own name: each step of their grid takes the matrix units, with head dims filled up to the array's width, or the vector units
for the softmax, whichever is longer, and a fixed time beside it, which is why large blocks are faster.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.core.units import duration
from systolic.hlo import Computation, Instruction, Module
from systolic.sim.attention import attention_of, flops_of, is_ragged, ragged_seconds, seconds_of
from systolic.sim.calibration import constant
from systolic.sim.estimate import OPERATIONS, slowdown_of
from systolic.sim.incomplete import DATA
from systolic.sim.rates import Rates, cores, cores_used, f32_passes, number_format, vector_rate
from systolic.sim.work import PASSES

_NAME = re.compile(r"(splash_mha|splash_mqa|flash_attention|flash_mha)")
"""Beginnings of the names of attention kernels. A scope around another kernel may hold the same letters."""

STEP_SECONDS: float = constant("kernels.step_seconds")
_NO_BYTES = 1.0
"""Bytes of a kernel whose windows all lie in vector memory: a count of 0 stands for one that is not known."""
_HLO = {"f32x6": "f32", "i8": "s8", "i4": "s4"}
"""Dtypes of kernels by HLO's names."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Seconds and FLOPs of one call."""

    seconds: float
    flops: float
    note: str = ""
    number_format: str = "bf16"
    """Format of most FLOPs."""
    missing: str = ""
    """Work left out of a kernel that may take longer."""


def kernel_cost(
    module: Module,
    computation: Computation,
    call: Instruction,
    rates: Rates,
    in_vmem: Sequence[bool] = (),
) -> KernelCost | None:
    """Seconds of a Pallas call; None when nothing is known but its bytes.

    Args:
        module: The program.
        computation: The one that holds the call.
        call: The call.
        rates: Of the device.
        in_vmem: For each operand, then each result, of a call inside a fusion whether it lies in vector memory.
    """
    config = call.config.get("custom_call_config", {})
    counted = config.get("counted") or {}
    if is_ragged(call):
        return KernelCost(*ragged_seconds(computation, call, rates, _grid(config)))
    if any(_NAME.match(name) for name in (call.name, call.op_name.rpartition("/")[2])):
        attention = attention_of(module, computation, call, counted)
        if attention is not None:
            own_bytes = computation_bytes(computation, call)
            seconds = seconds_of(attention, rates, own_bytes)
            note = attention.assumed
            if note and attention.share < 1.0:
                most = seconds_of(replace(attention, share=1.0), rates, own_bytes)
                note = f"{note}, since its mask is data: a call of {call.name} takes {duration(seconds)} so, and {duration(most)} if all blocks are left"
            return KernelCost(seconds, flops_of(attention), note)
    if windows := counted.get("window_bytes") if any(in_vmem) else None:
        # Scalars that are fetched before the grid begins have no window; they are the first operands.
        near = sum(n for n, held in zip(windows, in_vmem[-len(windows) :], strict=False) if held)
        counted = {**counted, "bytes": max(float(counted["bytes"]) - near, _NO_BYTES)}
    known = _counted(computation, call, rates, counted) if "flops" in counted else None
    estimate = _estimated(rates, config.get("cost_estimate") or {})
    if estimate is None or (known is not None and known.seconds > estimate.seconds):
        # An estimate is what the author gives the scheduler: it cannot lower the count of what the body does.
        return known
    if known is not None and 0 < known.flops < estimate.flops and counted.get("whole"):
        # Nor raise it, where each condition of the body is known: estimates leave out that causal kernels skip blocks.
        return known
    return estimate


def _grid(config: Mapping[str, Any]) -> list[int]:
    return list((config.get("counted") or {}).get("grid") or [])


def _estimated(rates: Rates, estimate: Mapping[str, Any]) -> KernelCost | None:
    """Seconds by a call's own cost estimate; None without one."""
    flops = float(estimate.get("flops", 0))
    moved = float(estimate.get("bytes_accessed", 0))
    exps = float(estimate.get("transcendentals", 0))
    if not (flops or moved):
        return None
    compute = flops / rates.peak("bf16") + OPERATIONS["exponential"] * exps / vector_rate(rates)
    return KernelCost(max(compute, moved / rates.hbm), flops)


def _counted(
    computation: Computation, call: Instruction, rates: Rates, counted: Mapping[str, Any]
) -> KernelCost:
    """Seconds of a kernel by what its body was counted to do (:mod:`systolic.compiling.kernels`)."""
    narrow = f32_passes(rates)
    passes = {"f32": narrow, "f32x6": max(narrow, PASSES["highest"])}
    flops = {name: float(number) for name, number in counted["flops"].items()}
    matrix = sum(
        n * passes.get(name, 1.0) / rates.peak(_HLO.get(name, name)) for name, n in flops.items()
    )
    vector = float(counted["vector"]) / vector_rate(rates)
    alone = cores(rates) / cores_used(counted.get("parallel", [cores(rates)]), rates)
    matrix, vector = alone * matrix, alone * vector
    moved = float(counted["bytes"]) or computation_bytes(computation, call)
    steps = max(int(counted["steps"]), 1)
    compute = max(matrix, vector) + slowdown_of(rates.chip.name).beside * min(matrix, vector)
    seconds = max(compute, moved / rates.hbm)
    if steps > 1:
        seconds += (
            moved / rates.hbm / steps + steps * STEP_SECONDS
        )  # the first blocks come before any work
    missing = DATA if counted.get("loops", not counted["whole"]) else ""
    note = "" if counted["whole"] or missing else f"kernel {call.name}: branches on data are taken"
    if remote := float(counted.get("remote", 0.0)):
        # Which links the transfers take, and whether the body waits for each, is in its control flow.
        seconds = max(seconds, remote / rates.link)
        note = f"kernel {call.name}: sends {remote / 2**20:.1f} MiB to other devices, priced at one link beside its other work"
    most = max(flops, key=lambda name: flops[name], default="bf16")
    return KernelCost(
        seconds,
        sum(flops.values()),
        note,
        number_format=number_format(_HLO.get(most, most)),
        missing=missing,
    )


def computation_bytes(computation: Computation, call: Instruction) -> float:
    """HBM bytes of operands and results."""
    return float(
        sum(s.bytes_in(0) for s in computation.operand_shapes(call)) + call.shape.bytes_in(0)
    )
