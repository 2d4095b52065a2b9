"""Windows of ops as HLO prints them: of reductions, and of gathers' and scatters' slices."""

import re
from collections.abc import Sequence

from systolic.hlo import Instruction

_SIZE = re.compile(r"size=([\dx]+)")
_INT = re.compile(r"\d+")


def window_sizes(instruction: Instruction) -> list[int]:
    """Elements of a reduction's window along each dim; empty where it has none."""
    found = _SIZE.search(instruction.attribute("window") or "")
    return [int(size) for size in found[1].split("x")] if found else []


def slice_sizes(addressed: Instruction, operand: Sequence[int], made: Sequence[int]) -> list[int]:
    """Elements along each dim of the operand that one index of a gather or a scatter addresses.

    Args:
        addressed: The gather or the scatter.
        operand: Dims of what is read or updated.
        made: Dims of a gather's result, or of a scatter's updates.
    """
    if addressed.opcode == "gather":
        sizes = numbers(addressed, "slice_sizes")
        return sizes if len(sizes) == len(operand) else [1] * len(operand)
    single = {
        *numbers(addressed, "inserted_window_dims"),
        *numbers(addressed, "input_batching_dims"),
    }
    left = iter([made[dim] for dim in numbers(addressed, "update_window_dims")])
    return [1 if dim in single else next(left, 1) for dim in range(len(operand))]


def numbers(instruction: Instruction, attribute: str) -> list[int]:
    """Numbers that an attribute lists."""
    return [int(n) for n in _INT.findall(instruction.attribute(attribute) or "")]
