"""Arrays that hold device memory at the peak of a schedule, by the op that makes each and the last that reads it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from systolic.core.units import gibibytes
from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.module import aliased_operand, named
from systolic.hlo.shape import HBM
from systolic.sim.timeline import layer_of, phase_of
from systolic.sim.traffic import UPDATES, buffers_of, kept_operand

_PASSED_ON = frozenset(("bitcast", "opt-barrier", "while"))
"""Results that lie, part by part, in the memory of the only operand."""
_WITHOUT = frozenset(
    ("parameter", "tuple", "get-tuple-element", "call", "conditional", "after-all")
)
"""Other ops whose results allocate nothing."""

SLOT = 16 << 10
"""Bytes to which the compiler aligns temporaries: offsets of all of them are multiples in its memory usage reports of v4 to TPU7x.

A table of addresses takes one, whatever its size, and hardly two share one: 236 of 236 in a step of 15 MB, 376 of 387 in one of 2.2 GB
(``after_optimizations-buffer-assignment.txt`` of libtpu 0.0.42.1).
"""

_SHARED_TABLES = _PASSED_ON | {"parameter", "get-tuple-element", "call", "conditional"}
"""Ops whose result is a tuple that was made before."""

Key = tuple[str, int]
"""An instruction and the part of its result; 0 of an array."""
Owners = tuple[frozenset[Key], ...]
"""For each part of a value, the allocations that it lies in."""
KINDS = (
    "parameters",
    "optimizer state",
    "cache",
    "inputs",
    "saved activations",
    "gradients",
    "collective buffers",
    "temporaries",
)
HELD = "held outside the step"
"""Kind of the arrays that a program keeps on a device beside the arguments of its step."""
_PARAMETERS = re.compile(r"(^|\.)(params|model_state)\b|^weights\.(ends|layers)\b")
"""Weights that train and, among other variables, those that are frozen; and those of a server."""
_OPTIMIZER = re.compile(r"\.(optimizer|ema|mu|nu)\b|\bopt_state\b")
_CACHE = re.compile(r"(^|[._'\[])(kv_?)?caches?($|[._'\]\[])|^pages\[", re.IGNORECASE)
_COLLECTIVE = ("all-gather", "all-reduce", "reduce-scatter", "collective", "all-to-all")
LARGEST = 12
"""Buffers named in the JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """An allocation that is alive at the peak."""

    computation: Computation
    instruction: Instruction
    part: int
    bytes: int

    @property
    def shape(self) -> Shape:
        """Shape of the part."""
        return _parts(self.instruction.shape)[self.part]


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a computation allocates at a time beyond its parameters, and what that is."""

    bytes: int = 0
    held: tuple[Alive, ...] = ()


def peak_of(module: Module) -> Peak:
    """The peak of a scheduled module beyond its arguments and the tables of its tuples, bytes of one device.

    Each part of a result that is a tuple is an array of its own: an asynchronous collective fusion returns its products and
    the arrays of the gather that goes on beside them, which live longer. No new memory are results that alias an operand
    (updates in place, tuples, bitcasts), what a loop's body makes for its next turn, which takes the place of what the
    last turn left, and outputs that lie in donated arguments. Where any of these would overlap, the compiler has put a copy into the
    schedule.

    A table of addresses for each result that is a tuple is held throughout, in a slot of its own.
    """
    return _Lifetimes(module).peak(module.entry, _given_by_donations(module))


def num_tables(module: Module) -> int:
    """Results of a module's schedule that are tuples with a table of addresses of their own.

    Parameters, loops and parts of tuples have that of what they are given; the table of the entry's result is the caller's.
    """
    return sum(
        _tables_of_lifetimes(instruction)
        for computation in _scheduled(module)
        for instruction in computation
        if computation is not module.entry or instruction is not computation.root
    )


def _tables_of_lifetimes(instruction: Instruction) -> int:
    parts = instruction.shape.parts
    if parts is None or instruction.opcode in _SHARED_TABLES:
        return 0
    # The operands of an asynchronous op are a tuple within that of its start.
    return 1 + any(part.parts is not None for part in parts[:1])


def _scheduled(module: Module) -> list[Computation]:
    """The computations that run op after op: the entry, and what its loops, calls and branches hold."""
    computations, left = {module.entry.name: module.entry}, [module.entry]
    while left:
        for instruction in left.pop():
            if instruction.opcode not in ("while", "call", "conditional"):
                continue
            for name in instruction.called_computations:
                if name not in computations:
                    computations[name] = module.computations[name]
                    left.append(computations[name])
    return list(computations.values())


@dataclass(slots=True)
class _Lifetimes:
    module: Module
    known: dict[str, Peak] = field(default_factory=dict)

    def peak(self, computation: Computation, elsewhere: Mapping[Key, int] | None = None) -> Peak:
        """Peak of a computation; ``elsewhere`` are bytes of allocations that lie in memory that is counted elsewhere."""
        if computation.name in self.known:
            return self.known[computation.name]
        elsewhere = elsewhere or {}
        order = computation.instructions
        ends = _ends(computation, owners_of(self.module, computation))
        read = {key for keys in ends.values() for key in keys}
        alive: dict[Key, int] = {}
        now = best = 0
        at: tuple[dict[Key, int], Peak] = ({}, Peak())
        for index, instruction in enumerate(order):
            over = list(ends.get(index, ()))
            for part, size in enumerate(own_bytes(self.module, instruction)):
                key = (instruction.name, part)
                alive[key] = max(size - elsewhere.get(key, 0), 0)
                now += alive[key]
                if key not in read:
                    over.append(key)
            inner = self._inside(instruction)
            if now + inner.bytes > best:
                best, at = now + inner.bytes, (dict(alive), inner)
            for key in over:
                now -= alive.pop(key, 0)
        held = [
            Alive(computation=computation, instruction=computation[name], part=part, bytes=size)
            for (name, part), size in at[0].items()
            if size
        ]
        self.known[computation.name] = Peak(best, (*held, *at[1].held))
        return self.known[computation.name]

    def _inside(self, instruction: Instruction) -> Peak:
        """Peak inside of a loop, a call or a branch."""
        if instruction.opcode == "while":
            body = self.module.computations[instruction.called("body") or ""]
            return self.peak(body, _given_by_carry(self.module, body))
        if instruction.opcode not in ("call", "conditional"):
            return Peak()
        inside = [self.peak(self.module.computations[n]) for n in instruction.called_computations]
        return max(inside, key=lambda peak: peak.bytes, default=Peak())


def _ends(computation: Computation, owners: Mapping[str, Owners]) -> dict[int, list[Key]]:
    """Allocations by the index of the instruction that reads them last."""
    last: dict[Key, int] = {}
    for index, instruction in enumerate(computation.instructions):
        if instruction.opcode == "get-tuple-element":  # it reads one part alone
            last |= dict.fromkeys(_all(owners[instruction.name]), index)
            continue
        for name in instruction.operands:
            last |= dict.fromkeys(_all(owners.get(name, ())), index)
    last |= dict.fromkeys(_all(owners[computation.root.name]), len(computation.instructions))
    ends: dict[int, list[Key]] = {}
    for key, index in last.items():
        ends.setdefault(index, []).append(key)
    return ends


def undonated_bytes(module: Module) -> int:
    """Bytes of results of the shape of arguments that are not donated: a step that replaces them could reuse their memory."""
    donated = set(module.donations.values())
    free = Counter(
        str(parameter.shape)
        for number, parameter in enumerate(module.entry.parameters)
        if number not in donated and parameter.shape.parts is None
    )
    kept = 0
    for number, array in enumerate(module.entry.root.shape.arrays()):
        if number not in module.donations and free[str(array)] and array.space == HBM:
            free[str(array)] -= 1
            kept += array.padded_bytes
    return kept


def _given_by_donations(module: Module) -> dict[Key, int]:
    """Bytes of each allocation that lie in the memory of a donated argument."""
    owners = owners_of(module, module.entry)[module.entry.root.name]
    parameters, donated = module.entry.parameters, Counter[Key]()
    for output, argument in module.donations.items():
        if output < len(owners) and argument < len(parameters):
            for key in owners[output]:
                donated[key] += parameters[argument].shape.bytes_in(HBM)
    return donated


def _given_by_carry(module: Module, body: Computation) -> dict[Key, int]:
    """Bytes of each allocation of a loop's body that lie in the memory of what the loop carries."""
    parts = _parts(body.root.shape)
    owners = owners_of(module, body)[body.root.name]
    return {
        key: shape.bytes_in(HBM) for shape, keys in zip(parts, owners, strict=False) for key in keys
    }


