"""What an instruction has to do: FLOPs of the matrix units, bytes of device memory."""

import re
from dataclasses import dataclass
from functools import lru_cache

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.sim.traffic import fusion_bytes, plain_bytes

_WINDOW = re.compile(r"(\w+)=(\S+)")
_PAD = re.compile(r"(-?\d+)_(-?\d+)")


@dataclass(frozen=True, slots=True)
class Work:
    """Of one instruction."""

    flops: float = 0.0
    bytes: float = 0.0
    """HBM bytes read and written."""
    dtype: str = "bf16"
    """Of the matmul's operands."""
    passes: float = 1.0
    """Passes of the matrix units: f32 operands at ``high`` and ``highest`` precision are split into bf16 parts."""


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """FLOPs and HBM bytes; a fusion's are those of what it holds."""
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        flops, dtype, passed = _matmuls(module, inner)
        moved = fusion_bytes(module, computation, instruction, inner)
        return Work(flops, moved, dtype, passed / flops if flops else 1.0)
    if instruction.opcode in ("convolution", "dot"):
        shapes = computation.operand_shapes(instruction)
        moved = plain_bytes(module, computation, instruction)
        passes = _passes(instruction, shapes[0].dtype)
        return Work(_multiply(instruction, shapes), moved, shapes[0].dtype, passes)
    return Work(0.0, plain_bytes(module, computation, instruction))


_PASSES = {"highest": 6.0, "high": 3.0}
"""bf16 products of an f32 matmul (XLA's bf16_6x and bf16_3x); one at the default precision."""


def _passes(instruction: Instruction, dtype: str) -> float:
    if dtype != "f32":
        return 1.0
    asked = instruction.attribute("operand_precision") or "{}"
    return max(_PASSES.get(word.strip(), 1.0) for word in asked.strip("{}").split(","))


def _matmuls(module: Module, computation: Computation) -> tuple[float, str, float]:
    """FLOPs of a computation's matmuls, the operands' dtype, and the FLOPs of all their passes."""
    total, dtype, passed = 0.0, "bf16", 0.0
    for instruction in computation:
        if instruction.opcode in ("convolution", "dot"):
            shapes = computation.operand_shapes(instruction)
            flops = _multiply(instruction, shapes)
            dtype = shapes[0].dtype
            total, passed = total + flops, passed + flops * _passes(instruction, dtype)
        elif instruction.opcode in ("fusion", "call"):
            held = "calls" if instruction.opcode == "fusion" else "to_apply"
            more, of, times = _matmuls(module, module.callee(instruction, held))
            if more:
                total, dtype, passed = total + more, of, passed + times
    return total, dtype, passed


def _multiply(instruction: Instruction, operands: list[Shape]) -> float:
    """FLOPs of a convolution or dot, 2 a multiply-add, padding not counted."""
    out = instruction.shape
    if instruction.opcode == "dot":
        dims = instruction.attribute("lhs_contracting_dims") or "{}"
        contracted = 1
        for dim in re.findall(r"\d+", dims):
            contracted *= operands[0].dims[int(dim)]
        return 2.0 * out.elements * contracted
    labels = instruction.attribute("dim_labels") or ""
    left_text, _, rest = labels.partition("_")
    kernel_text, _, out_text = rest.partition("->")
    window = dict(_WINDOW.findall((instruction.attribute("window") or "{}").strip("{}")))
    size = [int(n) for n in window.get("size", "").split("x") if n]
    count = len(size)
    stride = [int(n) for n in window.get("stride", "x".join("1" * count)).split("x") if n]
    lhs_dilate = [int(n) for n in window.get("lhs_dilate", "x".join("1" * count)).split("x") if n]
    rhs_dilate = [int(n) for n in window.get("rhs_dilate", "x".join("1" * count)).split("x") if n]
    pads = [(int(low), int(high)) for low, high in _PAD.findall(window.get("pad", ""))] or [
        (0, 0)
    ] * count
    valid = 1
    for axis in range(count):
        input_size = operands[0].dims[left_text.index(str(axis))]
        out_size = out.dims[out_text.index(str(axis))]
        valid *= _positions(
            input_size,
            out_size,
            size[axis],
            stride[axis],
            pads[axis][0],
            lhs_dilate[axis],
            rhs_dilate[axis],
        )
    features = operands[1].dims[kernel_text.index("i")]
    batch = out.dims[out_text.index("b")]
    out_features = out.dims[out_text.index("f")]
    groups = int(instruction.attribute("batch_group_count") or 1)
    return 2.0 * valid * features * batch * out_features / 1 / max(groups, 1) * groups


@lru_cache(maxsize=65536)
def _positions(
    input_size: int, out_size: int, window: int, stride: int, low: int, base: int, dilate: int
) -> int:
    """Pairs of an output position and a window position that meet an input element, one spatial axis."""
    dilated = (input_size - 1) * base + 1
    found = 0
    for at in range(window):
        offset = at * dilate - low
        if base == 1:
            # 0 <= out * stride + offset < input_size
            first = max(0, -(offset // stride)) if offset < 0 else 0
            last = (input_size - 1 - offset) // stride
            found += max(0, min(last, out_size - 1) - first + 1)
        else:
            found += sum(
                1
                for out in range(out_size)
                if 0 <= (place := out * stride + offset) < dilated and place % base == 0
            )
    return found
