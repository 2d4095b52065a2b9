"""What an instruction has to do: FLOPs of the matrix units, bytes of device memory."""

import re
from dataclasses import dataclass
from functools import lru_cache

from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.hlo.shape import HBM

_WINDOW = re.compile(r"(\w+)=(\S+)")
_PAD = re.compile(r"(-?\d+)_(-?\d+)")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True, slots=True)
class Work:
    """Of one instruction."""

    flops: float = 0.0
    bytes: float = 0.0
    """HBM bytes read and written."""
    dtype: str = "bf16"
    """Of the matmul's operands."""


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """FLOPs and HBM bytes; a fusion's are those of what it holds."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called("calls") or ""]
        flops, dtype = _matmuls(module, inner)
        return Work(flops, _fusion_bytes(module, computation, instruction, inner), dtype)
    if instruction.opcode in ("convolution", "dot"):
        shapes = computation.operand_shapes(instruction)
        return Work(
            _multiply(instruction, shapes), _plain_bytes(computation, instruction), shapes[0].dtype
        )
    return Work(0.0, _plain_bytes(computation, instruction))


def _matmuls(module: Module, computation: Computation) -> tuple[float, str]:
    total, dtype = 0.0, "bf16"
    for instruction in computation:
        if instruction.opcode in ("convolution", "dot"):
            shapes = computation.operand_shapes(instruction)
            total += _multiply(instruction, shapes)
            dtype = shapes[0].dtype
        elif instruction.opcode in ("fusion", "call"):
            name = instruction.called("calls") or instruction.called("to_apply")
            more, of = _matmuls(module, module.computations[name or ""])
            if more:
                total, dtype = total + more, of
    return total, dtype


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


def _plain_bytes(computation: Computation, instruction: Instruction) -> float:
    opcode = instruction.opcode
    out = instruction.shape
    if opcode in ("dynamic-slice", "slice", "gather"):
        return float(2 * out.bytes_in(HBM))
    if opcode == "dynamic-update-slice":
        update = computation.index.get(instruction.operands[1])
        return 2.0 * (update.shape.padded_bytes if update else 0)
    read = sum(shape.bytes_in(HBM) for shape in computation.operand_shapes(instruction))
    return float(read + out.bytes_in(HBM))


def _fusion_bytes(
    module: Module, computation: Computation, fusion: Instruction, inner: Computation
) -> float:
    total = 0.0
    for number, parameter in enumerate(inner.parameters):
        if number >= len(fusion.operands):
            break
        outside = computation.index.get(fusion.operands[number])
        shape = outside.shape if outside is not None else parameter.shape
        here = float(shape.bytes_in(HBM))
        if here:
            total += bytes_read(module, inner, parameter, here)
    return total + _written(module, inner, fusion)


def bytes_read(module: Module, inner: Computation, parameter: Instruction, size: float) -> float:
    """Bytes of a fusion's parameter that it reads: slices of it only, or nothing where it is updated in place."""
    users: dict[str, list[Instruction]] = {}
    for instruction in inner:
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)
    total = 0.0
    for use in _through(parameter, users):
        if use.opcode in _SLICES:
            total += use.shape.padded_bytes
        elif use.opcode == "fusion":
            held = module.computations[use.called("calls") or ""]
            for number, name in enumerate(use.operands):
                if _source(inner, name) is parameter and number < len(held.parameters):
                    total += bytes_read(module, held, held.parameters[number], size)
        elif (
            use.opcode != "dynamic-update-slice" or _source(inner, use.operands[0]) is not parameter
        ):
            return size
    return min(total, size)


def _through(parameter: Instruction, users: dict[str, list[Instruction]]) -> list[Instruction]:
    """Uses of a parameter, bitcasts looked through."""
    found: list[Instruction] = []
    todo = [parameter.name]
    while todo:
        for user in users.get(todo.pop(), ()):
            if user.opcode in ("bitcast", "copy", "reshape"):
                todo.append(user.name)
            else:
                found.append(user)
    return found


def _source(inner: Computation, name: str) -> Instruction | None:
    instruction = inner.index.get(name)
    while instruction is not None and instruction.opcode in ("bitcast", "copy", "reshape"):
        instruction = inner.index.get(instruction.operands[0])
    return instruction


def _written(module: Module, inner: Computation, fusion: Instruction) -> float:
    root = inner.root
    shapes = list(fusion.shape.parts) if fusion.shape.parts is not None else [fusion.shape]
    names = list(root.operands) if root.opcode == "tuple" else [root.name]
    total = 0.0
    for shape, name in zip(shapes, names, strict=False):
        here = float(shape.bytes_in(HBM))
        total += min(here, _updated(module, inner, _source(inner, name), here))
    return total


def _updated(module: Module, inner: Computation, made: Instruction | None, size: float) -> float:
    """Bytes that making a result writes: of an update in place, the update."""
    if made is None:
        return size
    if made.opcode == "dynamic-update-slice":
        update = inner.index.get(made.operands[1])
        return float(update.shape.padded_bytes) if update is not None else size
    if made.opcode == "fusion" and made.shape.parts is None:
        held = module.computations[made.called("calls") or ""]
        return _updated(module, held, _source(held, held.root.name), size)
    return size
