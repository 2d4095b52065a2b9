"""Bytes of device memory that an instruction reads and writes.

A fusion computes what its results need: of an operand that is only sliced it reads the slices. An
update in place (dynamic-update-slice, scatter) moves what it updates and leaves the rest of the
buffer where it lies; a result that is an operand, passed on in the same memory, moves nothing.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.groups import COLLECTIVES
from systolic.hlo.module import shared_operand
from systolic.hlo.shape import HBM
from systolic.sim.rates import LANES

UPDATES = frozenset(("dynamic-update-slice", "scatter"))
"""Ops whose result takes the memory of the buffer that they update; XLA copies it before where it can't."""
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_RENAMES = frozenset(("bitcast", "copy", "reshape"))
_PASSING = ("AsyncCollectiveStart", "AsyncCollectiveDone")
WORD_BITS = 32
"""An array's rows lie in memory as words of 32 bits, as many to a row of a tile as the vector unit has lanes."""


def plain_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """HBM bytes of an instruction that is no fusion."""
    opcode, out = instruction.opcode, instruction.shape
    if opcode in _SLICES:
        return float(2 * out.bytes_in(HBM))
    if opcode == "dynamic-update-slice":
        update = computation.index.get(instruction.operands[1])
        return 2.0 * (update.shape.padded_bytes if update else 0)
    shapes = computation.operand_shapes(instruction)
    if opcode == "scatter":
        buffers = len(buffers_of(instruction))
        read = sum(shape.bytes_in(HBM) for shape in shapes[buffers:])
        return read + updated_bytes(module, computation, instruction)
    return float(sum(shape.bytes_in(HBM) for shape in shapes) + out.bytes_in(HBM))


def fusion_bytes(
    module: Module, computation: Computation, fusion: Instruction, inner: Computation
) -> float:
    """HBM bytes of a fusion that holds ``inner``."""
    return sum(passed_bytes(module, computation, fusion, inner))


def passed_bytes(
    module: Module,
    computation: Computation,
    fusion: Instruction,
    inner: Computation,
    space: int = HBM,
) -> tuple[float, float]:
    """Bytes of a memory space that a fusion reads and writes."""
    total = 0.0
    for number, parameter in enumerate(inner.parameters):
        if number >= len(fusion.operands):
            break
        outside = computation.index.get(fusion.operands[number])
        shape = outside.shape if outside is not None else parameter.shape
        here = float(shape.bytes_in(space))
        if here:
            total += _read(module, inner, fusion, number, here)
    return total, sum(_written(module, inner, fusion, space))


def written_bytes(module: Module, instruction: Instruction) -> float:
    """HBM bytes that an instruction writes."""
    if instruction.opcode == "fusion":
        return sum(_written(module, module.callee(instruction, "calls"), instruction, HBM))
    return float(instruction.shape.bytes_in(HBM))


def bytes_read(module: Module, inner: Computation, parameter: Instruction, size: float) -> float:
    """Bytes of a fusion's parameter that it reads: slices of it only, or nothing where it is updated in place."""
    reading = _reading(module, inner, parameter, size)
    return min(reading.bytes, size)


def kept_operand(module: Module, fusion: Instruction, part: int) -> int | None:
    """Number of the operand in whose memory a part of a fusion's result lies; None where it has its own."""
    inner = module.callee(fusion, "calls")
    results = _results(inner)
    result = results[part] if part < len(results) else None
    if _stays(module, inner, fusion, part, result) is None:
        return None
    origin, _, _ = _origin(module, inner, result)
    return int(origin.operands[0]) if origin is not None else shared_operand(fusion, part)


