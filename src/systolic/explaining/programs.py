"""Compiled programs that a profile holds, as the simulator needs them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from systolic.compiling.kernels import counted_elsewhere
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.collectives import COLLECTIVES
from systolic.profile.line import replica_groups
from systolic.profile.table import OpRow, ProfileTable
from systolic.sim.incomplete import PALLAS

ALL = "replica_groups={}"
"""Groups of a collective over all devices, and what JAX reads of compact groups in a profile's module."""
ALONE = "replica_groups={{0}}"


def programs_of(table: ProfileTable) -> Mapping[str, Module]:
    """Program to its module, with the work of its Pallas kernels counted; none of a profile without modules."""
    rows: dict[str, list[OpRow]] = {}
    for row in table.ops:
        if row.op.module is not None:
            rows.setdefault(row.program, []).append(row)
    return {
        name: with_kernels(with_groups(of[0].op.module, of))
        for name, of in rows.items()
        if of[0].op.module is not None
    }


def with_groups(module: Module, rows: Iterable[OpRow]) -> Module:
    """The module with the device groups of its collectives from the lines of its ops.

    Of groups in the compact form ``[4,2]<=[8]`` nothing is left once JAX has read a module, and no groups mean all
    devices. A collective without a line of its own, such as one inside an asynchronous op, gets a group of one device: it
    costs next to nothing, rather than what all devices together would cost.
    """
    lines = {row.op.raw.name: replica_groups(row.op.raw.text) for row in rows}

    def told(one: Instruction) -> Instruction:
        if one.opcode.removesuffix("-start") not in COLLECTIVES or ALL not in one.rest:
            return one
        return replace(one, rest=one.rest.replace(ALL, lines.get(one.name) or ALONE, 1))

    return replace(
        module, computations={name: _with(held, told) for name, held in module.computations.items()}
    )


def with_kernels(module: Module) -> Module:
    """The module with the work of its Pallas kernels beside their code, as of a dump that is forecast.

    A child process reads the code, where there is some.
    """
    calls = [
        call for held in module.computations.values() for call in held if call.target == PALLAS
    ]
    counted = counted_elsewhere("\n".join(call.rest for call in calls)).rstrip("\n").split("\n")
    if len(counted) != len(calls):
        return module  # without kernels, or of a version whose code this one can't read
    texts = {call.name: text for call, text in zip(calls, counted, strict=True)}

    def told(one: Instruction) -> Instruction:
        return replace(one, rest=texts[one.name]) if one.name in texts else one

    return replace(
        module, computations={name: _with(held, told) for name, held in module.computations.items()}
    )


def _with(held: Computation, told: Callable[[Instruction], Instruction]) -> Computation:
    made = [told(one) for one in held]
    return replace(held, instructions=made, index={one.name: one for one in made})
