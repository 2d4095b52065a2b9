"""Seconds of grouped matmul kernels by the steps of their grids.

XLA's kernel of a ragged matmul, JAX's megablox and tokamax's kernels visit each tile of rows once for every group in it:
``[rows, depth] x [groups, depth, columns]`` for each tile of columns, or, for the gradient of the weights, the rows of both
operands for each tile of the result. A step multiplies one tile while the windows of the next are fetched, each only
where its place changes: a group's weights at the group's first visit where their tile holds the whole depth, at each
step otherwise; no rows at that visit, since the group begins inside a tile whose rows are there. So a step takes the
longer of both, and the ends of its transfers and the scalar work of the grid beside it.

The kernel of few tokens (:mod:`systolic.models.decoder.few`) visits each chosen expert once and multiplies all tokens with the
tiles of its three matrices. How many experts are chosen is in the call's scope, ``experts_CHOSEN_of_EXPERTS``.

The sizes of the groups are data. Unless the program holds them, rows choose their groups evenly and by chance, so that few
rows leave groups empty (:func:`chosen`), and every other group has the same number of rows and begins inside a tile of them.
An empty group is visited only for the gradient of its weights, which is zero. Rows behind the last group are not visited; how
many balanced routing fills is in the call's scope, ``rows_EXPECTED_of_ROWS``.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systolic.hlo import Computation, Instruction
from systolic.sim.calibration import fitted
from systolic.sim.kernels import KernelCost
from systolic.sim.rates import (
    REGISTER,
    Rates,
    cores,
    cores_used,
    f32_passes,
    matrix_width,
    vector_rate,
)

_XLA = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')
_TOKAMAX = re.compile(r'tile_m\\*": (\d+), \\*"tile_k\\*": (\d+), \\*"tile_n\\*": (\d+)')
_EXPECTED = re.compile(r"rows_(\d+)_of_(\d+)")
_GROUPS = re.compile(r"of_(\d+)_groups")
_CHOSEN = re.compile(r"experts_(\d+)_of_(\d+)/few_experts\b")
_SUM_OPS, _UNIT_OPS, _WIDEN_OPS = 4.0, 12.0, 2.0
"""Vector operations of an element of a result (load, weigh, select, add), of a hidden unit, and of a code that becomes a float; counted
in the kernel's body."""
_INTEGER = re.compile(r"-?\d+")
_THROUGH = ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "reshape")
_METADATA = "ragged-dot-metadata"
"""XLA's kernel that makes the lists of visits from the groups' sizes."""
_MASK_OPS = 3.0
"""An element of both operands' tiles where the last one reaches beyond the depth: index, comparison, selection."""
_NARROW = ("bf16", "f16", "f32", "s8", "u8", "s4", "u4", "f8")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedPace:
    """Constants of a generation's grid steps besides multiplying and moving; fitted (benchmarks/operations)."""

    step_seconds: float
    """Fixed time of a step that waits for the matrix units: its scalar work, and filling and draining them."""
    wait_seconds: float
    """Fixed time of a step that waits for its windows: the latency of a transfer."""
    unhidden: float
    """Part of storing a tile's sums, a register a cycle, that the matrix units do not hide."""
    share: float
    """Share of the catalogue's HBM rate at which windows come."""