def buffers_of(update: Instruction) -> tuple[str, ...]:
    """Names of the buffers that an update writes into: the first operand, or a scatter's first ones."""
    if update.opcode != "scatter":
        return update.operands[:1]
    return update.operands[: max(len(update.operands) // 2, 1)]


def update_of(computation: Computation, update: Instruction) -> Instruction | None:
    """The new values of an update: of a scatter with several buffers those of the first."""
    at = len(buffers_of(update)) + 1 if update.opcode == "scatter" else 1
    return computation.index.get(update.operands[at]) if at < len(update.operands) else None


def updated_bytes(module: Module, computation: Computation, update: Instruction) -> float:
    """Bytes that an update in place reads and writes of its buffer.

    A window of a scatter that fills whole words is written; one that is combined with what is there,
    or that shares words of 32 bits with its neighbours, is read before.
    """
    new = update_of(computation, update)
    if new is None:
        return float(update.shape.padded_bytes)
    if update.opcode != "scatter":
        return float(new.shape.padded_bytes)
    buffer = next(update.shape.arrays())
    window = [new.shape.dims[dim] for dim in _numbers(update, "update_window_dims")]
    windows = new.shape.elements / max(math.prod(window), 1)
    single = {*_numbers(update, "inserted_window_dims"), *_numbers(update, "input_batching_dims")}
    left = iter(window)
    sizes = [1 if dim in single else next(left, 1) for dim in range(len(buffer.dims))]
    order = buffer.minor_to_major or tuple(range(len(sizes) - 1, -1, -1))
    packed = max(WORD_BITS // max(buffer.bits, 1), 1)
    filled = list(sizes)
    for dim, unit in zip(order, (LANES, packed), strict=False):
        filled[dim] = min(-(-sizes[dim] // unit) * unit, max(buffer.padded_dims[dim], 1))
    touched = min(windows * math.prod(filled) * buffer.bits / 8, float(buffer.padded_bytes))
    read_before = filled != sizes or _combines(module, update)
    return len(buffers_of(update)) * touched * (2.0 if read_before else 1.0)


def _numbers(instruction: Instruction, attribute: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", instruction.attribute(attribute) or "")]


def _combines(module: Module, scatter: Instruction) -> bool:
    """Whether new values are combined with those that are there; plain ones replace them."""
    held = module.callee(scatter, "to_apply")
    value: Instruction | None = held.root
    while value is not None and value.opcode in ("bitcast", "copy", "convert"):
        value = held.index.get(value.operands[0])
    return value is None or value.opcode not in ("parameter", "tuple")


@dataclass
class _ReadBytes:
    """Bytes that a computation reads of one of its values, and the results that hand the value on."""

    bytes: float = 0.0
    results: list[int] = field(default_factory=list)
    """Parts of the root that are the value itself, updated in place or not."""


def _reading(module: Module, inner: Computation, value: Instruction, size: float) -> _ReadBytes:
    """Uses of a value through what renames, retiles or updates it."""
    users = _users(inner)
    reads = _ReadBytes()
    todo: list[tuple[Instruction, int | None]] = [(value, None)]
    seen: set[tuple[str, int | None]] = set()
    while todo:
        at, index = todo.pop()
        if (at.name, index) in seen:
            continue
        seen.add((at.name, index))
        if at.name == inner.root.name:
            reads.results.append(index or 0)
        for use in users.get(at.name, ()):
            if use.opcode == "get-tuple-element":
                if index is None or use.tuple_index == index:
                    todo.append((use, None))
            elif use.opcode in _RENAMES or use.opcode == "pad":
                todo.append((use, None))
            elif use.opcode == "tuple":
                todo.extend((use, n) for n, name in enumerate(use.operands) if name == at.name)
            elif use.opcode in UPDATES and at.name in buffers_of(use):
                todo.append((use, None))
            elif use.opcode in _SLICES and use.operands[0] == at.name:
                reads.bytes += use.shape.padded_bytes * _unpadded(inner, at, use)
            elif use.opcode == "fusion":
                more, passed = _nested(module, use, at.name, size)
                reads.bytes += more
                todo.extend((use, n if use.shape.is_tuple else None) for n in passed)
            elif use.opcode not in COLLECTIVES and use.target not in _PASSING:
                reads.bytes += size
    return reads


def _unpadded(inner: Computation, value: Instruction, part: Instruction) -> float:
    """Share of a slice of a value that is no padding, as windows of an einsum have it."""
    if value.opcode != "pad":
        return 1.0
    whole = inner.index[value.operands[0]].shape.dims
    return math.prod(min(n / m, 1.0) for m, n in zip(part.shape.dims, whole, strict=True))


def _nested(module: Module, fusion: Instruction, name: str, size: float) -> tuple[float, list[int]]:
    """Bytes that a fusion inside a fusion reads of an operand, and the results that pass it on."""
    held = module.callee(fusion, "calls")
    total, passed = 0.0, list[int]()
    for operand, parameter in zip(fusion.operands, held.parameters, strict=False):
        if operand == name:
            reading = _reading(module, held, parameter, size)
            total += reading.bytes
            passed += reading.results
    return total, passed


def _read(
    module: Module, inner: Computation, fusion: Instruction, number: int, size: float
) -> float:
    """Bytes of a fusion's operand that it reads."""
    reading = _reading(module, inner, inner.parameters[number], size)
    total = reading.bytes
    for part, result in enumerate(_results(inner)):
        if part in reading.results and _stays(module, inner, fusion, part, result) is None:
            total += size  # handed on, but in other memory or another layout
    return min(total, size)


def _written(
    module: Module, inner: Computation, fusion: Instruction, space: int
) -> Iterator[float]:
    """Bytes of each result in a memory space."""
    shapes = list(fusion.shape.parts) if fusion.shape.parts is not None else [fusion.shape]
    for part, (shape, result) in enumerate(zip(shapes, _results(inner), strict=False)):
        here = float(shape.bytes_in(space))
        updated = _stays(module, inner, fusion, part, result)
        yield here if updated is None else min(here, updated)


def _results(inner: Computation) -> list[Instruction | None]:
    root = inner.root
    if root.opcode == "tuple":
        return [inner.index.get(name) for name in root.operands]
    return [root]


def _stays(
    module: Module,
    inner: Computation,
    fusion: Instruction,
    part: int,
    result: Instruction | None,
) -> float | None:
    """Bytes that updates write into a result which keeps an operand's memory; None where it has its own."""
    operand = shared_operand(fusion, part)
    if result is not None and (result.opcode in COLLECTIVES or result.target in _PASSING):
        return None if operand is None else 0.0  # the collective's own transfer fills it
    origin, moved, updated = _origin(module, inner, result)
    if origin is None or (updated is None and operand is None):
        return None
    if operand is not None and int(origin.operands[0]) != operand:
        return None
    shapes = fusion.shape.parts if fusion.shape.parts is not None else (fusion.shape,)
    return None if moved and origin.shape != shapes[part] else updated or 0.0


def _origin(
    module: Module, inner: Computation, value: Instruction | None
) -> tuple[Instruction | None, bool, float | None]:
    """The parameter that a value is, whether it was copied on the way, and the bytes that updates of it move.

    The bytes are None where nothing updates it.
    """
    moved, updated = False, None
    while value is not None and value.opcode != "parameter":
        if value.opcode in UPDATES:
            updated = (updated or 0.0) + updated_bytes(module, inner, value)
        elif value.opcode == "fusion" and not value.shape.is_tuple:
            held = module.callee(value, "calls")
            within, copied, more = _origin(module, held, held.root)
            if within is None or not within.operands:
                return None, moved, updated
            moved = moved or copied
            updated = updated if more is None else (updated or 0.0) + more
            value = inner.index.get(value.operands[int(within.operands[0])])
            continue
        elif value.opcode not in _RENAMES:
            return None, moved, updated
        moved = moved or value.opcode == "copy"
        value = inner.index.get(value.operands[0])
    return value, moved, updated


def _users(inner: Computation) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for instruction in inner:
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    return users
