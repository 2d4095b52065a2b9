"""Buffers that hold device memory at the peak of a schedule.

The compiler's own figure is the peak; which buffers are alive then comes from the schedule: an
array lives from the op that makes it to the last that reads it, results that alias an operand
(updates in place, tuples, bitcasts, loops) are no new memory.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systolic.forecasting.lifetimes import SLOT, Alive, num_tables, peak_of
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.origin import named
from systolic.hlo.shape import HBM
from systolic.sim.layers import layer_of, phase_of

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


def memory_map(module: Module, peak_bytes: int | None) -> MemoryMap:
    """Memory map at the peak.

    Args:
        module: Scheduled HLO.
        peak_bytes: The compiler's peak; None for text that came without.
    """
    entry = module.entry
    arguments = [_argument(i) for i in entry.parameters]
    inputs = tuple(held for held in arguments if held.bytes)
    made = [_held(module, alive) for alive in peak_of(module).held]
    held = sorted((*inputs, *made, *_tables(module)), key=lambda h: -h.bytes)
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
        given = computation.index.get(loop.operands[0])
        if given is None or given.opcode != "tuple" or instruction.name not in given.operands:
            continue
        body = module.computations[loop.called("body") or ""]
        if body.root.opcode != "tuple":
            return None
        last = body.index.get(body.root.operands[given.operands.index(instruction.name)])
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
