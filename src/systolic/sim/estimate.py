"""Seconds of an op by what the units of a TensorCore have to do for it.

A fusion loads and stores windows of its arrays beside the work on them: it takes the longest of its matrix,
memory and vector time, each at the rate that chips were measured to reach, and a part of the next longest
for the windows at its ends. The rates are fitted to measured operations (benchmarks/operations).
"""

import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.shape import HBM, VMEM, bits_of
from systolic.sim.calibration import constant, fitted
from systolic.sim.incomplete import PALLAS
from systolic.sim.rates import LANES, REGISTER, SUBLANES, Rates, cores, matrix_width, vector_rate
from systolic.sim.traffic import UPDATES, WORD_BITS, passed_bytes, update_of
from systolic.sim.work import Work

OPERATIONS: Mapping[str, int] = constant("estimate.operations")
"""Vector operations an element; 1 for what is not here. ``vector`` of a :class:`Slowdown` scales them all."""
_DIM = re.compile(r"\d+")
_NONE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "iota"}
    | {"reshape", "partition-id", "convolution", "dot", "dynamic-update-slice"}
)


_CUT = {"slice": re.compile(r"\[(\d+):"), "pad": re.compile(r"(-?\d+)_")}
"""Ops that begin a dim at another place, and the places in their attribute."""
_CUT_BY = {"slice": "slice", "pad": "padding"}
_MOVED = frozenset(("copy", "transpose", "slice", "dynamic-slice", "pad", "concatenate"))
"""Ops that loads and stores do, beside what :func:`relaid_cycles` has."""
_LAID = ("copy", "transpose", "reshape", "reduce", *_CUT)

F32_OPERANDS: float = constant("estimate.f32_operands")
"""Slowdown of a matmul with an f32 operand from HBM, which is fetched and rounded again for each window of columns.

An operand that lies in VMEM costs nothing more: the logits of v6e with f32 activations take 1.0 to 1.08 of the matrix
units' time, as with bf16.
"""
LANE_CYCLES: float = constant("estimate.lane_cycles")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpWindows:
    """Bytes of the windows in which an op passes over its arrays."""

    scoped_bytes: float
    """Vector memory for one op's windows at which the slowdown of matmuls holds; with more, what it adds shrinks."""
    fetched_bytes: float
    """Bytes of device memory in one window of an op without a matmul. What fits in one window, nothing hides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorMemory:
    """Cycles of ops whose arrays lie in vector memory, and the latencies of what comes from device memory or goes there."""

    relayout_cycles: float
    """Cycles of a register whose elements move to other lanes."""
    window_cycles: float
    """Cycles of such a register in windows of device memory."""
    row_cycles: float
    """Cycles of a register whose rows move to other rows or tiles."""
    shift_cycles: float
    """Cycles of a register whose rows begin at another lane."""
    spread_cycles: float
    """Cycles of a register that is filled with values which lie along the lanes of another one."""
    loads: float
    """Registers that a core loads in a cycle."""
    stores: float
    """Registers that a core stores in a cycle."""
    fetch_cycles: float
    """Cycles to fetch a cycle's instructions, which each call of an op does once."""
    code_cycles: float
    """Most cycles of an op that are instructions of their own; beyond, loops run them again."""
    read_seconds: float
    """Latency from device memory, before an op's first data are there."""
    write_seconds: float
    """Latency of an op's last results to device memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Measured seconds over seconds at the catalogue's rates."""

    matrix: float
    """Slowdown of the matrix units against their peak, which large matmuls reach."""
    memory: float
    """Slowdown of HBM, where a fusion passes over its arrays in order."""
    vector: float
    """Slowdown against lanes x ALUs x clock, at the operation counts used here."""
    unhidden: float
    """Part of the shorter one of memory and compute that the longer one does not hide: the windows at a
    fusion's ends."""
    beside: float = 0.0
    """Part of the shorter one of a matmul and of the vector work on its results that the longer one does not hide."""
    ahead: float = 0.0
    """Part of the vector work on a matmul's operands that nothing hides, where it takes them in more than once."""
    windows: OpWindows | None = None
    """None of a generation whose matmuls and sums were not measured by their windows."""
    vector_memory: VectorMemory | None = None
    """None of a generation whose ops in vector memory and ops on few bytes were not measured."""


