"""Windowed einsums of a step: matmuls whose operand (or result) travels in permutes between partial matmuls.

The SPMD partitioner makes them of a gather and a matmul, or a matmul and a scatter, above a size; as a loop,
or unrolled. On v6e-8 steps with them took 9 to 17 % longer (see :mod:`systolic.chips.flags`).
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

from systolic.chips.flags import SHARED
from systolic.core.units import duration
from systolic.hlo import Module
from systolic.hlo.origin import named
from systolic.sim.timeline import Timeline

LEAST = 2
"""Permutes of one matmul from which they are a window; a single one may reshard a result."""
OFF = next(flag.text for flag in SHARED if "windowed_einsum" in flag.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windowed:
    """The windowed einsums of a step."""

    einsums: int
    """Matmuls of the model, each counted once however often it runs."""
    seconds: float
    """Seconds of the step: their partial matmuls, and what else the core does for them or waits for."""


def names(module: Module) -> Set[str]:
    """Op names of the matmuls that the partitioner has windowed: the permutes that it made bear their names."""
    found: Counter[str] = Counter()
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.opcode in ("collective-permute", "collective-permute-start"):
                name = instruction.op_name
                if name.rpartition("/")[2] == "dot_general":
                    found[name] += 1
    return {name for name, number in found.items() if number >= LEAST}


def windowed(module: Module, timeline: Timeline) -> Windowed | None:
    """The windowed einsums of a simulated step; None where it has none."""
    found = names(module)
    if not found:
        return None
    bearing = {
        instruction.name
        for computation in module.computations.values()
        for instruction in computation
        if named(module, computation, instruction).op_name in found
    }
    seconds = sum(
        span.seconds * times
        for span, times in timeline.leaves()
        if span.lane == "core" and span.name in bearing
    )
    return Windowed(einsums=len(found), seconds=seconds)


def note_of(found: Windowed, step_seconds: float) -> str:
    """One line for people."""
    share = found.seconds / step_seconds if step_seconds else 0.0
    return f"{found.einsums} windowed einsums take {duration(found.seconds)} ({share:.0%}); turn them off with {OFF}"
