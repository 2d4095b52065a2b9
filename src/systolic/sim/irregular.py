"""Sorts, gathers, scatters, windows and FFTs on CPUs and GPUs: estimates, each with a range.

Their bytes alone say nothing of a sort, and too little of single elements that are gathered or scattered: memory
moves whole cache lines (64 bytes of a CPU) or sectors (32 bytes of a GPU).

- Sort. XLA:CPU sorts in one thread and calls the comparator n log2 n times a row. A GPU reads and writes all operands once for
  each byte of the keys, and the keys once before (radix sort; Adinets and Merrill, Onesweep, arXiv 2206.01784).
  Where XLA has no radix sort for the comparator it emits a bitonic network, whose passes over memory are the upper end.
- Gather and scatter. Each run of elements that lie side by side touches whole lines; a scatter reads and writes them.
  An operand that a cache holds is read at most once from memory, which is the lower end.
- Windows (cumulative sums, pooling): an operation for each element of each window.
- FFT: 5 n log2 n FLOPs (Cooley and Tukey), and on a GPU another pass over memory for sizes beyond one block of threads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from systolic.hlo import Computation, Instruction, Module
from systolic.sim.calibration import constant
from systolic.sim.rules import MEASURED, Ruled, comparator_operations
from systolic.sim.timeline import PricedBy
from systolic.sim.work import Work, numbers, slice_sizes, window_sizes

LINE_BYTES: int = constant("irregular.line_bytes")
SECTOR_BYTES: int = constant("irregular.sector_bytes")
COMPARATOR_SECONDS: float = constant("irregular.comparator_seconds")
SLICE_SECONDS: float = constant("irregular.slice_seconds")
UPDATE_SECONDS: float = constant("irregular.update_seconds")
WINDOW_SECONDS: float = constant("irregular.window_seconds")
FFT_RATE: float = constant("irregular.fft_rate")
RADIX_SHARE: float = constant("irregular.radix_share")
TILE: int = constant("irregular.tile")
SPREAD: float = constant("irregular.spread")

_BY = {
    "sort": PricedBy.sort,
    "gather": PricedBy.gather,
    "scatter": PricedBy.scatter,
    "reduce-window": PricedBy.window,
    "select-and-scatter": PricedBy.window,
    "fft": PricedBy.fft,
}
_NOTES = {
    PricedBy.sort: (
        "estimated: sorts by n log2 n calls of the comparator in one thread, as XLA:CPU runs them",
        "estimated: sorts by the passes over memory of a radix sort, at most those of a bitonic network",
    ),
    PricedBy.gather: (
        "estimated: gathers by the cache lines of 64 bytes that they touch",
        "estimated: gathers by the sectors of 32 bytes that they touch",
    ),
    PricedBy.scatter: (
        "estimated: scatters by their updates in one thread, and the cache lines that they read and write",
        "estimated: scatters by the sectors of 32 bytes that they read and write",
    ),
    PricedBy.window: (
        "estimated: windows (cumulative sums, pooling) by their operations",
        "estimated: windows (cumulative sums, pooling) by their operations",
    ),
    PricedBy.fft: (
        "estimated: FFTs by 5 n log2 n FLOPs and their bytes",
        "estimated: FFTs by 5 n log2 n FLOPs and their bytes",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class IrregularRates:
    """Rates that these ops take."""

    memory: float
    """Bytes/s."""
    operations: float
    """Operations/s: elementwise ones of a CPU; of a GPU its rate of f32 matmuls, which elementwise work stays below."""
    is_cpu: bool
    launch_seconds: float = 0.0


def note(by: PricedBy, machine: IrregularRates) -> str:
    """Basis of an estimate of this kind."""
    return _NOTES[by][0 if machine.is_cpu else 1]


def irregular(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    work: Work,
    machine: IrregularRates,
) -> Ruled | None:
    """The price of such an op, or of a fusion with all that it holds; None for others.

    Args:
        module: The program.
        computation: The computation that holds the op.
        instruction: The op.
        work: Its work; bytes as if elements were moved alone.
        machine: Rates.
    """
    seconds, touched, passes, slowest = 0.0, 0.0, 1.0, 1.0
    by: PricedBy | None = None
    for held, at in _held(module, computation, instruction):
        by = by or _BY[held.opcode]
        if held.opcode == "sort":
            each, turns, most = _sort(module, held, at, machine)
            passes, slowest = max(passes, turns), max(slowest, most)
        elif held.opcode in ("gather", "scatter"):
            each, lines = _addressed(held, at, machine)
            touched += lines
        elif held.opcode == "fft":
            size = math.prod(numbers(held, "fft_length") or [2])
            made = max(s.elements for s in (held.shape, *at.operand_shapes(held)))
            flops = 5 * made * math.log2(max(size, 2))
            each = flops / (FFT_RATE if machine.is_cpu else machine.operations)
            passes = max(passes, 1.0 if machine.is_cpu or size <= TILE else 2.0)
        else:
            operations = _window(held, at)
            each = operations * (WINDOW_SECONDS if machine.is_cpu else 1 / machine.operations)
        seconds += each
    if by is None:
        return None
    floor = work.bytes * (passes if by is PricedBy.sort else 1) / machine.memory
    moved = (work.bytes * passes + touched) / machine.memory
    if by in (PricedBy.gather, PricedBy.scatter) and not touched and seconds <= moved:
        return None  # whole lines are a copy, which bytes price
    if passes > 1 and by is PricedBy.sort:
        moved /= RADIX_SHARE
    launches = machine.launch_seconds * passes
    value = max(seconds, moved, launches, machine.launch_seconds)
    high = max(SPREAD * value, work.bytes * slowest / machine.memory + launches)
    if seconds > moved:
        floor = max(floor, seconds / SPREAD)
    most_low = value if by is PricedBy.sort else value / MEASURED
    low = min(max(floor, machine.launch_seconds), most_low)
    return Ruled(seconds=value, low=low, high=high, by=by, on_memory=moved >= seconds)


def without_tiles(
    module: Module, computation: Computation, instruction: Instruction, work: Work
) -> Work:
    """The work with the bytes that a scatter updates as elements, not as the tiles that a TPU reads and writes."""
    given = sum(shape.bytes for shape in computation.operand_shapes(instruction))
    updated = 0.0
    found = False
    for held, at in _held(module, computation, instruction):
        if held.opcode == "scatter":
            found = True
            shapes = at.operand_shapes(held)
            buffers = max(len(shapes) // 2, 1)
            given -= sum(shape.bytes for shape in shapes[:buffers])
            updated += 2 * sum(shape.bytes for shape in shapes[buffers + 1 :])
    return work if not found else replace(work, bytes=min(work.bytes, max(given, 0.0) + updated))


def _held(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Instruction, Computation]]:
    if instruction.opcode in _BY:
        yield instruction, computation
    elif instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        for one in inner:
            yield from _held(module, inner, one)


def _sort(
    module: Module, sort: Instruction, at: Computation, machine: IrregularRates
) -> tuple[float, float, float]:
    """Seconds of comparisons, and passes over memory of a radix sort and of a bitonic network."""
    operands = [a for s in at.operand_shapes(sort) for a in s.arrays()]
    keys = operands[0]
    dim = (numbers(sort, "dimensions") or [len(keys.dims) - 1])[0]
    size = max(keys.dims[dim] if keys.dims else 1, 1)
    if size == 1:
        return 0.0, 1.0, 1.0
    if machine.is_cpu:
        calls = keys.elements * math.log2(size)
        # Another operand is moved by each swap: an argsort takes 1.4 times a sort's time.
        moves = comparator_operations(module, sort) + 6 * (len(operands) - 1)
        return calls * moves * COMPARATOR_SECONDS, 1.0, 1.0
    digits = max(keys.bits // 8, 1)
    share = keys.bytes / max(2 * sum(shape.bytes for shape in operands), 1)
    # Stages between elements that are apart by more than a tile pass over memory one by one.
    far = max((size - 1).bit_length() - (TILE - 1).bit_length(), 0)
    network = far * (far + 1) // 2 + far + 1
    one_block = size <= TILE
    return 0.0, 1.0 if one_block else digits + share, float(max(network, digits + share))


def _addressed(held: Instruction, at: Computation, machine: IrregularRates) -> tuple[float, float]:
    """Seconds of the slices of a gather or the updates of a scatter, and bytes of lines beyond the elements themselves."""
    shapes = at.operand_shapes(held)
    buffers = 1 if held.opcode == "gather" else max(len(shapes) // 2, 1)
    operand = next(shapes[0].arrays())
    made = held.shape if held.opcode == "gather" else shapes[buffers + 1]
    elements = next(made.arrays()).elements
    window = slice_sizes(held, operand.dims, made.dims)
    count = elements / max(math.prod(window), 1)
    side_by_side = 1
    for dim in operand.minor_to_major or range(len(window) - 1, -1, -1):
        side_by_side *= window[dim]
        if window[dim] != operand.dims[dim]:
            break
    runs = elements / max(side_by_side, 1)
    line = LINE_BYTES if machine.is_cpu else SECTOR_BYTES
    wanted = side_by_side * operand.bits / 8
    beyond = runs * (math.ceil(wanted / line) * line - wanted) * buffers
    if held.opcode == "scatter":
        return (count * UPDATE_SECONDS if machine.is_cpu else 0.0), 2 * beyond
    return (count * SLICE_SECONDS if machine.is_cpu else 0.0), beyond


def _window(held: Instruction, at: Computation) -> float:
    size = math.prod(window_sizes(held))
    scattered = held.opcode == "select-and-scatter"
    over = at.operand_shapes(held)[1] if scattered else next(held.shape.arrays())
    return float(over.elements * size)
