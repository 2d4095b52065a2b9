"""Work of an instruction: FLOPs of products, bytes of device memory."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from systolic.chips import usual
from systolic.hlo import Computation, Instruction, Module, Shape
from systolic.sim.traffic import fusion_bytes, plain_bytes

_WINDOW = re.compile(r"(\w+)=(\S+)")
_PAD = re.compile(r"(-?\d+)_(-?\d+)")
WIDTHS: tuple[int, int] = usual("tpu")["mxu_widths"].value
"""Rows and columns of a matrix unit: v2 to v5p, v6e and TPU7x."""
PASSES = {"highest": 6.0, "high": 3.0}
"""bf16 products of an f32 matmul (XLA's bf16_6x and bf16_3x); one at the default precision."""
_RELAYED = frozenset(("bitcast", "convert", "copy", "reshape", "transpose"))
_SIZE = re.compile(r"size=([\dx]+)")
_INT = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one instruction."""

    flops: float = 0.0
    """FLOPs on the matrix units."""
    bytes: float = 0.0
    """HBM bytes read and written."""
    dtype: str = "bf16"
    """HLO dtype of the matmul's operands."""
    issued: tuple[float, float] = (0.0, 0.0)
    """FLOPs that matrix units of 128 and of 256 rows and columns are busy for: passes counted, and contractions
    and results that are narrower than a unit filled up."""
    held: float = 0.0
    """Bytes of the operands that the matrix units hold; f32 ones are loaded as bf16, once a pass."""

    passes: float = 1.0
    """Passes of the matmul that has most: f32 operands at ``high`` and ``highest`` precision are split into bf16 parts."""

    vector_flops: float = 0.0
    """FLOPs of matmuls that the compiler made products and sums of the vector units."""

    padding_flops: float = 0.0
    """FLOPs of a convolution's taps on the padding, besides ``flops``: published counts of models have them."""

    def matrix(self, width: int) -> float:
        """FLOPs that matrix units of that width are busy for; ``flops`` where nothing else is known."""
        return max(self.issued[1 if width > WIDTHS[0] else 0], self.flops)


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """FLOPs and HBM bytes; a fusion's are those of what it holds."""
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        matmuls = _matmuls(module, inner)
        return replace(matmuls, bytes=fusion_bytes(module, computation, instruction, inner))
    if instruction.opcode in ("convolution", "dot"):
        shapes = computation.operand_shapes(instruction)
        moved = plain_bytes(module, computation, instruction)
        return replace(_matmul(instruction, shapes), bytes=moved)
    moved = plain_bytes(module, computation, instruction)
    return Work(bytes=moved, vector_flops=_summed(computation, instruction))


def _passes(instruction: Instruction, dtype: str) -> float:
    if dtype != "f32":
        return 1.0
    precisions = instruction.attribute("operand_precision") or "{}"
    return max(PASSES.get(word.strip(), 1.0) for word in precisions.strip("{}").split(","))


def _matmul(instruction: Instruction, operands: list[Shape]) -> Work:
    """Work of one convolution or dot: all passes, with what the units' width leaves idle."""
    flops, passes = (
        _multiply(instruction, operands),
        _passes(instruction, operands[0].dtype),
    )
    depth, columns = _stationary(instruction, operands)
    narrow, wide = (
        flops * passes * _filled(depth, width) * _filled(columns, width) for width in WIDTHS
    )
    return Work(
        flops,
        dtype=operands[0].dtype,
        issued=(narrow, wide),
        held=operands[1].elements * min(operands[1].bits / 8, 2.0) * passes,
        passes=passes,
        padding_flops=_multiply(instruction, operands, padded=True) - flops,
    )


def _filled(size: int, width: int) -> float:
    """Whole units over the part of them that a dim fills."""
    return -(-size // width) * width / max(size, 1)


def _stationary(instruction: Instruction, operands: list[Shape]) -> tuple[int, int]:
    """Contracted elements and columns of the operand that the units hold, the second one where it is no vector.

    A window that meets several inputs for an output is contracted too; the units are taken to be filled there.
    """
    if instruction.opcode == "dot":
        held = operands[1]
        contracted = _dims(instruction, "rhs_contracting_dims")
        batch = _dims(instruction, "rhs_batch_dims")
        depth = math.prod(held.dims[dim] for dim in contracted)
        return depth, max(held.elements // max(depth, 1), 1) // max(
            math.prod(held.dims[dim] for dim in batch), 1
        )
    labels = instruction.attribute("dim_labels") or ""
    kernel = labels.partition("_")[2].partition("->")[0]
    window = dict(_WINDOW.findall((instruction.attribute("window") or "{}").strip("{}")))
    if "size" in window and "lhs_dilate" not in window and "rhs_dilate" not in window:
        return WIDTHS[-1], WIDTHS[-1]
    held = operands[1].dims
    depth, columns = held[kernel.index("i")], held[kernel.index("o")]
    # A vector streams through the units, which hold the matrix that it is multiplied with.
    return depth, columns if columns > 1 else operands[0].dims[labels.index("b")]


def _dims(instruction: Instruction, attribute: str) -> list[int]:
    return [int(dim) for dim in re.findall(r"\d+", instruction.attribute(attribute) or "{}")]


def _matmuls(module: Module, computation: Computation) -> Work:
    """Work of all matmuls of a computation; the dtype is that of the last one's operands."""
    total = Work()
    for instruction in computation:
        if instruction.opcode in ("convolution", "dot"):
            more = _matmul(instruction, computation.operand_shapes(instruction))
        elif instruction.opcode in ("fusion", "call"):
            held = "calls" if instruction.opcode == "fusion" else "to_apply"
            more = _matmuls(module, module.callee(instruction, held))
        else:
            more = Work(vector_flops=_summed(computation, instruction))
        if more.flops or more.vector_flops:
            total = Work(
                total.flops + more.flops,
                dtype=more.dtype if more.flops else total.dtype,
                issued=(total.issued[0] + more.issued[0], total.issued[1] + more.issued[1]),
                held=total.held + more.held,
                passes=max(total.passes, more.passes),
                vector_flops=total.vector_flops + more.vector_flops,
                padding_flops=total.padding_flops + more.padding_flops,
            )
    return total


def _summed(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a sum that was a matmul in the program: of few rows a compiler makes it a product and a reduction.

    The sum keeps the matmul's name. One whose factors lie in another instruction is none.
    """
    if instruction.opcode != "reduce" or not instruction.op_name.endswith("/dot_general"):
        return 0.0
    product = computation.index.get(instruction.operands[0])
    while product is not None and product.opcode in _RELAYED:
        product = computation.index.get(product.operands[0])
    return 0.0 if product is None or product.opcode != "multiply" else 2.0 * product.shape.elements


def _multiply(instruction: Instruction, operands: list[Shape], *, padded: bool = False) -> float:
    """FLOPs of a convolution or dot, 2 a multiply-add; taps on the padding count where ``padded`` says so."""
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
        if padded and max(pads[axis]) > 0:
            # Of a forward convolution each output, of its input's gradient each input meets the whole window.
            valid *= min(input_size, out_size) * size[axis]
            continue
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
    # The pairs are symmetric in output and window, and each of the fewer ones meets a range of the others.
    if window > out_size:
        window, out_size, stride, dilate = out_size, window, dilate, stride
    dilated = (input_size - 1) * base + 1
    common = math.gcd(stride, base)
    every = base // common
    inverse = pow(stride // common, -1, every)
    pairs = 0
    for at in range(window):
        offset = at * dilate - low
        if offset % common:
            continue
        # 0 <= out * stride + offset < dilated, and of these the multiples of base: one in ``every`` outputs.
        first = max(-(offset // stride), 0)
        last = min((dilated - 1 - offset) // stride, out_size - 1)
        first += (-offset // common * inverse - first) % every
        pairs += max((last - first) // every + 1, 0)
    return pairs


def window_sizes(instruction: Instruction) -> list[int]:
    """Elements of a reduction's window along each dim; empty where it has none."""
    window = _SIZE.search(instruction.attribute("window") or "")
    return [int(size) for size in window[1].split("x")] if window else []


def slice_sizes(addressed: Instruction, operand: Sequence[int], result: Sequence[int]) -> list[int]:
    """Elements along each dim of the operand that one index of a gather or a scatter addresses.

    Args:
        addressed: The gather or the scatter.
        operand: Dims of what is read or updated.
        result: Dims of a gather's result, or of a scatter's updates.
    """
    if addressed.opcode == "gather":
        sizes = numbers(addressed, "slice_sizes")
        return sizes if len(sizes) == len(operand) else [1] * len(operand)
    single = {
        *numbers(addressed, "inserted_window_dims"),
        *numbers(addressed, "input_batching_dims"),
    }
    left = iter([result[dim] for dim in numbers(addressed, "update_window_dims")])
    return [1 if dim in single else next(left, 1) for dim in range(len(operand))]


def numbers(instruction: Instruction, attribute: str) -> list[int]:
    """Numbers that an attribute lists."""
    return [int(n) for n in _INT.findall(instruction.attribute(attribute) or "")]