def _slowdown(
    *,
    windows: Mapping[str, float] | None = None,
    vector_memory: Mapping[str, float] | None = None,
    **shares: float,
) -> Slowdown:
    """Slowdown of a generation's row of ``estimates.toml``."""
    return Slowdown(
        windows=OpWindows(**windows) if windows else None,
        vector_memory=VectorMemory(**vector_memory) if vector_memory else None,
        **shares,
    )


def slowdown_of(generation: str) -> Slowdown:
    """Slowdown that was fitted for a generation, or over all of them."""
    return fitted("estimates", _slowdown, generation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Seconds of an op on each unit, at the catalogue's rates."""

    matrix: float
    memory: float
    vector: float
    """Vector and cross-lane units."""
    relaid: float = 0.0
    """Vector work, of that before, which gives registers another layout."""
    ahead: float = 0.0
    """Vector work on the operands of a matmul."""
    reused: bool = False
    """Whether these meet more columns than a matrix unit has, and are made before the matmul."""
    f32: bool = False
    """Whether it is a matmul in one pass with an f32 operand that comes from HBM."""
    scoped: float = 0.0
    """Vector memory for its windows by the compiler's flags, bytes; 0 where they don't say."""
    bytes: float = 0.0
    """Bytes of device memory."""
    reads: bool = False
    """Whether an operand that is no scalar lies in device memory."""
    writes: bool = False
    """Whether a result does."""

    def latency(self, slow: Slowdown) -> float:
        """Seconds before its first data and after its last."""
        if slow.vector_memory is None:
            return 0.0
        return (
            self.reads * slow.vector_memory.read_seconds
            + self.writes * slow.vector_memory.write_seconds
        )


def estimated_seconds(parts: Parts, slow: Slowdown) -> float:
    """Seconds of an op: the longest of its parts, and the windows at its ends."""
    compute, moving = compute_seconds(parts, slow), slow.memory * parts.memory
    unhidden = slow.unhidden
    if slow.windows is not None and parts.bytes and not parts.matrix:
        unhidden = max(unhidden, min(slow.windows.fetched_bytes / parts.bytes, 1.0))
    return max(compute, moving) + unhidden * min(compute, moving) + parts.latency(slow)


def compute_seconds(parts: Parts, slow: Slowdown) -> float:
    """Seconds of an op's matrix and vector units together, whatever they wait for."""
    matrix = matrix_slowdown(parts, slow) * parts.matrix * (F32_OPERANDS if parts.f32 else 1.0)
    after, ahead = slow.vector * (parts.vector - parts.ahead), slow.vector * parts.ahead
    apart = slow.ahead * ahead if parts.reused else 0.0
    vector = after if apart else after + ahead
    return max(matrix, vector) + slow.beside * min(matrix, after) + apart


def matrix_slowdown(parts: Parts, slow: Slowdown) -> float:
    """Slowdown of a matmul by the vector memory that its windows have.

    Each window of rows loads all weights again. Rows and columns of a window both grow with the square root of its bytes,
    and the weights' share of its time shrinks with its rows and with the parts that a contraction is cut into.
    """
    if slow.windows is None or parts.scoped <= slow.windows.scoped_bytes:
        return slow.matrix
    return 1.0 + (slow.matrix - 1.0) * (slow.windows.scoped_bytes / parts.scoped) ** 2


def seconds_by_cycles(cycles: float, parts: Parts, slow: Slowdown) -> float:
    """Seconds of an op for which the compiler has an estimate, ``cycles`` in seconds.

    The compiler assumes a quarter to a half of the memory's rate for each array, and on v5p and v6e more vector
    work than chips need, so its cycles are taken where they are below :func:`estimated_seconds`: they know how a
    shape suits the units. A matmul takes no less than its units at their best, and a copy no less than its registers:
    for some transposes libtpu says a tenth of the cycles that its own code takes.
    """
    seconds = max(min(estimated_seconds(parts, slow), cycles), parts.relaid)
    return max(seconds, parts.matrix, slow.memory * parts.memory) if parts.matrix else seconds


def matrix_seconds(work: Work, rates: Rates) -> float:
    """Seconds of the matrix units at their peak, with what their width leaves idle, or of loading what they hold.

    A token of a few texts meets each matrix with fewer rows than it takes cycles to load.
    """
    return max(
        work.matrix(matrix_width(rates.chip)) / rates.peak(work.dtype), _loading(work, rates)
    )


def _loading(work: Work, rates: Rates) -> float:
    """Seconds of loading the units' operands, where ops of the generation were measured by their windows and the catalogue has the cycles."""
    chip = rates.chip
    cycles = dict(chip.mxu_cycles_per_instruction)
    kind = f"lmr_{'i' if work.dtype[0] in 'su' else 'bf'}{min(bits_of(work.dtype), 16)}"
    if slowdown_of(chip.name).windows is None or kind not in cycles:
        return 0.0
    units = (chip.num_mxu_per_core or 1) * cores(rates)
    registers = work.held / (REGISTER * WORD_BITS / 8)
    return registers * cycles[kind] / (units * rates.clock_hz)


def parts_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    work: Work,
    rates: Rates,
    sparse: bool = False,
) -> Parts:
    """Work of an op on each unit, in seconds at the catalogue's rates; ``sparse`` where a SparseCore runs it."""
    slow = slowdown_of(rates.chip.name)
    near, relaid = slow.vector_memory, 0.0
    in_registers = near is not None
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        operations = vector_operations(module, inner, in_registers=in_registers)
        registers = lane_registers(module, inner)
        taken = _taken_in(inner)
        made = [op.shape.elements for op in inner if op.name in taken and op.opcode != "parameter"]
        reused = work.flops > 2.0 * matrix_width(rates.chip) * max(made, default=1)
        ahead = _vector_seconds(
            vector_operations(module, inner, taken, in_registers=in_registers),
            lane_registers(module, inner, taken),
            rates,
        )
    else:
        ahead, reused = 0.0, False
        operations = _of(computation, instruction, in_registers)
        registers = _crossing(computation, instruction)
        if instruction.opcode in UPDATES:
            operations *= _updated(computation, instruction)
    vector = _vector_seconds(operations, registers, rates)
    memory = work.bytes / rates.hbm
    shapes = computation.operand_shapes(instruction)
    reads = any(a.dims and a.bytes_in(HBM) for shape in shapes for a in shape.arrays())
    writes = instruction.shape.bytes_in(HBM) > 0
    if near is not None and not (work.flops or sparse):
        # Results of matmuls leave the matrix units in any order, and SparseCores have no registers of tiles.
        cycles = relaid_cycles(module, computation, instruction, near, fetched=reads)
        relaid = cycles / rates.clock_hz
        vector += relaid
        cycles = max(
            vector * rates.clock_hz,
            moving_cycles(module, computation, instruction, near),
            near.spread_cycles * spread_registers(module, computation, instruction),
        )
        vector = (cycles + near.fetch_cycles * min(cycles, near.code_cycles)) / rates.clock_hz
    return Parts(
        matrix=matrix_seconds(work, rates),
        memory=memory,
        vector=vector,
        relaid=relaid,
        ahead=ahead,
        reused=reused,
        f32=work.dtype == "f32" and work.passes == 1 and _fetches_f32(computation, instruction),
        scoped=rates.scoped,
        bytes=work.bytes,
        reads=reads,
        writes=writes,
    )


