"""Seconds of an op that the compiler gave no cycles: a schedule without generated code has none.

A matmul takes its matrix time and what of its memory or vector work does not hide under it, each at
a slowdown over the catalogue's rate, fitted to the cycles of whole compiles
(benchmarks/accuracy/fit_estimates.py); the slowdowns stand for the compiler, not for a chip. An op
without a matmul takes its bytes at the effective rate of the memory, or its vector work.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.sim.kernels import vector_rate
from systolic.sim.rates import Rates
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


HBM_SHARE = 0.81
"""Of the catalogue's HBM rate that an op which only moves and maps data reaches: 660 of v5e's 819 GB/s is
the effective rate in the compiler's own cost model."""
TRANSPOSE_SHARE = 0.5
"""The same for a copy that changes the fastest dim, which passes through the cross-lane units. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Of a matmul and what is fused into it: seconds over seconds at the catalogue's rates.

    matrix x matrix seconds + the larger of memory x memory seconds and vector x vector seconds.
    """

    matrix: float
    memory: float
    vector: float


@cache
def _fitted() -> dict[str, Slowdown]:
    table = tomllib.loads((Path(__file__).parent / "estimates.toml").read_text())
    return {name: Slowdown(**row) for name, row in table.items()}


def slowdown_of(generation: str) -> Slowdown:
    """Fitted for a generation, or what was fitted over all of them."""
    fitted = _fitted()
    return fitted.get(generation, fitted["all"])


def estimate(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> float:
    """Seconds of an op on a TensorCore."""
    matrix, memory, vector, transposed = parts(module, computation, instruction, work, rates)
    if matrix:
        slow = slowdown_of(rates.chip.name)
        product = slow.matrix * matrix
        beside = max(slow.memory * memory, slow.vector * vector)
        # A fusion that may keep more of its operands loads and stores beside its product.
        return product + beside - rates.held * min(product, beside)
    slow = slowdown_of("all")
    share = TRANSPOSE_SHARE if transposed else HBM_SHARE
    return max(memory / share, slow.vector * vector)


def parts(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> tuple[float, float, float, float]:
    """Seconds at the catalogue's rates: matrix, memory, vector, and of elements that change lanes."""
    rate = vector_rate(rates)
    if instruction.opcode == "fusion":
        operations = vector_operations(module, module.callee(instruction, "calls"))
    else:
        operations = _of(computation, instruction)
        if instruction.opcode in UPDATES:
            operations *= _updated(computation, instruction)
    transposed = 0
    if instruction.opcode == "copy":
        source = computation.operand_shapes(instruction)
        if source and _fastest(source[0]) != _fastest(instruction.shape):
            transposed = instruction.shape.elements
    return (
        work.flops * work.passes / rates.peak(work.dtype),
        work.bytes / rates.hbm,
        operations / rate,
        transposed / rate,
    )


def vector_operations(module: Module, computation: Computation) -> float:
    """Of all elementwise ops and reductions in a fusion.

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
    if opcode in _NONE:
        return 0.0
    shapes = list(instruction.shape.arrays())
    if opcode.startswith("reduce"):
        shapes += [a for s in computation.operand_shapes(instruction) for a in s.arrays()]
    return max((s.elements for s in shapes), default=0) * _OPS.get(opcode, 1)


def _fastest(shape: Shape) -> int:
    if shape.minor_to_major:
        return shape.minor_to_major[0]
    return len(shape.dims) - 1
