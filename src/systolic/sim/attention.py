"""Seconds of an attention kernel by what the steps of its grid do.

A step computes one block of scores: matmuls on the matrix units, with head dims filled up to their width; the softmax
and the sums of the matmuls' passes on the vector units. It takes the longer of both, and a part of the shorter one,
since the softmax waits for the scores and the second matmul for the softmax. Steps that the mask empties cost their
fixed time, and each row of blocks the start and the end of its sums.

Vector operations were counted in the bundles that libtpu's own scheduler makes of JAX's kernels (v4 to TPU7x, head dims 64
to 256; benchmarks/results); the part that is not hidden is fitted to measured kernels (benchmarks/operations).

Splash attention takes arrays of small integers before its float operands: the block to fetch next, the kind of
each block (0 empty, 1 partly masked, 2 full), and which partial mask to take. XLA prints them when they have
few elements. Where it doesn't, their shapes tell a window (the grid is shrunk to it) from the rest.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.sim.calibration import constant, fitted
from systolic.sim.rates import Rates, cores, cores_used, f32_passes, matrix_width, vector_rate

_INTEGERS = ("s8", "u8", "s16", "s32")
_MASK_NUMBER = re.compile(r"-?\d+")
_SHARE_IN_NAME = re.compile(r"\bblocks_(\d+)_of_(\d+)\b")
"""Mark in the name of our own attention: the share of blocks that the mask leaves to the device with most of it (systolic.models.splash)."""
_THROUGH = ("copy", "bitcast", "reshape", "copy-done", "copy-start", "convert")
_STEPS = 24
"""Instructions followed to a constant before it is given up."""
_NUMBER = re.compile(r'\\?"((?:block|[qkv])_\w+)\\?":\s*(\d+)')
_NAMED = re.compile(r"(block_(?:q|kv)(?:_dkv|_dq)?(?:_compute)?|[qkv]_layout)[=_](\d+)")
"""The same in the names of JAX's kernels before 0.8."""
_CAP = re.compile(r'\\?"attn_logits_soft_cap\\?":\s*[\d.]')
FORWARD, DKV, DQ, DKV_FUSED = "forward", "dkv", "dq", "dkv_fused"
_MATMULS = {FORWARD: 2, DKV: 4, DQ: 3, DKV_FUSED: 5}
"""Matmuls of block x block x head_dim: S and PV; S, dV, dP, dK; S, dP, dQ; all five."""
_VECTOR_OPS = {FORWARD: 6.5, DKV: 5.5, DQ: 4.5, DKV_FUSED: 6.0}
"""A score, without what follows: subtract, multiply by log2(e), maximum, sum, round; backward there is no maximum,
and two more subtract and multiply."""
_CAUSAL, _SEGMENTS, _SOFT_CAP = 1.0, 1.0, 3.0
"""Further operations: comparing positions, comparing segments, scaling into and out of tanh."""
_SEQUENCE_MINOR = 2
"""Layout of an operand whose last dim is the sequence, as the kernels number it."""
_ESTIMATED = re.compile(r'\\?"max_logit_const\\?":\s*-?[\d.]')
"""tokamax's setting of a maximum that is given, rather than taken of each row's scores."""
_MAXIMUM = 1.0
"""Operation that it saves."""
_FLOATS = ("bf16", "f16", "f32")
_NAME = "ragged_paged_attention_kernel"
_RAGGED_VECTOR_OPS: float = constant("attention.ragged_vector_ops")


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
    # The operand with the kinds of blocks: the second array of integers before the first of floats.
    arrays: list[Instruction] = []
    for name in call.operands:
        operand = computation.index.get(name)
        if operand is None or operand.shape.dtype not in _INTEGERS:
            break
        if len(operand.shape.dims) == 3:
            arrays.append(operand)
    kinds = arrays[1] if len(arrays) > 1 else None
    if kinds is None and call.name.startswith("splash") and not _integers(computation, call):
        return ComputedShare(value=1.0)  # without a mask these kernels take no arrays of blocks
    if kinds is None:
        # No arrays of blocks: a kernel that is not block sparse, such as flash attention.
        if grid.rows == grid.columns or _is_square(computation, call):
            return ComputedShare(value=_causal(grid), assumed="attention taken as causal")
        return ComputedShare(value=1.0, assumed="attention taken as full")
    mask = _constant(module, computation, kinds)
    total = grid.rows * grid.columns
    if mask is not None:
        values = [int(n) for n in _MASK_NUMBER.findall(mask.operands[0])]
        if not mask.shape.dims and values:
            return ComputedShare(value=1.0 if values[0] else 0.0)
        if len(values) == mask.shape.elements:
            heads = mask.shape.elements / max(mask.shape.dims[-1] * mask.shape.dims[-2], 1)
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
                carried = computation.index.get(loop.operands[0])
                if carried is not None and carried.opcode == "parameter":
                    return None, computation
                return carried, computation
    return None, body