def owners_of(module: Module, computation: Computation) -> dict[str, Owners]:
    """For each value, the allocations of the computation that its parts lie in."""
    owners: dict[str, Owners] = {}
    for instruction in computation:
        parts = _owners(module, computation, instruction, owners)
        count = len(_parts(instruction.shape))
        owners[instruction.name] = parts if len(parts) == count else (_all(parts),) * count
    return owners


def _owners(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    owners: Mapping[str, Owners],
) -> Owners:
    """The allocations of each part of a result, or of all parts together where they can't be told apart."""
    inputs = [owners.get(name, ()) for name in instruction.operands]
    opcode = instruction.opcode
    match opcode:
        case "tuple":
            return tuple(map(_all, inputs))
        case "get-tuple-element":
            parts = inputs[0] if inputs else ()
            index = instruction.tuple_index
            return (parts[index] if index < len(parts) else _all(parts),)
        case _ if opcode in _PASSED_ON:
            return inputs[0] if inputs else ()
        case _ if opcode in UPDATES:
            return tuple(_all(owners.get(name, ())) for name in buffers_of(instruction))
        case _ if opcode.endswith("-done"):
            # The result of an asynchronous op: the part of its start that is new.
            start = computation.index.get(instruction.operands[0]) if instruction.operands else None
            if start is None or not start.opcode.endswith("-start") or not inputs[0]:
                return (_union(inputs),)
            if start.opcode == "all-reduce-start":
                return inputs[0]
            return (inputs[0][min(_new_part(start), len(inputs[0]) - 1)],)
        case "after-all" | "call" | "conditional":
            return (_union(inputs),)
    sizes = own_bytes(module, instruction)
    allocations = []
    for part, size in enumerate(sizes):
        number = _operand_of(module, instruction, part)
        if number is not None and number < len(inputs):
            allocations.append(_all(inputs[number]))
        elif opcode.endswith("-start") and not size:
            allocations.append(_union(inputs))  # the operands, which are read until the end
        else:
            allocations.append(frozenset([(instruction.name, part)] if size else []))
    return tuple(allocations)


