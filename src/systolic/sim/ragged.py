"""XLA's own kernel of a ragged matmul, by its tiles.

The kernel visits each tile of rows once for every group in it, and fetches rows again for each tile of columns, and a
group's weights again for each tile of columns, and, where the contraction is split, for each visit. The call's
own cost estimate counts every operand once.
"""

import re

from systolic.hlo import Computation, Instruction
from systolic.sim.estimate import slowdown_of
from systolic.sim.kernels import KernelCost
from systolic.sim.rates import Rates

_TILES = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_FLOATS = ("bf16", "f16", "f32")
WINDOWS = 1.1
"""Catalogue's HBM rate over that at which a kernel's windows come: ragged matmuls on v5e and v5p
(ops.json; benchmarks/operations)."""


def ragged_cost(computation: Computation, call: Instruction, rates: Rates) -> KernelCost | None:
    """Seconds of ``[rows, depth] x [groups, depth, columns]``; None where a call is no such kernel.

    The groups' sizes are data: every group is taken to begin inside a tile of rows, as the kernel's own table of
    visits allows.
    """
    found = _TILES.search(call.rest)
    shapes = computation.operand_shapes(call)
    arrays = [shape for shape in shapes if shape.dtype in _FLOATS]
    tables = [shape.dims[0] for shape in shapes if shape.dtype == "s32" and len(shape.dims) == 1]
    if found is None or [len(shape.dims) for shape in arrays[:2]] != [2, 3] or not tables:
        return None
    rows, depth, columns = (int(size) for size in found.groups())
    left, right = arrays[:2]
    visits = max(tables)
    across = -(-right.dims[2] // columns)
    along = -(-right.dims[1] // depth)
    fetched = right.dims[0] if along == 1 else visits * along
    moved = across * (
        visits * along * rows * depth * left.bits + fetched * depth * columns * right.bits
    )
    seconds_moving = WINDOWS * (moved / 8 + call.shape.padded_bytes) / rates.hbm
    flops = 2.0 * visits * rows * right.dims[1] * right.dims[2]
    seconds = slowdown_of(rates.chip.name).matrix * flops / rates.peak(left.dtype)
    useful = 2.0 * left.dims[0] * right.dims[1] * right.dims[2]
    note = f"kernel {call.name}: every group is taken to begin inside a tile of {rows} rows, and all {left.dims[0]} rows to hold tokens"
    return KernelCost(max(seconds, seconds_moving), useful, note)
