"""Which share of an attention kernel's blocks its mask leaves, read from the call.

Splash attention takes arrays of small integers before its float operands: the block to fetch next, the kind of
each block (0 empty, 1 partly masked, 2 full), and which partial mask to take. XLA prints them when they have
few elements. Where it doesn't, their shapes tell a window (the grid is shrunk to it) from the rest.
"""

import itertools
import re
from dataclasses import dataclass

from systolic.hlo import Computation, Instruction, Module, Shape

_INTEGERS = ("s8", "u8", "s16", "s32")
_NUMBER = re.compile(r"-?\d+")
_SHARE_IN_NAME = re.compile(r"\bblocks_(\d+)_of_(\d+)\b")
"""Mark in the name of our own attention: the share of blocks that the mask leaves to the device with most of it (systolic.models.splash)."""
_THROUGH = ("copy", "bitcast", "reshape", "copy-done", "copy-start", "convert")
_STEPS = 24
"""Instructions followed to a constant before it is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Blocks of an attention kernel: rows of queries, columns of keys."""

    rows: int
    columns: int
    transposed: bool = False
    """Whether the mask's last dim counts columns of a grid that runs over queries inside (dKV)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedShare:
    """Share of the blocks that are computed, and what was assumed to know it (empty: nothing)."""

    value: float
    assumed: str = ""


def block_share(
    module: Module, computation: Computation, call: Instruction, grid: Grid
) -> ComputedShare:
    """Share of ``grid`` that the mask of a splash attention call leaves."""
    share = _SHARE_IN_NAME.search(call.op_name)
    if share is not None:
        return ComputedShare(value=int(share[1]) / int(share[2]))
    kinds = _kinds(computation, call)
    if kinds is None and call.name.startswith("splash") and not _integers(computation, call):
        return ComputedShare(value=1.0)  # without a mask these kernels take no arrays of blocks
    if kinds is None:
        # No arrays of blocks: a kernel that is not block sparse, such as flash attention.
        if grid.rows == grid.columns or _is_square(computation, call):
            return ComputedShare(value=_causal(grid), assumed="attention taken as causal")
        return ComputedShare(value=1.0, assumed="attention taken as full")
    made = _constant(module, computation, kinds)
    total = grid.rows * grid.columns
    if made is not None:
        values = [int(n) for n in _NUMBER.findall(made.operands[0])]
        if not made.shape.dims and values:
            return ComputedShare(value=1.0 if values[0] else 0.0)
        if len(values) == made.shape.elements:
            heads = made.shape.elements / max(made.shape.dims[-1] * made.shape.dims[-2], 1)
            return ComputedShare(value=min(sum(map(bool, values)) / heads / total, 1.0))
    across, along = kinds.shape.dims[-2:]
    lines, width = (along, across) if grid.transposed else (across, along)
    whole = grid.rows if grid.transposed else grid.columns
    if width < whole:
        kept = sum(min(width, line + 1) for line in range(lines))
        return ComputedShare(
            value=min(kept / total, 1.0),
            assumed=f"attention taken as causal in a window of {width} blocks",
        )
    return ComputedShare(value=_causal(grid), assumed="attention taken as causal")


def listed_blocks(computation: Computation, call: Instruction) -> int | None:
    """Blocks of a head that a grid runs over where the call lists them, one after the other; else None.

    tokamax's kernels take such lists, 1-D arrays of the same length, before their float operands.
    """
    lengths = [shape.dims[0] for shape in _integers(computation, call) if len(shape.dims) == 1]
    return max(lengths) if len(lengths) > 1 and max(lengths) > 1 else None


def compares_positions(computation: Computation, call: Instruction) -> bool:
    """Whether the mask is computed in the kernel: the positions of the queries are an operand, one for the whole batch."""
    shapes = computation.operand_shapes(call)[len(_integers(computation, call)) :]
    return any(shape.dtype in _INTEGERS and len(shape.dims) == 2 for shape in shapes)


def cut_share(grid: Grid, share: float, block_q: int, block_kv: int) -> float:
    """Share of the computed blocks that a mask cuts.

    The diagonal of a causal mask runs through as many blocks of a row as its queries are long. Under a mask that leaves less
    than half of the blocks, which a causal one does not, such as a window, all count as cut.

    Args:
        grid: The whole grid.
        share: Share of its blocks that are computed.
        block_q: Queries of a block.
        block_kv: Keys of a block.
    """
    if share < 0.5:
        return 1.0
    through = grid.rows * max(block_q / block_kv, 1.0)
    return min(through / max(grid.rows * grid.columns * share, 1.0), 1.0)


def _integers(computation: Computation, call: Instruction) -> list[Shape]:
    """Operands before the first one of floats."""
    shapes = computation.operand_shapes(call)
    return list(itertools.takewhile(lambda shape: shape.dtype in _INTEGERS, shapes))


def _kinds(computation: Computation, call: Instruction) -> Instruction | None:
    """The operand with the kinds of blocks: the second array of integers before the first of floats."""
    found: list[Instruction] = []
    for name in call.operands:
        operand = computation.index.get(name)
        if operand is None or operand.shape.dtype not in _INTEGERS:
            break
        if len(operand.shape.dims) == 3:
            found.append(operand)
    return found[1] if len(found) > 1 else None


def _is_square(computation: Computation, call: Instruction) -> bool:
    floats = [s for s in computation.operand_shapes(call) if s.dtype not in _INTEGERS]
    return len(floats) > 1 and floats[0].dims[-2:-1] == floats[1].dims[-2:-1]


def _constant(module: Module, computation: Computation, at: Instruction) -> Instruction | None:
    """The constant that an operand is, or that all of it is filled with, through loops that carry it."""
    for _ in range(_STEPS):
        if at.opcode == "constant":
            return at
        if at.opcode == "broadcast" or at.opcode in _THROUGH:
            following = computation.index.get(at.operands[0])
        elif at.opcode == "fusion":
            computation = module.callee(at, "calls")
            following = computation.root
        elif at.opcode == "get-tuple-element":
            source = computation.index.get(at.operands[0])
            if source is not None and source.opcode == "parameter":
                source, computation = _given(module, computation)
            if source is None or source.opcode != "tuple" or at.tuple_index >= len(source.operands):
                return None
            following = computation.index.get(source.operands[at.tuple_index])
        else:
            return None
        if following is None:
            return None
        at = following
    return None


def _given(module: Module, body: Computation) -> tuple[Instruction | None, Computation]:
    """The tuple that a loop begins with, and where it is made."""
    for computation in module.computations.values():
        for loop in computation:
            if loop.opcode == "while" and loop.called("body") == body.name and loop.operands:
                given = computation.index.get(loop.operands[0])
                if given is not None and given.opcode == "parameter":
                    return None, computation
                return given, computation
    return None, body


def _causal(grid: Grid) -> float:
    """Share of the blocks that a causal mask does not empty."""
    rows, columns = grid.rows, grid.columns
    kept = sum(min(columns, -(-(row + 1) * columns // rows)) for row in range(rows))
    return kept / (rows * columns)