def moving_cycles(
    module: Module, computation: Computation, instruction: Instruction, near: VectorMemory
) -> float:
    """Cycles in which operands and results that lie in vector memory pass to registers and back."""
    operands = computation.operand_shapes(instruction)
    held, made = sum(s.bytes_in(VMEM) for s in operands), instruction.shape.bytes_in(VMEM)
    loaded, stored = float(held), float(made)
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        loaded, stored = passed_bytes(module, computation, instruction, inner, VMEM)
    elif instruction.opcode == "slice":
        loaded = min(loaded, stored)
    return max(
        _pieces(operands) * loaded / max(held, 1) / near.loads,
        _pieces([instruction.shape]) * stored / max(made, 1) / near.stores,
    )


def _pieces(shapes: Iterable[Shape]) -> float:
    """Loads or stores of arrays in vector memory: one for each register, or for each tile of fewer rows."""
    arrays = [a for shape in shapes for a in shape.arrays() if a.space == VMEM]
    return sum(
        _tiles(a)
        if len(a.tile) > 1 and a.tile[-2] < SUBLANES
        else a.padded_bytes / (REGISTER * WORD_BITS / 8)
        for a in arrays
    )


def relaid_cycles(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    near: VectorMemory,
    *,
    fetched: bool = False,
) -> float:
    """Cycles in which an op or a fusion gives registers another layout, one for each tile of its arrays.

    ``fetched`` where it reads device memory, whose windows are transposed in larger pieces.
    """
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        return sum(relaid_cycles(module, inner, held, near, fetched=fetched) for held in inner)
    if instruction.opcode not in _LAID:
        return 0.0
    before = next(computation.operand_shapes(instruction)[0].arrays())
    after = next(instruction.shape.arrays())
    if instruction.opcode in _CUT:
        lanes = _CUT[instruction.opcode].findall(
            instruction.attribute(_CUT_BY[instruction.opcode]) or ""
        )
        at = _fastest(after)
        shifted = at < len(lanes) and int(lanes[at]) % LANES
        return near.shift_cycles * min(_tiles(before), _tiles(after)) if shifted else 0.0
    if before.elements != after.elements:
        return 0.0
    tiles = _tiles(before), _tiles(after)
    (lanes, rows), (new_lanes, new_rows) = (_laid(s, instruction) for s in (before, after))
    if lanes != new_lanes:
        return (near.window_cycles if fetched else near.relayout_cycles) * max(tiles)
    # Copies bring together what a tile of the result holds, reshapes and sums over one row take each tile of either array.
    registers = tiles[1] if instruction.opcode in ("copy", "transpose") else max(tiles)
    return near.row_cycles * registers if rows != new_rows else 0.0