def _new_part(start: Instruction) -> int:
    """Part of the result of a start that is new: (operands, result, context), and (result, operand, context) of a copy."""
    return 0 if "copy" in start.opcode or start.shape.parts is None else 1


def _operand_of(module: Module, instruction: Instruction, part: int) -> int | None:
    """Number of the operand in whose memory a part of a result lies; None where it has its own."""
    if instruction.opcode == "fusion":
        passed = aliased_operand(instruction, part)
        return passed if passed is not None else kept_operand(module, instruction, part)
    return aliased_operand(instruction, part) if instruction.opcode == "custom-call" else None


def own_bytes(module: Module, instruction: Instruction) -> list[int]:
    """HBM that each part of a result allocates."""
    opcode, parts = instruction.opcode, _parts(instruction.shape)
    none = [0] * len(parts)
    if opcode in _WITHOUT or opcode in _PASSED_ON or opcode in UPDATES or opcode.endswith("-done"):
        return none
    if opcode.endswith("-start") and opcode != "all-reduce-start" and len(parts) > 1:
        number = _new_part(instruction)
        return [part.bytes_in(HBM) if i == number else 0 for i, part in enumerate(parts)]
    if opcode in ("fusion", "custom-call"):
        return [
            part.bytes_in(HBM) if _operand_of(module, instruction, number) is None else 0
            for number, part in enumerate(parts)
        ]
    return [part.bytes_in(HBM) for part in parts]