def pace_of(generation: str) -> GroupedPace:
    """Pace that was fitted for a generation, or the one of all others."""
    return fitted("grouped", GroupedPace, generation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """One call: what its operands and its tiles say."""

    rows: float
    """That hold tokens."""
    depth: int
    columns: int
    groups: int
    """That are visited."""
    tile: tuple[int, int, int]
    """Size of a tile along rows, depth and columns."""
    transposed: bool
    """Whether the rows are contracted: the gradient of the weights, ``[groups, depth, columns]``."""
    dtypes: tuple[str, str, str]
    """HLO dtypes of the operands and the result."""
    item_bytes: tuple[float, float, float]
    parallel: tuple[int, ...]
    """Dims of the grid that cores may share."""
    known: bool = False
    """Whether the program holds the groups' sizes."""

    @property
    def visits(self) -> int:
        """Visits of tiles of rows in one pass over all rows."""
        return self.tiles + self.groups - 1

    @property
    def tiles(self) -> int:
        """Tiles of rows that hold tokens."""
        return math.ceil(self.rows / self.tile[0])

    @property
    def passes(self) -> tuple[int, int]:
        """Tiles of the depth and of the columns."""
        return -(-self.depth // self.tile[1]), -(-self.columns // self.tile[2])

    @property
    def flops(self) -> float:
        """FLOPs of all rows, each once."""
        return 2.0 * self.rows * self.depth * self.columns


def seconds_of(grouped: Grouped, rates: Rates, pace: GroupedPace | None = None) -> float:
    """Seconds of a call. ``pace`` is the generation's own for None."""
    pace = pace_of(rates.chip.name) if pace is None else pace
    used = cores_used(grouped.parallel, rates)
    rows, *narrow = grouped.tile
    width = matrix_width(rates.chip)
    depth, columns = (-(-size // width) * width for size in narrow)
    rate = rates.peak(grouped.dtypes[0]) / cores(rates)
    rate /= f32_passes(rates) if grouped.dtypes[0] == "f32" else 1.0
    matrix = 2.0 * rows * depth * columns / rate
    sums = (depth if grouped.transposed else rows) * columns
    storing = sums / REGISTER / rates.clock_hz
    matrix += pace.unhidden * min(matrix, storing) + pace.step_seconds
    moving = pace.share * rates.hbm / min(used, cores(rates))

    def steps(number: float, moved_bytes: float) -> float:
        return number * max(matrix, moved_bytes / moving + pace.wait_seconds)

    along, across = grouped.passes
    # A last tile that the arrays do not fill is multiplied whole and moved in part.
    depth, columns = grouped.depth / along, grouped.columns / across
    left, right, out = grouped.item_bytes
    visits, tiles = grouped.visits, grouped.tiles
    if grouped.transposed:
        fetched = rows * (left * depth + right * columns)
        seconds = steps(visits - tiles, out * depth * columns) + steps(tiles, fetched)
        return along * across * seconds / used
    rows_of, weights, written = (
        left * rows * depth,
        right * depth * columns,
        out * rows * columns,
    )
    if grouped.depth % grouped.tile[1]:
        masked = _MASK_OPS * grouped.tile[1] * (rows + grouped.tile[2])
        matrix += masked / along * cores(rates) / vector_rate(rates)
    if along == 1:
        seconds = steps(grouped.groups, weights) + steps(visits - grouped.groups, rows_of + written)
    else:
        seconds = steps(visits * along - tiles, rows_of + weights)
        seconds += steps(tiles, rows_of + weights + written)
    return across * seconds / used


def grouped_of(
    computation: Computation, call: Instruction, counted: Mapping[str, object]
) -> Grouped | None:
    """Grouped matmul that a call computes; None where it is none."""
    arrays = [s for s in computation.operand_shapes(call) if len(s.dims) > 1]
    arrays = [s for s in arrays if s.dtype.startswith(_NARROW)]
    result = call.shape
    if len(arrays) < 2 or result.is_tuple:
        return None
    left, right = arrays[:2]
    ranks = (len(left.dims), len(right.dims), len(result.dims))
    tiles = _tiles(call, ranks, counted)
    if tiles is None or ranks not in ((2, 3, 2), (2, 2, 3)):
        return None
    transposed = ranks[2] == 3
    columns = result.dims[-1]
    across = -(-columns // tiles[2])
    groups = result.dims[0] if transposed else right.dims[0]
    sizes = _sizes(computation, call, groups)
    expected = _EXPECTED.search(call.op_name)
    # Of a stack of layers only one layer's groups have rows.
    layer = _GROUPS.search(call.op_name)
    chosen_of = min(int(layer[1]), groups) if layer else groups
    # The array's rows are padded to whole tiles.
    rows = min(int(expected[1]) if expected else left.dims[0], left.dims[0])
    return Grouped(
        rows=sum(sizes) if sizes else rows,
        depth=left.dims[1],
        columns=columns,
        groups=groups if transposed else _filled(sizes, rows, chosen_of),
        known=bool(sizes),
        tile=tiles,
        transposed=transposed,
        dtypes=(left.dtype, right.dtype, result.dtype),
        item_bytes=(left.bits / 8, right.bits / 8, result.bits / 8),
        parallel=_parallel(call, across, counted),
    )


def chosen(rows: float, groups: int) -> float:
    """Groups that so many rows choose on average, each evenly and by chance."""
    return groups * (1 - (1 - 1 / groups) ** rows)


def _filled(sizes: Sequence[int], rows: float, groups: int) -> int:
    """Groups that have rows: counted where the sizes are known, else expected."""
    return sum(size > 0 for size in sizes) if sizes else max(round(chosen(rows, groups)), 1)


def _parallel(call: Instruction, across: int, counted: Mapping[str, object]) -> tuple[int, ...]:
    """Dims of the grid that cores may share: as the body says, or the tiles of the columns.

    tokamax's kernels have no windows: they run their grid in a pipeline within one step, on one core. MaxText's megablox
    names its tiles as those do.
    """
    if not counted.get("windows"):
        return () if _TOKAMAX.search(call.rest) else (across,)
    dims = counted.get("parallel")
    return tuple(dims) if isinstance(dims, list) else (across,)


def _tiles(
    call: Instruction, ranks: Sequence[int], counted: Mapping[str, object]
) -> tuple[int, int, int] | None:
    """Tiles of rows, depth and columns: as XLA or tokamax write them beside the call, or from its windows."""
    tiles = _XLA.search(call.rest) or _TOKAMAX.search(call.rest)
    if tiles is not None:
        rows, depth, columns = (int(size) for size in tiles.groups())
        return rows, depth, columns
    windows = counted.get("windows")
    if not isinstance(windows, list) or len(windows) < 3:
        return None
    left, right, out = windows[0], windows[1], windows[-1]
    if (len(left), len(right), len(out)) != tuple(ranks):
        return None
    return left[0], left[1], out[-1]


def _sizes(computation: Computation, call: Instruction, groups: int) -> list[int]:
    """Rows of each group where a constant has them, or where each group begins; else empty."""
    for name in call.operands:
        origin = computation.index.get(name)
        while origin is not None and origin.opcode != "constant":
            through = origin.opcode in _THROUGH or origin.name.startswith(_METADATA)
            origin = (
                computation.index.get(origin.operands[0]) if through and origin.operands else None
            )
        if origin is None or origin.shape.dtype != "s32" or len(origin.shape.dims) != 1:
            continue
        numbers = [int(number) for number in _INTEGER.findall(origin.operands[0])]
        if len(numbers) == groups + 1 and numbers[0] == 0:
            return [after - before for before, after in itertools.pairwise(numbers)]
        if len(numbers) == groups and sum(numbers) > 0:
            return numbers
    return []


def few_cost(computation: Computation, call: Instruction, rates: Rates) -> KernelCost | None:
    """Seconds of the kernel of few tokens; None where a call is another.

    A core takes the steps of its half of the chosen experts. Windows of a step come while the one before computes, those of
    the first while nothing does.
    """
    routing = _CHOSEN.search(call.op_name)
    counted = call.config.get("custom_call_config", {}).get("counted") or {}
    windows = counted.get("windows")
    if routing is None or not isinstance(windows, list):
        return None
    visited, held = int(routing[1]), int(routing[2])
    shapes = [shape for shape in computation.operand_shapes(call) if len(shape.dims) == 3]
    left = next(shape for shape in computation.operand_shapes(call) if len(shape.dims) == 2)
    (rows, width), tile, parts = windows[0], windows[2][1], shapes[0].dims[1] // windows[2][1]
    used, pace, array = (
        cores_used([call.shape.dims[0]], rates),
        pace_of(rates.chip.name),
        matrix_width(rates.chip),
    )
    deep, wide = (-(-size // array) * array for size in (tile, width))
    products = 6.0 * max(rows, array) * deep * wide / (rates.peak(left.dtype) / cores(rates))
    products *= f32_passes(rates) if left.dtype == "f32" else 1.0
    vector = rows * (_SUM_OPS * width + _UNIT_OPS * tile)
    vector += 3.0 * _WIDEN_OPS * tile * width if shapes[0].dtype != left.dtype else 0.0
    working = max(products, vector * cores(rates) / vector_rate(rates)) + pace.step_seconds
    moving = pace.share * rates.hbm / min(used, cores(rates))
    fetching = 3.0 * tile * width * shapes[0].bits / 8 / moving + pace.wait_seconds
    steps = parts * math.ceil(visited / used)
    return KernelCost(
        fetching + steps * max(working, fetching),
        6.0 * rows * width * tile * parts * visited,
        f"kernel {call.name}: tokens choose their experts evenly and by chance, {visited} of {held} are read",
    )


def grouped_cost(computation: Computation, call: Instruction, rates: Rates) -> KernelCost | None:
    """Seconds of a grouped matmul's call; None where it is none."""
    if (few := few_cost(computation, call, rates)) is not None:
        return few
    counted = call.config.get("custom_call_config", {}).get("counted") or {}
    grouped = grouped_of(computation, call, counted)
    if grouped is None:
        return None
    seconds = seconds_of(grouped, rates)
    return KernelCost(seconds, grouped.flops, "" if grouped.known else _note(call, grouped))


def _note(call: Instruction, grouped: Grouped) -> str:
    """Note on what is assumed of the data."""
    routing = _EXPECTED.search(call.op_name)
    expected, held = (int(number) for number in routing.groups()) if routing else (1, 1)
    more = (
        f" of {held}, all would take {held / expected:.3g} times as long" if held > expected else ""
    )
    return (
        f"kernel {call.name}: balanced routing, {grouped.groups} groups of equal size, each begun inside a tile of "
        f"{grouped.tile[0]} rows; {grouped.rows:.0f} rows hold tokens{more}"
    )
