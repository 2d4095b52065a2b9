"""Which ``-start`` a ``-done`` waits for."""

from collections.abc import Container, Sequence

from systolic.hlo import Computation, Instruction
from systolic.hlo.aliases import aliased_operand


def started(computation: Computation, name: str, pending: Container[str]) -> str | None:
    """Name of the pending ``-start`` whose state an operand carries; None where it carries none."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in pending:
            return at
        if (instruction := computation.index.get(at)) is not None:
            todo.extend(_handed_on(computation, instruction, pending))
    return None


def _handed_on(
    computation: Computation, instruction: Instruction, pending: Container[str]
) -> Sequence[str]:
    """Names of what the value of an instruction is handed on from."""
    if instruction.opcode in ("tuple", "bitcast", "copy", "async-update"):
        return instruction.operands
    if instruction.opcode != "get-tuple-element":
        return ()
    part, source = instruction.tuple_index, computation.index.get(instruction.operands[0])
    if source is not None and source.opcode == "while":
        # What a loop hands out at a place, it takes in at that place.
        source = computation.index.get(source.operands[0])
    if source is None:
        return ()
    if source.opcode == "tuple":
        return source.operands[part : part + 1]
    if source.opcode == "fusion" and source.name not in pending:
        # A fusion between start and done hands the state on, an operand to a result.
        passed = aliased_operand(source, part)
        return () if passed is None else source.operands[passed : passed + 1]
    return (source.name,)