def _causal(grid: Grid) -> float:
    """Share of the blocks that a causal mask does not empty."""
    rows, columns = grid.rows, grid.columns
    kept = sum(min(columns, -(-(row + 1) * columns // rows)) for row in range(rows))
    return kept / (rows * columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPace:
    """Constants of attention kernels on one generation; fitted unless a field says otherwise."""

    forward: float
    """Part of the shorter of matrix and vector time that the longer one does not hide, in JAX's kernels with two or
    three matmuls a block; read from the compiler's bundles."""
    backward: float
    """Unhidden part with four or five matmuls, which leave the scheduler more to choose from."""
    staged_forward: float
    """Unhidden part in tokamax's kernels, whose softmax takes powers of two over parts of a block; fitted."""
    staged_backward: float
    step_seconds: float
    """Fixed time of one step of the grid: its scalar work and the ends of its transfers; set by hand on the fit half."""
    row_seconds: float
    """Time to begin and end the sums of a row of blocks, and to wait for the row's own operand; fitted."""

    def unhidden(self, attention: "Attention") -> float:
        """Unhidden part of a call."""
        if attention.kind in (FORWARD, DQ):
            return self.staged_forward if attention.staged else self.forward
        return self.staged_backward if attention.staged else self.backward


def pace_of(generation: str) -> AttentionPace:
    """Pace that was fitted for a generation, or the one of all others."""
    return fitted("attention", AttentionPace, generation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One call: what its operands, its metadata and its mask say."""

    kind: str
    copies: int
    """Batch x query heads."""
    grid: Grid
    share: float
    """Share of the grid's blocks that are computed."""
    steps: float
    """Steps of the whole grid, with those that the mask empties."""
    block_q: int
    block_kv: int
    head_dims: tuple[int, int]
    """Head dim of queries and keys, and of values."""
    vector_ops: float
    """A score, without the sums of the matmuls' passes."""
    parallel: tuple[int, ...]
    """Dims of the grid that cores may share."""
    dtype: str
    """HLO dtype of queries, keys and values."""
    staged: bool
    """Whether it is tokamax's kernel."""
    assumed: str

    @property
    def blocks(self) -> float:
        """Blocks that are computed."""
        return self.copies * self.grid.rows * self.grid.columns * self.share

    @property
    def scores(self) -> float:
        """Scores that are computed, masked ones within a block too."""
        return self.blocks * self.block_q * self.block_kv

    def depths(self, width: int) -> float:
        """Sum over the matmuls of a head dim filled up to ``width``."""
        return depths(self.kind, self.head_dims, width)

    @property
    def fetched_bytes(self) -> float:
        """The two arrays that the inner dim of the grid runs over, once a block."""
        length = self.block_q if self.kind in (DKV, DKV_FUSED) else self.block_kv
        return self.blocks * length * sum(self.head_dims) * (4.0 if self.dtype == "f32" else 2.0)


def depths(kind: str, head_dims: tuple[int, int], width: int) -> float:
    """Sum over the matmuls of a kind of kernel of a head dim filled up to ``width``."""
    first, second = (-(-dim // width) * width for dim in head_dims)
    of_values = 2 if kind in (DKV, DKV_FUSED) else 1
    return (_MATMULS[kind] - of_values) * first + of_values * second


def _share_run(counted: Mapping[str, Any], whole: float) -> float | None:
    """Share of the blocks that a kernel runs by the matmuls of its code; None where its conditions are data, or it has other matmuls.

    A kernel that is not block sparse skips the blocks above the diagonal by a condition on the indices of its grid, and
    without a causal mask it has no such condition: :mod:`systolic.compiling.kernels` evaluates it at each step.

    Args:
        counted: What the code was counted to do.
        whole: FLOPs of all blocks.
    """
    flops = sum(float(number) for number in counted.get("flops", {}).values())
    if not counted.get("whole") or not flops or round(flops / whole, 2) > 1:
        return None
    return min(flops / whole, 1.0)


def seconds_of(
    attention: Attention, rates: Rates, own_bytes: float, pace: AttentionPace | None = None
) -> float:
    """Seconds of a call; ``own_bytes`` are its operands and results, each once. ``pace`` is the generation's own for None."""
    pace = pace_of(rates.chip.name) if pace is None else pace
    width = matrix_width(rates.chip)
    used = cores_used(attention.parallel, rates)
    part = used / cores(rates)
    depths = attention.depths(width)
    passes = f32_passes(rates) if attention.dtype == "f32" else 1.0
    matrix = passes * 2.0 * attention.scores * depths / (rates.peak("bf16") * part)
    # Each pass over a width of the contraction is added to the ones before it.
    operations = attention.vector_ops + depths / width
    vector = attention.scores * operations / (vector_rate(rates) * part)
    compute = max(matrix, vector) + pace.unhidden(attention) * min(matrix, vector)
    moving = max(attention.fetched_bytes, own_bytes) / rates.hbm
    transposed = attention.grid.transposed
    rows = attention.copies * (attention.grid.columns if transposed else attention.grid.rows)
    fixed = attention.steps * pace.step_seconds + rows * pace.row_seconds
    return max(compute, moving) + fixed / used


def flops_of(attention: Attention) -> float:
    """FLOPs of the blocks that are computed."""
    return 2.0 * attention.scores * attention.depths(1)


def attention_of(
    module: Module, computation: Computation, call: Instruction, counted: Mapping[str, Any]
) -> Attention | None:
    """Attention that a call computes; None where its operands are not those of attention."""
    arrays = [s for s in computation.operand_shapes(call) if s.dtype in _FLOATS]
    arrays = [s for s in arrays if len(s.dims) >= 3]
    if len(arrays) < 3:
        return None
    named = [*_NAMED.findall(call.op_name or call.name), *_NUMBER.findall(call.rest)]
    numbers = {name: int(size) for name, size in named}
    kind = _kind(call, len(arrays[0].dims))
    sides = [_sides(s, numbers.get(f"{n}_layout", 1)) for n, s in zip("qkv", arrays, strict=False)]
    (queries, head_dim), (keys, _), (_, value_dim) = sides
    suffix = {FORWARD: "", DKV: "_dkv", DKV_FUSED: "_dkv", DQ: "_dq"}[kind]
    block_q = min(numbers.get(f"block_q{suffix}", 512) or 512, queries)
    block_kv = min(numbers.get(f"block_kv{suffix}", 512) or 512, keys)
    grid = Grid(
        rows=-(-queries // block_q),
        columns=-(-keys // block_kv),
        transposed=kind in (DKV, DKV_FUSED),
    )
    copies = math.prod(arrays[0].dims[:-2])
    flops = 2.0 * copies * queries * keys * depths(kind, (head_dim, value_dim), 1)
    computed = _share(
        module, computation, call, grid, kind, (queries, keys), _share_run(counted, flops)
    )
    share, assumed = computed.value, computed.assumed
    counted_grid = counted.get("grid")
    whole = list(counted_grid) if isinstance(counted_grid, list) else []
    blocks = copies * grid.rows * grid.columns * share
    staged = "use_base2_exp" in call.rest or "use_experimental_scheduler" in call.rest
    operations = _VECTOR_OPS[kind]
    if compares_positions(computation, call):
        # JAX's kernel compares in every block and tokamax's only in those that the mask cuts.
        cut = cut_share(grid, share, block_q, block_kv) if staged else 1.0
        operations += _CAUSAL * cut
    operations -= _MAXIMUM * (kind == FORWARD and bool(_ESTIMATED.search(call.rest)))
    operations += _SEGMENTS * ("_segmented" in call.name)
    operations += _SOFT_CAP * (bool(_CAP.search(call.rest)) or bool(counted.get("tanh")))
    return Attention(
        kind=kind,
        copies=copies,
        grid=grid,
        share=share,
        steps=math.prod(whole) if whole else blocks,
        block_q=block_q,
        block_kv=block_kv,
        head_dims=(head_dim, value_dim),
        vector_ops=operations,
        parallel=_parallel(kind, arrays[0], whole, counted.get("parallel")),
        dtype=arrays[0].dtype,
        staged=staged,
        assumed=assumed,
    )


def _share(
    module: Module,
    computation: Computation,
    call: Instruction,
    grid: Grid,
    kind: str,
    lengths: tuple[int, int],
    run: float | None,
) -> ComputedShare:
    """Share of the blocks that a call computes; ``run`` is that of its code, None where it does not say."""
    listed = listed_blocks(computation, call)
    if listed is not None:  # the grid itself runs over the blocks that are left
        return ComputedShare(value=min(listed / (grid.rows * grid.columns), 1.0))
    computed = block_share(module, computation, call, grid)
    if not computed.assumed:
        return computed
    forward = _listed(module).get(lengths) if kind != FORWARD else None
    if forward is not None:  # a mask that is data, of which the forward kernel lists the blocks
        return ComputedShare(value=forward)
    return computed if run is None else ComputedShare(value=run)


@lru_cache(maxsize=2)
def _listed(module: Module) -> Mapping[tuple[int, int], float]:
    """Largest share of blocks that a forward kernel lists, by the lengths of its queries and keys.

    Lists are as long as the device with most blocks needs, for which the others wait: in a ring without balance the last one computes whole blocks in
    each turn.
    """
    shares: dict[tuple[int, int], float] = {}
    for computation in module.computations.values():
        for call in computation:
            if call.target != "tpu_custom_call" or not call.name.startswith("splash_mha_fwd"):
                continue
            if listed_blocks(computation, call) is None:
                continue
            attention = attention_of(module, computation, call, {})
            if attention is not None:
                lengths = (
                    attention.grid.rows * attention.block_q,
                    attention.grid.columns * attention.block_kv,
                )
                shares[lengths] = max(shares.get(lengths, 0.0), attention.share)
    return shares


def _kind(call: Instruction, rank: int) -> str:
    # Behind the kind, JAX's kernels before 0.8 name the blocks of all.
    text = " ".join(name.partition("_block_")[0] for name in (call.name, call.op_name))
    if "dkv" in text:
        # The fused kernel returns a part of dQ for each block of keys: a dim more than queries have.
        parts = any(len(shape.dims) == rank + 1 for shape in call.shape.arrays())
        return DKV_FUSED if parts else DKV
    return DQ if "dq" in text else FORWARD


def _sides(shape: Shape, layout: int) -> tuple[int, int]:
    """Sequence and head dim of an operand."""
    second_last, other = shape.dims[-2:]
    return (other, second_last) if layout == _SEQUENCE_MINOR else (second_last, other)


def _parallel(kind: str, query: Shape, grid: Sequence[int], parallel: object) -> tuple[int, ...]:
    """Dims of the grid that cores may share: as the body says, or as JAX's own kernels have it.

    There ``vmap`` adds such a dim, and the forward pass has its heads; all others are in order.
    """
    if isinstance(parallel, list):
        return tuple(parallel)
    added = grid[: max(len(grid) - 3, 0)] if grid else query.dims[:-3]
    heads = query.dims[-3] if kind == FORWARD and len(query.dims) >= 3 else 1
    return (heads, *added)


def is_ragged(call: Instruction) -> bool:
    """Whether a call is this kernel."""
    return call.name.startswith(_NAME)


def ragged_seconds(
    computation: Computation, call: Instruction, rates: Rates, grid: list[int]
) -> tuple[float, float, str]:
    """Seconds and FLOPs of a call, and what was assumed.

    Args:
        computation: Of the call.
        call: Operands: lengths, table [texts, pages of a text], ends, two more, queries [tokens, heads, width], pages
            [pages, page_size, 2 x rows, width].
        rates: Of the chip.
        grid: Blocks of heads and of queries.
    """
    shapes = computation.operand_shapes(call)
    texts, pages = shapes[1].dims
    tokens, heads, width = shapes[5].dims
    cache = shapes[6]
    page_bytes = cache.bytes_in(0) / cache.dims[0]
    positions = pages * cache.dims[1]
    blocks = grid[1] if len(grid) > 1 else 1
    visits = max(blocks, texts)
    scores = visits * -(-tokens // blocks) * heads * positions
    filled = -(-width // matrix_width(rates.chip))
    flops = 4.0 * scores * width
    matrix = 4.0 * scores * filled * matrix_width(rates.chip) / rates.peak("bf16")
    vector = scores * (_RAGGED_VECTOR_OPS + 2 * filled) / vector_rate(rates)
    pace = pace_of(rates.chip.name)
    compute = max(matrix, vector) + pace.forward * min(matrix, vector)
    moving = (visits * pages * page_bytes + 2 * shapes[5].bytes_in(0)) / rates.hbm
    seconds = max(compute, moving) + visits * pace.step_seconds
    return (
        seconds,
        flops,
        f"kernel {call.name}: all {pages} pages of each text are taken to be full",
    )