def _parts(shape: Shape) -> tuple[Shape, ...]:
    return shape.parts if shape.parts is not None else (shape,)


def _all(parts: Owners) -> frozenset[Key]:
    return parts[0] if len(parts) == 1 else frozenset(key for part in parts for key in part)


def _union(values: Sequence[Owners]) -> frozenset[Key]:
    return frozenset(key for value in values for part in value for key in part)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBuffer:
    """A buffer that is alive at the peak."""

    name: str
    kind: str
    bytes: int
    shape: str
    layer: str
    source: str
    op: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMap:
    """Device memory at the peak."""

    peak_bytes: int
    """The compiler's figure where it is known, else the schedule's."""
    estimated_bytes: int
    """Peak by the schedule alone, bytes."""
    by_kind: Mapping[str, int]
    """Sums to ``peak_bytes``; what the schedule doesn't explain is ``temporaries``."""
    buffers: Sequence[LiveBuffer]
    """Largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """Memory that a program needs and a device does not have."""

    space: str = "hbm"
    """``hbm``, ``vmem`` or ``smem``."""
    need_bytes: int
    """Bytes of a device; 0 where the compiler names no number."""
    have_bytes: int
    buffers: Sequence[LiveBuffer] = ()
    """The largest, largest first; empty where the compiler names none."""
    remedies: Sequence[str] = ()
    """Next steps, a line each."""

    @classmethod
    def of(cls, memory: MemoryMap, have_bytes: int, remedy: str) -> "MemoryShortage":
        """Shortage of a device for a memory map; ``remedy`` is the next step."""
        return cls(
            need_bytes=memory.peak_bytes,
            have_bytes=have_bytes,
            buffers=memory.buffers[:LARGEST],
            remedies=[f"{gibibytes(memory.peak_bytes - have_bytes)} less: {remedy}"],
        )

    def __str__(self) -> str:
        """``needs 20.50 GiB of hbm, 15.75 GiB available``."""
        return f"needs {gibibytes(self.need_bytes)} of {self.space}, {gibibytes(self.have_bytes)} available"

    def to_json(self) -> dict[str, Any]:
        """The published names."""
        return {
            "space": self.space,
            "need_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
            "buffers": [
                {"bytes": b.bytes, "op": b.op, "shape": b.shape, "source": b.source, "kind": b.kind}
                for b in self.buffers
            ],
            "remedies": list(self.remedies),
        }


def memory_map(module: Module, peak_bytes: int | None) -> MemoryMap:
    """Memory map at the peak.

    The compiler's own figure is the peak; which arrays are alive then comes from the schedule.

    Args:
        module: Scheduled HLO.
        peak_bytes: The compiler's peak; None for text that came without.
    """
    entry = module.entry
    arguments = [_argument(i) for i in entry.parameters]
    inputs = tuple(held for held in arguments if held.bytes)
    at_peak = [_held(module, alive) for alive in peak_of(module).held]
    held = sorted((*inputs, *at_peak, *_tables(module)), key=lambda h: -h.bytes)
    estimated = sum(h.bytes for h in held)
    total = peak_bytes or estimated
    by_kind: Counter[str] = Counter()
    for buffer in held:
        by_kind[buffer.kind] += buffer.bytes
    excess = sum(by_kind.values()) - total
    if excess <= 0:
        by_kind["temporaries"] -= excess
    else:
        # The compiler shares memory better than lifetimes alone tell: take it off what is held least fixed.
        for kind in reversed(KINDS):
            less = min(excess, by_kind[kind])
            by_kind[kind] -= less
            excess -= less
    return MemoryMap(
        peak_bytes=total,
        estimated_bytes=estimated,
        by_kind={kind: by_kind[kind] for kind in KINDS if by_kind[kind] > 0},
        buffers=held,
    )


def _tables(module: Module) -> list[LiveBuffer]:
    """Tables of addresses, a slot each, as one buffer."""
    number = num_tables(module)
    if not number:
        return []
    return [
        LiveBuffer(
            name="tables of tuples",
            kind="temporaries",
            bytes=number * SLOT,
            shape=f"{number} x u8[{SLOT}]",
            layer="",
            source="",
            op="",
        )
    ]


def with_held(memory: MemoryMap, arrays: Sequence[LiveBuffer], size: int) -> MemoryMap:
    """A memory map with what the program holds beside the step; ``arrays`` are the largest of those ``size`` bytes of a device."""
    if not size:
        return memory
    return MemoryMap(
        peak_bytes=memory.peak_bytes + size,
        estimated_bytes=memory.estimated_bytes + size,
        by_kind={HELD: size, **memory.by_kind},
        buffers=sorted((*arrays, *memory.buffers), key=lambda buffer: -buffer.bytes),
    )


def _argument(parameter: Instruction) -> LiveBuffer:
    path = parameter.op_name or parameter.name
    return LiveBuffer(
        name=parameter.name,
        kind=state_of(path) or "inputs",
        bytes=parameter.shape.bytes_in(HBM),
        shape=str(parameter.shape),
        layer=_leaf(path),
        source="",
        op=path,
    )


def state_of(path: str) -> str | None:
    """Part of a train or decode state that an argument's path names."""
    if _PARAMETERS.search(path):
        return "parameters"
    if _OPTIMIZER.search(path):
        return "optimizer state"
    return "cache" if _CACHE.search(path) else None


