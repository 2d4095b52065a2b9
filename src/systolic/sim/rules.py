"""Prices of ops that the compiler has no cycles for: sorts, top-k, gathers, scatters, windows, random bits, FFTs.

Each rule counts what the hardware has to do: granules of device memory, passes of a sorting network over vector
registers, an address an index on the scalar unit. A rule gives a range: its least is what the units need at
their documented rates, its most a multiple that says how well the rule is known.
"""

import math
from dataclasses import dataclass

from systolic.chips import known
from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.shape import HBM
from systolic.sim.calibration import constant
from systolic.sim.estimate import slowdown_of
from systolic.sim.incomplete import TOP_K
from systolic.sim.rates import LANES, REGISTER, Rates, cores, vector_rate
from systolic.sim.timeline import PricedBy
from systolic.sim.traffic import WORD_BITS, buffers_of, update_of
from systolic.sim.work import Work, numbers, slice_sizes, window_sizes

OP_CYCLES: float = constant("rules.op_cycles")
LANE_CYCLES: float = constant("rules.lane_cycles")
SORT_CYCLES: float = constant("rules.sort_cycles")
SORT_LANE_CYCLES: float = constant("rules.sort_lane_cycles")
HALF_CYCLES: float = constant("rules.half_cycles")
INDEX_CYCLES: float = constant("rules.index_cycles")
UPDATE_CYCLES: float = constant("rules.update_cycles")
TOP_K_COMPARED: float = constant("rules.top_k_compared")
RANDOM_OPS: float = constant("rules.random_ops")
MEASURED: float = constant("rules.measured")
UNMEASURED: float = constant("rules.unmeasured")

