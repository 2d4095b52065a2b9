"""Seconds of an op by what the units of a TensorCore have to do for it.

A fusion loads and stores windows of its arrays beside the work on them: it takes the longest of its matrix,
memory and vector time, each at the rate that chips were measured to reach, and a part of the next longest
for the windows at its ends. The rates are fitted to measured operations (benchmarks/operations).
"""

import math
import re
from dataclasses import dataclass

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.shape import HBM
from systolic.sim.calibration import constant, fitted
from systolic.sim.incomplete import PALLAS
from systolic.sim.rates import LANES, REGISTER, Rates, cores, matrix_width, vector_rate
from systolic.sim.traffic import UPDATES, update_of
from systolic.sim.work import Work

_OPS = {
    "exponential": 4,
    "exponential-minus-one": 5,
    "log": 5,
    "log-plus-one": 6,
    "divide": 6,
    "rsqrt": 3,
    "sqrt": 4,
    "tanh": 6,
    "logistic": 6,
    "erf": 10,
    "power": 10,
    "remainder": 8,
    "sine": 15,
    "cosine": 15,
}
"""Vector operations an element; 1 for what is not here. Rough counts of the polynomials; the fit scales them all."""
_DIM = re.compile(r"\d+")
_NONE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "broadcast",
        "iota",
        "reshape",
        "partition-id",
        "convolution",
        "dot",
        "dynamic-update-slice",
    )
)


F32_OPERANDS: float = constant("estimate.f32_operands")
"""Slowdown of a matmul with an f32 operand from HBM, which is fetched and rounded again for each window of columns.

An operand that lies in VMEM costs nothing more: the logits of v6e with f32 activations take 1.0 to 1.08 of the matrix
units' time, as with bf16.
"""
LANE_CYCLES: float = constant("estimate.lane_cycles")


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


def slowdown_of(generation: str) -> Slowdown:
    """Slowdown that was fitted for a generation, or over all of them."""
    return fitted("estimates", Slowdown, generation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Seconds of an op on each unit, at the catalogue's rates."""

    matrix: float
    memory: float
    vector: float
    """Vector and cross-lane units."""
    f32: bool = False
    """Whether it is a matmul in one pass with an f32 operand that comes from HBM."""


def estimated_seconds(parts: Parts, slow: Slowdown) -> float:
    """Seconds of an op: the longest of its parts, and the windows at its ends."""
    matrix = slow.matrix * parts.matrix * (F32_OPERANDS if parts.f32 else 1.0)
    compute = max(matrix, slow.vector * parts.vector)
    moving = slow.memory * parts.memory
    return max(compute, moving) + slow.unhidden * min(compute, moving)


def seconds_by_cycles(cycles: float, parts: Parts, slow: Slowdown) -> float:
    """Seconds of an op for which the compiler has an estimate, ``cycles`` in seconds.

    The compiler assumes a quarter to a half of the memory's rate for each array, and on v5p and v6e more vector
    work than chips need, so its cycles are taken where they are below :func:`estimated_seconds`: they know how a
    shape suits the units. A matmul takes no less than its units at their best.
    """
    seconds = min(estimated_seconds(parts, slow), cycles)
    return max(seconds, parts.matrix, slow.memory * parts.memory) if parts.matrix else seconds


def matrix_seconds(work: Work, rates: Rates) -> float:
    """Seconds of the matrix units at their peak, with what their width leaves idle."""
    return work.matrix(matrix_width(rates.chip)) / rates.peak(work.dtype)


def parts_of(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> Parts:
    """Work of an op on each unit, in seconds at the catalogue's rates."""
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        operations = vector_operations(module, inner)
        registers = lane_registers(module, inner)
    else:
        operations = _of(computation, instruction)
        registers = _crossing(computation, instruction)
        if instruction.opcode in UPDATES:
            operations *= _updated(computation, instruction)
    crossing = LANE_CYCLES * registers / (rates.clock_hz * cores(rates))
    return Parts(
        matrix=matrix_seconds(work, rates),
        memory=work.bytes / rates.hbm,
        vector=operations / vector_rate(rates) + crossing,
        f32=work.dtype == "f32" and work.passes == 1 and _fetches_f32(computation, instruction),
    )


def _fetches_f32(computation: Computation, instruction: Instruction) -> bool:
    """Whether an op reads an f32 matrix from HBM."""
    return any(
        array.dtype == "f32" and len(array.dims) > 1 and array.bytes_in(HBM)
        for shape in computation.operand_shapes(instruction)
        for array in shape.arrays()
    )


def vector_operations(module: Module, computation: Computation) -> float:
    """Vector operations of all elementwise ops and reductions in a fusion.

    A fusion computes what its result needs: of an op that is only sliced, the slices; of a buffer that
    is updated in place, the update.
    """
    total = 0.0
    used, fresh = _used(computation), _fresh(computation)
    for instruction in computation:
        if instruction.opcode in ("fusion", "call"):
            held = "calls" if instruction.opcode == "fusion" else "to_apply"
            operations = vector_operations(module, module.callee(instruction, held))
        else:
            operations = _of(computation, instruction)
        total += operations * min(used.get(instruction.name, 0.0), fresh[instruction.name])
    return total


def lane_registers(module: Module, computation: Computation) -> float:
    """Registers that a fusion reduces over their lanes, or fills with one value a row."""
    total = 0.0
    for instruction in computation:
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
    return math.prod(shape.padded_dims) / REGISTER / along


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


def _of(computation: Computation, instruction: Instruction) -> float:
    opcode = instruction.opcode
    if opcode in _NONE or instruction.target == PALLAS:
        return 0.0
    shapes = list(instruction.shape.arrays())
    if opcode.startswith("reduce"):
        shapes += [a for s in computation.operand_shapes(instruction) for a in s.arrays()]
    return max((s.elements for s in shapes), default=0) * _OPS.get(opcode, 1)


def _fastest(shape: Shape) -> int:
    return shape.minor_to_major[0] if shape.minor_to_major else len(shape.dims) - 1
