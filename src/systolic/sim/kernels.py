"""Pallas calls priced from their block structure.

A kernel's cost estimate counts when it has one, or what its body was counted to do where that is more. Attention kernels
are known by their own name: each step of their grid takes the matrix units, with head dims filled up to the array's width, or the vector units
for the softmax, whichever is longer, and a fixed time beside it, which is why large blocks are faster.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from systolic.hlo import Computation, Instruction, Module
from systolic.sim.masks import Grid, block_share
from systolic.sim.rates import Rates

_BLOCK = re.compile(r'\\?"(block_\w+)\\?":\s*(\d+)')
_NAME = re.compile(r"(splash_mha|splash_mqa|flash_attention|flash_mha)")
"""How the names of attention kernels begin. A scope around another kernel may hold the same letters."""

FORWARD, DKV, DQ, DKV_FUSED = "forward", "dkv", "dq", "dkv_fused"
_MATMULS = {FORWARD: 2, DKV: 4, DQ: 3, DKV_FUSED: 5}
"""Of block x block x head_dim each: S and PV; S, dV, dP, dK; S, dP, dQ; all five."""
_VECTOR_OPS = {FORWARD: 12, DKV: 12, DQ: 10, DKV_FUSED: 14}
"""Vector operations per logit: scale, mask, segment compare, maximum, subtract, exp (about 4), sum,
cast; backward has no maximum and multiplies by the gradient instead. Counted in the kernels' source
(jax.experimental.pallas.ops.tpu.splash_attention)."""

STEP_SECONDS = 3.5e-7
"""Of one step of a kernel's grid, for its scalar work and the ends of its transfers. Assumed: a third of a
microsecond is what Pallas kernels with nothing to do show; no source prints it for these chips."""


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Of one call."""

    seconds: float
    flops: float
    note: str = ""


def kernel_cost(
    module: Module, computation: Computation, call: Instruction, rates: Rates
) -> KernelCost | None:
    """Seconds of a Pallas call; None when nothing is known but its bytes."""
    config = call.config.get("custom_call_config", {})
    known = None
    if any(_NAME.match(name) for name in (call.name, call.op_name.rpartition("/")[2])):
        known = _attention(module, computation, call, rates)
    if known is None and (counted := config.get("counted")) is not None:
        known = _counted(computation, call, rates, counted)
    said = _estimated(rates, config.get("cost_estimate") or {})
    if said is None or (known is not None and known.seconds > said.seconds):
        # An estimate is its author's word to the scheduler: it can't make less of what the body does.
        return known
    return said


def _estimated(rates: Rates, estimate: Mapping[str, Any]) -> KernelCost | None:
    """Seconds by a call's own cost estimate; None without one."""
    flops = float(estimate.get("flops", 0))
    moved = float(estimate.get("bytes_accessed", 0))
    exps = float(estimate.get("transcendentals", 0))
    if not (flops or moved):
        return None
    compute = flops / rates.peak("bf16") + 4 * exps / vector_rate(rates)
    return KernelCost(max(compute, moved / rates.hbm), flops)


F32_PASSES = 6.0
"""bf16 products of an f32 matmul at full precision."""
_SYSTOLIC_WIDTH = 128
"""Of the tiles that a kernel's f32 matmuls feed the matrix units with."""


