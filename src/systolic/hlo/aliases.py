"""Which results lie in the memory of which operands."""

import re

from systolic.hlo.module import Instruction

_SHARED = re.compile(r'"indices":\["(\d+)","(\d+)"\]')
_PAIR = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+)")


def aliases_of(instruction: Instruction) -> dict[int | None, int]:
    """Part of the result (None: the whole of it) to operand number; empty when nothing aliases.

    Reads ``output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}``; deeper parts count as the
    outermost one they are in.
    """
    text = instruction.attribute("output_to_operand_aliasing")
    if text is None:
        return {}
    found: dict[int | None, int] = {}
    for part, operand in _PAIR.findall(text):
        found.setdefault(int(part.split(",")[0]) if part.strip() else None, int(operand))
    return found


def aliased_operand(instruction: Instruction, part: int) -> int | None:
    """The operand in whose memory a part of the result lies; None when it has its own."""
    found = aliases_of(instruction)
    return found.get(part, found.get(None))


def shared_operand(instruction: Instruction, part: int) -> int | None:
    """The operand whose buffer a part of the result takes, whether it passes it on or overwrites it.

    Reads ``output_to_operand_aliasing`` and, after it, libtpu's
    ``"aliasing_operands":{"lists":[{"indices":["0","3"]}]}``: numbers of operands, those from the
    number of operands on being parts of the result.
    """
    if (passed := aliased_operand(instruction, part)) is not None:
        return passed
    start = instruction.rest.find('"aliasing_operands"')
    if start < 0:
        return None
    result = len(instruction.operands) + part
    for operand, other in _SHARED.findall(instruction.rest, start):
        if int(other) == result and int(operand) < len(instruction.operands):
            return int(operand)
    return None