def kind_of(op_name: str, label: str, outside_loops: bool = True) -> str:
    """Kind of a buffer, from the path of JAX names of the op that makes it and the op's own name.

    Inside a loop what an iteration makes is gone after it, so it counts as temporary.
    """
    phase = phase_of(op_name)
    if any(word in label for word in _COLLECTIVE):
        return "collective buffers"
    if phase == "forward" and outside_loops:
        return "saved activations"
    if phase == "backward" and outside_loops:
        return "gradients"
    return "temporaries"


def _leaf(path: str) -> str:
    inside = path.partition("['")[2]
    return inside.partition("']")[0] if inside else path


def _filled_by(
    module: Module, computation: Computation, instruction: Instruction
) -> Instruction | None:
    """Result that a loop writes into an array which it was given empty; None for any other array."""
    if instruction.opcode not in ("broadcast", "custom-call"):
        return None
    for loop in computation:
        if loop.opcode != "while" or not loop.operands:
            continue
        initial = computation.index.get(loop.operands[0])
        if initial is None or initial.opcode != "tuple" or instruction.name not in initial.operands:
            continue
        body = module.computations[loop.called("body") or ""]
        if body.root.opcode != "tuple":
            return None
        last = body.index.get(body.root.operands[initial.operands.index(instruction.name)])
        return None if last is None else named(module, body, last)
    return None


def _held(module: Module, alive: Alive) -> LiveBuffer:
    computation, instruction = alive.computation, alive.instruction
    origin = named(module, computation, instruction)
    filled = _filled_by(module, computation, instruction)
    if filled is not None:
        origin = filled  # a stack of what each turn of a loop leaves: known by what fills it
    source = module.source(origin)
    outside = computation.entry or filled is not None
    kind = kind_of(origin.op_name, f"{instruction.opcode} {instruction.name}", outside)
    return LiveBuffer(
        name=instruction.name,
        kind=kind,
        bytes=alive.bytes,
        shape=str(alive.shape),
        layer=layer_of(origin.op_name),
        source=str(source) if source else "",
        op=origin.op_name,
    )
