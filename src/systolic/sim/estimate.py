"""Seconds of an op that the compiler gave no cycles: a schedule without generated code has none.

An op takes the longest of its matrix work, its memory traffic and its vector work, each at a
slowdown over the catalogue's rate. The slowdowns are fitted per generation to the cycles of whole
compiles (benchmarks/accuracy/fit_estimates.py), so they stand for the compiler, not for a chip.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.sim.kernels import vector_rate
from systolic.sim.rates import Rates
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """Seconds over seconds at the catalogue's rate."""

    matrix: float
    memory: float
    vector: float
    transpose: float
    """Of a copy that changes the fastest dim, per element over one vector operation."""


@cache
def _fitted() -> dict[str, Slowdown]:
    table = tomllib.loads((Path(__file__).parent / "estimates.toml").read_text())
    return {name: Slowdown(**row) for name, row in table.items()}


def slowdown_of(generation: str) -> Slowdown:
    """Fitted for a generation, or the mean of those that were."""
    fitted = _fitted()
    if generation in fitted:
        return fitted[generation]
    rows = list(fitted.values())

    def mean(values: list[float]) -> float:
        product = 1.0
        for value in values:
            product *= value
        return product ** (1 / len(values))

    return Slowdown(
        matrix=mean([row.matrix for row in rows]),
        memory=mean([row.memory for row in rows]),
        vector=mean([row.vector for row in rows]),
        transpose=mean([row.transpose for row in rows]),
    )


def estimate(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> float:
    """Seconds of an op on a TensorCore."""
    slow = slowdown_of(rates.chip.name)
    matrix, memory, vector, transposed = parts(module, computation, instruction, work, rates)
    return max(
        slow.matrix * matrix,
        slow.memory * memory,
        slow.vector * vector + slow.transpose * transposed,
    )


def parts(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> tuple[float, float, float, float]:
    """Seconds at the catalogue's rates: matrix, memory, vector, and of elements that change lanes."""
    rate = vector_rate(rates)
    inner = instruction.called("calls") if instruction.opcode == "fusion" else None
    if inner is not None:
        operations = vector_operations(module, module.computations[inner])
    else:
        operations = _of(computation, instruction)
    transposed = 0
    if instruction.opcode == "copy":
        source = computation.operand_shapes(instruction)
        if source and _fastest(source[0]) != _fastest(instruction.shape):
            transposed = instruction.shape.elements
    return (
        work.flops / rates.peak(work.dtype),
        work.bytes / rates.hbm,
        operations / rate,
        transposed / rate,
    )


def vector_operations(module: Module, computation: Computation) -> float:
    """Of all elementwise ops and reductions in a fusion."""
    total = 0.0
    for instruction in computation:
        if instruction.opcode in ("fusion", "call"):
            name = instruction.called("calls") or instruction.called("to_apply") or ""
            total += vector_operations(module, module.computations[name])
        else:
            total += _of(computation, instruction)
    return total


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