def _laid(shape: Shape, instruction: Instruction) -> tuple[int, tuple[int, ...]]:
    """Contents of a register along its lanes, and along its rows: the array's fastest dims, and rows of a tile."""
    order = shape.minor_to_major or tuple(range(len(shape.dims) - 1, -1, -1))
    lanes, *others = [shape.dims[dim] for dim in order if shape.dims[dim] > 1] or [1]
    rows = min(shape.tile[-2] if len(shape.tile) > 1 else 1, SUBLANES)
    if instruction.opcode in ("copy", "transpose"):
        return lanes, (rows, *others[:1])
    # Whole registers along the last dim stay so where it is divided.
    whole = lanes % LANES == 0 and order[0] == len(shape.dims) - 1
    return 0 if whole else lanes, (rows, lanes)


def spread_registers(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Registers that the largest broadcast of an op fills along lanes with values which lie along lanes of a matrix.

    These reach a register's rows one by one, while other broadcasts and operations go on.
    """
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        return max((spread_registers(module, inner, held) for held in inner), default=0.0)
    if instruction.opcode != "broadcast":
        return 0.0
    held = next(computation.operand_shapes(instruction)[0].arrays(), None)
    matrix = held is not None and sum(size > 1 for size in held.dims) > 1
    return _crossing(computation, instruction) if matrix else 0.0


def _tiles(shape: Shape) -> float:
    return (
        math.prod(shape.padded_dims) / min(math.prod(shape.tile) or 1, REGISTER)
        if shape.tile
        else shape.elements / REGISTER
    )


def _fetches_f32(computation: Computation, instruction: Instruction) -> bool:
    """Whether an op reads an f32 matrix from HBM."""
    return any(
        array.dtype == "f32" and len(array.dims) > 1 and array.bytes_in(HBM)
        for shape in computation.operand_shapes(instruction)
        for array in shape.arrays()
    )


def _vector_seconds(operations: float, registers: float, rates: Rates) -> float:
    """Seconds of the vector units, and of the cross-lane units after them."""
    crossing = LANE_CYCLES * registers / (rates.clock_hz * cores(rates))
    return operations / vector_rate(rates) + crossing


def _taken_in(computation: Computation) -> set[str]:
    """Names of what a fusion's matmuls take in, directly or not."""
    taken: set[str] = set()
    for instruction in reversed(list(computation)):
        if instruction.opcode in ("convolution", "dot") or instruction.name in taken:
            taken.update(instruction.operands)
    return taken


def vector_operations(
    module: Module,
    computation: Computation,
    only: Container[str] | None = None,
    *,
    in_registers: bool = False,
) -> float:
    """Vector operations of all elementwise ops and reductions in a fusion, or of those that ``only`` names.

    A fusion computes what its result needs: of an op that is only sliced, the slices; of a buffer that
    is updated in place, the update. ``in_registers`` counts what the registers hold, filled or not.
    """
    total = 0.0
    used, fresh = _used(computation), _fresh(computation)
    for instruction in computation:
        if only is not None and instruction.name not in only:
            continue
        if instruction.opcode in ("fusion", "call"):
            held = "calls" if instruction.opcode == "fusion" else "to_apply"
            callee = module.callee(instruction, held)
            operations = vector_operations(module, callee, in_registers=in_registers)
        else:
            operations = _of(computation, instruction, in_registers)
        total += operations * min(used.get(instruction.name, 0.0), fresh[instruction.name])
    return total


def lane_registers(
    module: Module, computation: Computation, only: Container[str] | None = None
) -> float:
    """Registers that a fusion, or the ops of it that ``only`` names, reduces over their lanes, or fills with one value a row."""
    total = 0.0
    for instruction in computation:
        if only is not None and instruction.name not in only:
            continue
        if instruction.opcode in ("fusion", "call"):
            held = "calls" if instruction.opcode == "fusion" else "to_apply"
            total += lane_registers(module, module.callee(instruction, held))
        else:
            total += _crossing(computation, instruction)
    return total


def _crossing(computation: Computation, instruction: Instruction) -> float:
    """Registers of one reduction over, or broadcast along, the fastest dim.

    Registers along that dim are combined before, or share the row's value.
    """
    named = [int(dim) for dim in _DIM.findall(instruction.attribute("dimensions") or "")]
    if instruction.opcode == "reduce":
        shape = next(computation.operand_shapes(instruction)[0].arrays())
        crosses = bool(shape.dims) and _fastest(shape) in named
    elif instruction.opcode == "broadcast":
        shape = instruction.shape
        crosses = bool(named) and _fastest(shape) not in named
    else:
        return 0.0
    if not crosses:
        return 0.0
    along = -(-shape.dims[_fastest(shape)] // LANES)
    return _tiles(shape) / along


def _used(computation: Computation) -> dict[str, float]:
    """Share of each op's elements that the result needs."""
    shares = {computation.root.name: 1.0}
    for user in reversed(list(computation)):
        share = shares.get(user.name, 0.0)
        for index, name in enumerate(user.operands):
            part, operand = share, computation.index.get(name)
            if index == 0 and operand is not None:
                if user.opcode in ("slice", "dynamic-slice"):
                    part *= user.shape.elements / max(operand.shape.elements, 1)
                elif user.opcode in UPDATES and _moves(operand):
                    part *= _updated(computation, user)
            shares[name] = min(shares.get(name, 0.0) + part, 1.0)
    return shares


def _fresh(computation: Computation) -> dict[str, float]:
    """Share of each op's elements that differ from a buffer which is updated in place."""
    shares: dict[str, float] = {}
    for instruction in computation:
        share = 1.0
        if instruction.opcode in UPDATES:
            share = _updated(computation, instruction)
        elif instruction.operands and _moves(instruction):
            share = shares.get(instruction.operands[0], 1.0)
        shares[instruction.name] = share
    return shares


def _moves(instruction: Instruction) -> bool:
    """Whether it is its operand in another tiling or type."""
    return instruction.opcode in ("copy", "bitcast", "convert") or (
        instruction.opcode == "fusion" and "output_to_operand_aliasing" in instruction.rest
    )


def _updated(computation: Computation, update: Instruction) -> float:
    """Share of the result of an update that is new."""
    part = update_of(computation, update)
    elements = max(next(update.shape.arrays()).elements, 1)
    return 1.0 if part is None else min(part.shape.elements / elements, 1.0)


def _of(computation: Computation, instruction: Instruction, in_registers: bool) -> float:
    """Vector operations of an instruction by elements, or by all that its registers hold."""
    opcode = instruction.opcode
    if opcode in _NONE or instruction.target == PALLAS:
        return 0.0
    if in_registers and opcode in _MOVED:
        return 0.0
    shapes = list(instruction.shape.arrays())
    if opcode.startswith("reduce") or (in_registers and opcode == "convert"):
        shapes += [a for s in computation.operand_shapes(instruction) for a in s.arrays()]
    count = _words if in_registers else lambda shape: shape.elements
    return max(map(count, shapes), default=0) * OPERATIONS.get(opcode, 1)


def _words(shape: Shape) -> float:
    """Words of the registers that hold an array: 16-bit elements are two a word, but not in tiles of few rows."""
    whole = len(shape.tile) > 1 and shape.tile[-2] >= SUBLANES
    return REGISTER * _tiles(shape) * (0.5 if whole and 2 * shape.bits == WORD_BITS else 1.0)


def _fastest(shape: Shape) -> int:
    return shape.minor_to_major[0] if shape.minor_to_major else len(shape.dims) - 1
