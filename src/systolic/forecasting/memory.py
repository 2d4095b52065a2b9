"""Buffers that hold device memory at the peak of a schedule.

The compiler's own figure is the peak; which buffers are alive then comes from the schedule: an
array lives from the op that makes it to the last that reads it, results that alias an operand
(updates in place, tuples, bitcasts, loops) are no new memory.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.aliases import aliased_operand
from systolic.hlo.origin import named
from systolic.hlo.shape import HBM
from systolic.sim.layers import layer_of, phase_of
from systolic.sim.traffic import UPDATES, buffers_of, kept_operand

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

_PARAMETERS = re.compile(r"(^|\.)(params|model_state)\b|^weights\.(ends|layers)\b")
"""Weights that train and, among other variables, those that are frozen; and those of a server."""
_OPTIMIZER = re.compile(r"\.(optimizer|ema|mu|nu)\b|\bopt_state\b")
_CACHE = re.compile(r"(^|[._'\[])(kv_?)?caches?($|[._'\]\[])|^pages\[", re.IGNORECASE)
_COLLECTIVE = ("all-gather", "all-reduce", "reduce-scatter", "collective", "all-to-all")
_ALIASES = frozenset(
    (
        "bitcast",
        "tuple",
        "get-tuple-element",
        "opt-barrier",
        "while",
        "call",
        "conditional",
        "copy-done",
        "after-all",
    )
)


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


@dataclass(frozen=True, slots=True)
class _Peak:
    bytes: int
    held: tuple[LiveBuffer, ...]


def memory_map(module: Module, peak_bytes: int | None) -> MemoryMap:
    """Memory map at the peak.

    Args:
        module: Scheduled HLO.
        peak_bytes: The compiler's peak; None for text that came without.
    """
    entry = module.entry
    arguments = [_argument(i) for i in entry.parameters]
    inputs = tuple(held for held in arguments if held.bytes)
    peak = _peak(module, entry, {})
    held = sorted((*inputs, *peak.held), key=lambda h: -h.bytes)
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


def _peak(module: Module, computation: Computation, known: dict[str, _Peak]) -> _Peak:
    """The most that is alive in a computation beyond its parameters, and what it is."""
    if computation.name in known:
        return known[computation.name]
    order = computation.instructions
    owners = _owners(module, computation)
    given = _donated(module) if computation.entry else {}
    last: dict[str, int] = {}
    for index, instruction in enumerate(order):
        for name in instruction.operands:
            for owner in owners.get(name, ()):
                last[owner] = index
    for owner in owners.get(computation.root.name, ()):
        last[owner] = len(order)
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        ends.setdefault(index, []).append(name)
    alive: dict[str, int] = {}
    now = best = 0
    at: tuple[dict[str, int], Instruction | None, _Peak | None] = ({}, None, None)
    for index, instruction in enumerate(order):
        size = max(_own_bytes(module, instruction) - given.get(instruction.name, 0), 0)
        inner = None
        if instruction.opcode in ("while", "call", "conditional"):
            inners = [_peak(module, module.computations[n], known) for n in _bodies(instruction)]
            inner = max(inners, key=lambda p: p.bytes, default=None)
        if size and instruction.name in last:
            alive[instruction.name] = size
            now += size
        here = now + (inner.bytes if inner else 0) + (size if instruction.name not in last else 0)
        if here > best:
            best, at = here, (dict(alive), instruction, inner)
        for name in ends.get(index, ()):
            now -= alive.pop(name, 0)
    held = [_held(module, computation, computation[name], size) for name, size in at[0].items()]
    if at[2] is not None:
        held += at[2].held
    known[computation.name] = _Peak(best, tuple(held))
    return known[computation.name]


def _donated(module: Module) -> dict[str, int]:
    """Bytes of each instruction's result that lie in the memory of a donated argument."""
    entry, given = module.entry, Counter[str]()
    parts = entry.root.operands if entry.root.opcode == "tuple" else (entry.root.name,)
    parameters = entry.parameters
    for output, argument in module.donations.items():
        if output >= len(parts) or argument >= len(parameters):
            continue
        made = entry.index.get(parts[output])
        while made is not None and made.opcode in ("bitcast", "get-tuple-element"):
            made = entry.index.get(made.operands[0])
        if made is not None and made.opcode != "parameter":
            given[made.name] += parameters[argument].shape.bytes_in(HBM)
    return given