def _counted(
    computation: Computation, call: Instruction, rates: Rates, counted: Mapping[str, Any]
) -> KernelCost:
    """Seconds of a kernel by what its body was counted to do (:mod:`systolic.aot.kernels`)."""
    width = (rates.chip.mxu_shape or (128, 128))[0]
    # f32 operands go to the matrix units in tiles of 8 x 128, half as many rows as bf16 ones have, and fill
    # a corner of a wider array. On v6e (256 wide) that is 1/8 of the bf16 rate; 8.1 was measured there on a
    # Pallas matmul (vlasenkoalexey/xprof-cli, tests/fixtures). Assumed for other generations.
    narrow = 2.0 * (width / _SYSTOLIC_WIDTH) ** 2
    passes = {"f32": narrow, "f32x6": max(narrow, F32_PASSES)}
    flops = {name: float(number) for name, number in counted["flops"].items()}
    matrix = sum(
        n * passes.get(name, 1.0) / rates.peak(_HLO.get(name, name)) for name, n in flops.items()
    )
    vector = float(counted["vector"]) / vector_rate(rates)
    moved = float(counted["bytes"]) or computation_bytes(computation, call)
    steps = max(int(counted["steps"]), 1)
    seconds = max(matrix, vector, moved / rates.hbm)
    if steps > 1:
        seconds += (
            moved / rates.hbm / steps + steps * STEP_SECONDS
        )  # the first blocks come before any work
    note = (
        ""
        if counted["whole"]
        else f"kernel {call.name} has loops or branches on data, counted as taken once"
    )
    return KernelCost(seconds, sum(flops.values()), note)


_HLO = {"f32x6": "f32", "i8": "s8", "i4": "s4"}
"""Dtypes of kernels by HLO's names."""


def vector_rate(rates: Rates) -> float:
    """f32 operations per second of a device's vector units: lanes x ALUs x clock."""
    chip = rates.chip
    rows, lanes = chip.vpu_shape or (8, 128)
    return rows * lanes * (chip.vpu_alus_per_lane or 4) * cores(rates) * rates.clock_hz


def cores(rates: Rates) -> int:
    """TensorCores of a device: two with megacore."""
    return max((rates.chip.num_cores or 1) // (rates.chip.devices_per_chip or 1), 1)


def _attention(
    module: Module, computation: Computation, call: Instruction, rates: Rates
) -> KernelCost | None:
    arrays = [s for s in computation.operand_shapes(call) if s.dtype in ("bf16", "f16", "f32")]
    arrays = [s for s in arrays if len(s.dims) >= 3]
    if len(arrays) < 3:
        return None
    query, key = arrays[0], arrays[1]
    batch = math.prod(query.dims[:-2])
    queries, head_dim = query.dims[-2:]
    keys = key.dims[-2]
    text = f"{call.name} {call.op_name}"
    blocks = {name: int(size) for name, size in _BLOCK.findall(call.rest)}
    kind = FORWARD
    if "dkv" in text or "bwd_dkv" in text:
        kind = DKV_FUSED if 'fused_bwd_kernel\\": true' in call.rest else DKV
    elif "dq" in text:
        kind = DQ
    suffix = {FORWARD: "", DKV: "_dkv", DKV_FUSED: "_dkv", DQ: "_dq"}[kind]
    block_q = min(blocks.get(f"block_q{suffix}", 512) or 512, queries)
    block_kv = min(blocks.get(f"block_kv{suffix}", 512) or 512, keys)
    grid = Grid(
        rows=-(-queries // block_q),
        columns=-(-keys // block_kv),
        transposed=kind in (DKV, DKV_FUSED),
    )
    share = block_share(module, computation, call, grid)
    logits = batch * queries * keys * share.value
    width = (rates.chip.mxu_shape or (128, 128))[0]
    filled = -(-head_dim // width) * width
    matmuls = _MATMULS[kind]
    flops = 2.0 * matmuls * logits * head_dim
    matrix = 2.0 * matmuls * logits * filled / rates.peak("bf16")
    vector = _VECTOR_OPS[kind] * logits / vector_rate(rates)
    moved = computation_bytes(computation, call) / rates.hbm
    cores = max((rates.chip.num_cores or 1) // (rates.chip.devices_per_chip or 1), 1)
    steps = logits / (block_q * block_kv) / cores
    return KernelCost(
        max(matrix, vector, moved) + steps * STEP_SECONDS,
        flops,
        share.assumed,
    )


def computation_bytes(computation: Computation, call: Instruction) -> float:
    """HBM bytes of operands and results."""
    return float(
        sum(s.bytes_in(0) for s in computation.operand_shapes(call)) + call.shape.bytes_in(0)
    )