HALVES = ("X64Combine", "X64SplitHigh", "X64SplitLow")
"""Custom calls that put an array of 64-bit elements together of its 32-bit halves, or take one half."""
_MOVES = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert"} | {"copy"}
)
_RULED = frozenset(
    {"sort", "gather", "scatter", "fft", "rng-bit-generator", "reduce-window"}
    | {"select-and-scatter"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruled:
    """Price of an op by a rule."""

    seconds: float
    low: float
    """Least seconds: the units' documented rates."""
    high: float
    by: PricedBy
    on_memory: bool
    """Whether device memory bounds it."""


def ruled(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    work: Work,
    rates: Rates,
    sparse: bool = False,
) -> Ruled | None:
    """Price of an op by the rule of its kind; None where no rule is for it.

    Args:
        module: The program.
        computation: The computation that holds the op.
        instruction: The op, or a fusion around a gather, a scatter or a sort.
        work: Its work.
        rates: Rates of the device.
        sparse: Whether a SparseCore runs it, whose subcores follow addresses without the scalar unit of the TensorCore.
    """
    held, inside = _addressed(module, computation, instruction)
    if held is None:
        return None
    opcode = held.opcode
    if held.target == TOP_K:
        return _top_k(inside, held, work, rates)
    if held.target in HALVES:
        # The words of both halves are taken apart or put together in registers, wherever they lie.
        shapes = [*computation.operand_shapes(instruction), instruction.shape]
        words = sum(
            math.prod(array.padded_dims) * max(array.bits, WORD_BITS) / WORD_BITS
            for shape in shapes
            for array in shape.arrays()
        )
        least = words / REGISTER / (rates.clock_hz * cores(rates))
        seconds = HALF_CYCLES * least
        return _made(seconds, least / 2, work.bytes / rates.hbm, rates, PricedBy.halves, MEASURED)
    if opcode == "sort":
        return _sort(module, inside, held, work, rates)
    if opcode == "gather":
        return _gather(inside, held, instruction, work, rates, sparse)
    if opcode == "scatter":
        return _scatter(inside, held, work, rates, sparse)
    if opcode == "fft":
        return _fft(held, work, rates)
    if opcode == "rng-bit-generator":
        return _random(held, work, rates)
    return _window(inside, held, work, rates)


def _addressed(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Instruction | None, Computation]:
    """The op of a rule that an instruction is or that a fusion holds, the costliest kind first, with where it is."""
    if instruction.opcode in _RULED or instruction.target == TOP_K or instruction.target in HALVES:
        return instruction, computation
    if instruction.opcode != "fusion":
        return None, computation
    inner = module.callee(instruction, "calls")
    addressed = [_addressed(module, inner, inner_op) for inner_op in inner]
    named = [(held, at) for held, at in addressed if held is not None]
    for kind in (TOP_K, "sort", "scatter", "gather", "fft", "select-and-scatter", *HALVES):
        for held, at in named:
            if kind in (held.opcode, held.target):
                return held, at
    return None, computation


def _made(
    seconds: float, floor: float, memory: float, rates: Rates, by: PricedBy, spread: float
) -> Ruled:
    """A price of the compute's seconds, and of device memory at the rate that chips reach."""
    moving = slowdown_of(rates.chip.name).memory * memory
    value = max(seconds, moving)
    low = min(max(floor, memory), value)
    high = value * (spread if seconds >= moving else min(spread, MEASURED))
    return Ruled(seconds=value, low=low, high=high, by=by, on_memory=moving >= seconds)


# Sorting networks


def network_stages(size: int) -> int:
    """Compare-and-swap stages of a bitonic network over ``size`` elements: L (L + 1) / 2 of L bits (Batcher, 1968)."""
    bits = max(size - 1, 1).bit_length()
    return bits * (bits + 1) // 2


def top_k_stages(size: int, k: int) -> int:
    """Stages of a bitonic top-k: groups of K are sorted, and each pass keeps the larger half of two and sorts that again.

    The passes halve the elements, so that all of them cost at most one pass of 1 + log2 K stages over them all; K is the
    next power of two.
    """
    bits = (max(k, 1) - 1).bit_length()
    return min(bits * (bits + 1) // 2 + bits + 1, network_stages(size))


def _sort(
    module: Module, computation: Computation, sort: Instruction, work: Work, rates: Rates
) -> Ruled:
    operands = [a for s in computation.operand_shapes(sort) for a in s.arrays()]
    keys = operands[0]
    dim = (numbers(sort, "dimensions") or [len(keys.dims) - 1])[0]
    size = max(keys.dims[dim] if keys.dims else 1, 2)
    registers = sum(_registers(shape, dim, size) for shape in operands)
    """Registers of all operands: each is moved by a swap."""
    compared = comparator_operations(module, sort)
    operations = stage_operations(registers / len(operands), len(operands), compared)
    stages = network_stages(size)
    crossed = SORT_LANE_CYCLES * registers * _lane_stages(keys, dim, size)
    moved = work.bytes * _passes(operands, dim, size, rates)
    return _network(operations * stages, SORT_CYCLES, crossed, moved, rates, PricedBy.sort)


def carries_index(computation: Computation, sort: Instruction) -> bool:
    """Whether a sort moves an index beside its keys that nobody reads: the compiler's way to keep equal keys in order."""
    last = computation.index.get(sort.operands[-1]) if len(sort.operands) > 1 else None
    if last is None or last.opcode != "iota":
        return False
    read = {
        user.tuple_index
        for user in computation
        if user.opcode == "get-tuple-element" and user.operands[0] == sort.name
    }
    return not sort.root and len(sort.operands) - 1 not in read


def stage_operations(registers: float, operands: int, compared: float) -> float:
    """Vector operations of a stage over operands of so many registers: a pair is compared once, and each operand takes two selects."""
    return registers * (compared / 2 + 1 + 2 * operands)


def _network(
    operations: float, cycles: float, crossed: float, moved: float, rates: Rates, by: PricedBy
) -> Ruled:
    """Price of register operations that take so many times their least, and of cycles that registers cross lanes."""
    least = operations * REGISTER / vector_rate(rates)
    seconds = least * cycles + crossed / (rates.clock_hz * cores(rates))
    spread = UNMEASURED if crossed and by is PricedBy.sort else MEASURED
    return _made(seconds, least, moved / rates.hbm, rates, by, spread)


def _registers(shape: Shape, dim: int, size: int) -> float:
    """Registers of one operand, the sorted dim filled up to a power of two and elements to 32 bits a half."""
    filled = 1 << max(size - 1, 1).bit_length()
    words = max(-(-shape.bits // WORD_BITS), 1)
    padded = math.prod(shape.padded_dims) / max(shape.padded_dims[dim] if shape.dims else 1, 1)
    return max(padded * filled / REGISTER, 1.0) * words


def _lane_stages(keys: Shape, dim: int, size: int) -> int:
    """Stages that compare elements of one register's rows; of a dim that lies along other dims' lanes none."""
    order = keys.minor_to_major or tuple(range(len(keys.dims) - 1, -1, -1))
    if order and order[0] != dim:
        return 0
    lanes = LANES.bit_length() - 1
    return sum(min(bits, lanes) for bits in range(1, max(size - 1, 1).bit_length() + 1))


def _passes(operands: list[Shape], dim: int, size: int, rates: Rates) -> int:
    """Times that a sort reads and writes device memory: once where a row of all operands fits vector memory.

    Beyond, each doubling merges blocks of half the vector memory in one more pass at least.
    """
    held = rates.chip.vmem_bytes_per_core or known(rates.chip, "kernel_vmem_bytes")
    order = operands[0].minor_to_major
    width = 1 if not order or order[0] == dim else LANES
    row = sum(size * width * max(shape.bits, WORD_BITS) / 8 for shape in operands)
    return 1 + max(math.ceil(math.log2(row / (held / 2))), 0) if row > held else 1


def comparator_operations(module: Module, sort: Instruction) -> int:
    """Operations of a comparator."""
    name = sort.called("to_apply") or next(
        (
            name.lstrip("%")
            for name in (sort.attribute("called_computations") or "").strip("{}").split(",")
        ),
        "",
    )
    held = module.computations.get(name)
    return (
        1 if held is None else max(sum(instruction.opcode not in _MOVES for instruction in held), 1)
    )


def _top_k(computation: Computation, instruction: Instruction, work: Work, rates: Rates) -> Ruled:
    """A top-k keeps a value and its index, and compares floats as integers of their bits."""
    keys = next(computation.operand_shapes(instruction)[0].arrays())
    kept = next(instruction.shape.arrays())
    dim = next(
        (n for n, (a, b) in enumerate(zip(keys.dims, kept.dims, strict=False)) if a != b),
        len(keys.dims) - 1,
    )
    size = max(keys.dims[dim], 2)
    registers = max(math.prod(keys.padded_dims) / REGISTER, 1.0)
    operations = stage_operations(registers, 2, TOP_K_COMPARED)
    stages = top_k_stages(size, kept.dims[dim])
    order = keys.minor_to_major or tuple(range(len(keys.dims) - 1, -1, -1))
    crossed = 2 * LANE_CYCLES * registers * stages if order[0] == dim else 0.0
    return _network(operations * stages, OP_CYCLES, crossed, work.bytes, rates, PricedBy.top_k)


# Addresses


def _touched(table: Shape, sizes: list[int], granule: int) -> float:
    """Bytes of device memory that one slice of a table touches: whole granules, at each place where it lies apart.

    A row of a tile lies in one piece. Rows of 16-bit elements share words with a neighbour's, which is not counted: no
    measurement says what a gather of them costs beside their own bytes.
    """
    if table.space != HBM:
        return 0.0
    order = table.minor_to_major or tuple(range(len(table.dims) - 1, -1, -1))
    width = table.tile[-1] if table.tile else LANES
    minor = sizes[order[0]] if order else 1
    pieces = math.ceil(minor / width) * math.prod(sizes[dim] for dim in order[1:])
    bytes_ = min(minor, width) * table.bits / 8
    return pieces * max(math.ceil(bytes_ / granule), 1) * granule


def _granule(rates: Rates) -> int:
    return known(rates.chip, "hbm_granule_bytes")


def _indexed(count: float, cycles: float, rates: Rates, *, sparse: bool) -> tuple[float, float]:
    """Seconds of the scalar unit for so many addresses, and the least: one a cycle."""
    if sparse:
        return 0.0, 0.0
    rate = rates.clock_hz * cores(rates)
    return count * cycles / rate, count / rate


def _gather(
    computation: Computation,
    gather: Instruction,
    outer: Instruction,
    work: Work,
    rates: Rates,
    sparse: bool,
) -> Ruled:
    table = next(computation.operand_shapes(gather)[0].arrays())
    gathered = next(gather.shape.arrays())
    sizes = slice_sizes(gather, table.dims, gathered.dims)
    count = gathered.elements / max(math.prod(sizes), 1)
    read = count * _touched(table, sizes, _granule(rates))
    out = float(outer.shape.bytes_in(HBM))
    seconds, least = _indexed(count, INDEX_CYCLES, rates, sparse=sparse)
    # Never more than to read the whole table; never less than the elements that come out.
    floor = max((out + min(read, table.padded_bytes)) / rates.hbm, least)
    gather_price = _made(
        seconds, floor, max(work.bytes, out + read) / rates.hbm, rates, PricedBy.gather, UNMEASURED
    )
    return Ruled(
        seconds=gather_price.seconds,
        low=min(floor, gather_price.seconds),
        high=gather_price.high,
        by=gather_price.by,
        on_memory=gather_price.on_memory,
    )


def _scatter(
    computation: Computation, scatter: Instruction, work: Work, rates: Rates, sparse: bool
) -> Ruled:
    new = update_of(computation, scatter)
    buffer = next(scatter.shape.arrays())
    updates = next(new.shape.arrays()) if new is not None else buffer
    sizes = slice_sizes(scatter, buffer.dims, updates.dims)
    count = updates.elements / max(math.prod(sizes), 1)
    touched = 2 * count * _touched(buffer, sizes, _granule(rates)) * len(buffers_of(scatter))
    # Addresses are made beside the work on rows: a load, an operation and a store of each register.
    registers = count * math.prod(sizes) / REGISTER * len(buffers_of(scatter))
    seconds, least = _indexed(count, UPDATE_CYCLES, rates, sparse=sparse)
    seconds = max(seconds, 0.0 if sparse else registers / (rates.clock_hz * cores(rates)))
    # A buffer that fits vector memory is read and written once.
    memory = max(work.bytes, min(touched, 2.0 * buffer.padded_bytes))
    return _made(seconds, least, memory / rates.hbm, rates, PricedBy.scatter, UNMEASURED)


# Windows, random bits, FFTs, halves


def _window(computation: Computation, window: Instruction, work: Work, rates: Rates) -> Ruled:
    """A reduction over windows takes an operation for each element of each window; a selection two more."""
    area = math.prod(window_sizes(window))
    result = next(window.shape.arrays())
    places = result.elements
    if window.opcode == "select-and-scatter":
        places = next(computation.operand_shapes(window)[1].arrays()).elements
        area *= 3
    # Sums along a dim share their prefixes: no more than the bits of the window.
    area = min(area, 2 * max(area - 1, 1).bit_length() + 1)
    least = places * area / vector_rate(rates)
    return _made(
        least * OP_CYCLES, least, work.bytes / rates.hbm, rates, PricedBy.window, UNMEASURED
    )


def _random(random: Instruction, work: Work, rates: Rates) -> Ruled:
    drawn = list(random.shape.arrays())[-1]
    words = drawn.elements * max(drawn.bits, WORD_BITS) / WORD_BITS
    seconds = RANDOM_OPS * words / vector_rate(rates)
    return _made(
        seconds,
        words / vector_rate(rates),
        work.bytes / rates.hbm,
        rates,
        PricedBy.random,
        UNMEASURED,
    )


def _fft(fft: Instruction, work: Work, rates: Rates) -> Ruled:
    """5 N log2 N real operations of N complex elements, on the vector units (Cooley and Tukey, 1965)."""
    lengths = numbers(fft, "fft_length")
    elements = max(array.elements for array in fft.shape.arrays())
    bits = sum(max(n - 1, 1).bit_length() for n in lengths)
    least = 5 * elements * max(bits, 1) / vector_rate(rates)
    return _made(least * OP_CYCLES, least, work.bytes / rates.hbm, rates, PricedBy.fft, UNMEASURED)