def _bodies(instruction: Instruction) -> list[str]:
    if instruction.opcode == "while":
        return [instruction.called("body") or ""]
    return instruction.called_computations


def _owners(module: Module, computation: Computation) -> dict[str, tuple[str, ...]]:
    """Instructions whose memory each name's value lies in."""
    owners: dict[str, tuple[str, ...]] = {}
    for instruction in computation:
        opcode = instruction.opcode
        if opcode == "tuple":
            owners[instruction.name] = tuple(
                {o for name in instruction.operands for o in owners.get(name, ())}
            )
        elif opcode == "get-tuple-element":
            source = computation.index.get(instruction.operands[0])
            if source is not None and source.opcode == "tuple":
                owners[instruction.name] = owners.get(source.operands[instruction.tuple_index], ())
            else:
                owners[instruction.name] = owners.get(instruction.operands[0], ())
        elif opcode == "fusion" or opcode in UPDATES:
            kept = _kept(module, instruction)
            lies = {o for number in kept for o in owners.get(instruction.operands[number], ())}
            own = (instruction.name,) if not kept or _own_bytes(module, instruction) else ()
            owners[instruction.name] = (*lies, *own)
        elif opcode in _ALIASES or opcode.endswith("-done"):
            owners[instruction.name] = tuple(
                {o for name in instruction.operands for o in owners.get(name, ())}
            ) or ((instruction.name,) if _own_bytes(module, instruction) else ())
        else:
            owners[instruction.name] = (instruction.name,)
    return owners


def _kept(module: Module, instruction: Instruction) -> list[int]:
    """Numbers of the operands whose memory parts of the result keep."""
    if instruction.opcode in UPDATES:
        return list(range(len(buffers_of(instruction))))
    parts = len(instruction.shape.parts) if instruction.shape.parts is not None else 1
    found = (kept_operand(module, instruction, part) for part in range(parts))
    return [number for number in found if number is not None]


def _own_bytes(module: Module, instruction: Instruction) -> int:
    """HBM that an instruction allocates."""
    opcode = instruction.opcode
    if opcode in ("parameter", *_ALIASES) or opcode.endswith("-done"):
        return 0
    if opcode in UPDATES:
        return 0
    shape = instruction.shape
    if opcode.endswith("-start") and shape.parts is not None:
        # (operand, result, context) or ((operands), result, context): only the result is new.
        return (
            shape.parts[1].bytes_in(HBM)
            if len(shape.parts) > 1 and "copy" not in opcode
            else (shape.parts[0].bytes_in(HBM) if "copy" in opcode else 0)
        )
    if opcode == "fusion":
        parts = shape.parts if shape.parts is not None else (shape,)
        return sum(
            part.bytes_in(HBM)
            for number, part in enumerate(parts)
            if aliased_operand(instruction, number) is None
            and kept_operand(module, instruction, number) is None
        )
    return shape.bytes_in(HBM)


def _filled_by(
    module: Module, computation: Computation, instruction: Instruction
) -> Instruction | None:
    """Result that a loop writes into an array which it was given empty; None for any other array."""
    if instruction.opcode not in ("broadcast", "custom-call"):
        return None
    for loop in computation:
        if loop.opcode != "while" or not loop.operands:
            continue
        given = computation.index.get(loop.operands[0])
        if given is None or given.opcode != "tuple" or instruction.name not in given.operands:
            continue
        body = module.computations[loop.called("body") or ""]
        if body.root.opcode != "tuple":
            return None
        last = body.index.get(body.root.operands[given.operands.index(instruction.name)])
        return None if last is None else named(module, body, last)
    return None


def _held(
    module: Module, computation: Computation, instruction: Instruction, size: int
) -> LiveBuffer:
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
        bytes=size,
        shape=str(instruction.shape),
        layer=layer_of(origin.op_name),
        source=str(source) if source else "",
        op=origin.op_name,
    )
