"""Mesh axes that a collective runs along."""

from collections.abc import Mapping

import numpy as np

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.collectives import COLLECTIVES
from systolic.hlo.groups import groups_of


def axes_of(
    module: Module, computation: Computation, instruction: Instruction, mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Names of the axes in which members of a group differ; () when the groups do not match the mesh.

    ``mesh`` is axis name to size, outermost first; partition ids count its devices in that order.
    """
    found = _collective(module, computation, instruction)
    sizes = tuple(mesh.values())
    total = int(np.prod(sizes)) if sizes else 0
    if found is None or not total:
        return ()
    groups = groups_of(found, total)
    if not groups.groups or max(max(group) for group in groups.groups) >= total:
        return ()
    places = np.array(np.unravel_index(np.array(groups.groups[0]), sizes)).T
    differ = (places != places[0]).any(axis=0)
    return tuple(name for name, apart in zip(mesh, differ, strict=True) if apart)


def _collective(
    module: Module, computation: Computation, instruction: Instruction
) -> Instruction | None:
    """The instruction that names the groups: itself, or the one that an async op or a fusion holds."""
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        if instruction.opcode.endswith("-done"):
            begun = computation.index.get(instruction.operands[0])
            return None if begun is None else _collective(module, computation, begun)
        return instruction
    name = instruction.called("calls") or instruction.called("to_apply")
    if name is None or name not in module.computations:
        return None
    held = module.computations[name]
    return next(
        (one for one in held if one.opcode.removesuffix("-start") in COLLECTIVES),
        None,
    )
