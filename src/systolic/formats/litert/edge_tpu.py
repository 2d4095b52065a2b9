"""Operations of a .tflite file that the Edge TPU runs, by the vendor's published rules, with a fix for each that it doesn't.

Sources: the model requirements and the table of supported operations (https://coral.ai/docs/edgetpu/models-intro/, for the
newest compiler, 16, and runtime 14; Axis publishes the same table for its cameras with an Edge TPU,
https://developer.axis.com/computer-vision/on-device/system-on-chip/artpec-7/supported-ops/), and how the compiler divides a model
(https://coral.ai/docs/edgetpu/compiler/). Compiler 16 is of 2021 and refuses what the format had later (:data:`VERSIONS`). It is
closed and has limits of its own that are not published, such as the size of activations: its log is the last word.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from systolic.core.units import si
from systolic.formats.litert.graph import EIGHT_BITS, MOVES, LiteGraph, LiteOp, LiteTensor

REQUIREMENTS = "https://coral.ai/docs/edgetpu/models-intro/"
COMPILER = "https://coral.ai/docs/edgetpu/compiler/"
CACHE_BYTES = 8 * 10**6
"""Parameters that stay on the chip, "roughly 8 MB" (:data:`COMPILER`); others are fetched from the host in each call."""
INNER_DIMS = 3
"""Innermost dims that may be larger than 1."""
SOFTMAX_MOST = 16_000
"""Most elements of a softmax."""
VERSIONS: Mapping[str, int] = {"CONV_2D": 5, "QUANTIZE": 2, "TRANSPOSE_CONV": 3}
"""Newest versions that compiler 16 reads, as its users report: google-coral/edgetpu issues 631, 879 and 845."""
COMPILED = "edgetpu-custom-op"
"""Operation that the compiler puts in place of those that run on the Edge TPU."""
ATTENTION = (
    "attention does not run there; use a convolutional network, such as image --model mobilenet"
)
FIXES: Mapping[str, str] = {
    "BATCH_MATMUL": ATTENTION,
    "CAST": "export with --precision int8, whose inputs need no conversion",
    "DEQUANTIZE": "export with --precision int8; if it is the last operation, it costs little on the CPU",
    "DIV": "multiply by the reciprocal",
    "ELU": "use relu in the model",
    "GATHER": "look the rows up where the model is called, and give them as inputs",
    "EMBEDDING_LOOKUP": "look the rows up where the model is called, and give them as inputs",
    "GELU": "use relu in the model",
    "HARD_SWISH": "use relu6 in the model",
    "LEAKY_RELU": "use relu or prelu in the model",
    "PADV2": "pad with zeros",
    "POW": "multiply the number by itself",
    "SQRT": "use rsqrt and a product",
    "TOPK_V2": "leave it out of the model, and pick the best where the answer is read",
    "WHILE": "export a model without loops",
}
"""Operations that are not supported to the change that mends them."""


class Obstacle(NamedTuple):
    """Why an operation stays on the CPU, and the change that mends it."""

    reason: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpPlacement:
    """Place at which an operation would run."""

    index: int
    kind: str
    tensor: str
    """Name of its first output."""
    place: str
    """``edge-tpu`` or ``cpu``."""
    reason: str = ""
    fix: str = ""

    @property
    def on_edge_tpu(self) -> bool:
        """Whether the accelerator takes it."""
        return self.place == "edge-tpu"


@dataclass(frozen=True, kw_only=True)
class EdgeTpuReport:
    """Operations of a model that the Edge TPU would run."""

    placements: tuple[OpPlacement, ...]
    obstacles: tuple[str, ...]
    """Obstacles for the whole model, each with its fix: with any, nothing runs on the Edge TPU."""
    parameter_bytes: int
    compiled: bool = False
    """Whether the compiler has been over the file."""
    file: Path | None = None
    """The file that was checked, where it is not one that was just written."""

    @property
    def taken(self) -> int:
        """Operations on the Edge TPU."""
        return sum(placement.on_edge_tpu for placement in self.placements)

    def lines(self, file: str = "") -> list[str]:
        """Placements, fixes, and the command that compiles; operations of one kind and reason together."""
        file = file or str(self.file)
        cache = f"{si(self.parameter_bytes, 'B')} of parameters, about {si(CACHE_BYTES, 'B')} stay on the chip"
        if self.compiled:
            return [f"Edge TPU: {file} was compiled before; {cache}"]
        lines = [f"Edge TPU: {self.taken} of {len(self.placements)} operations; {cache}"]
        lines += [f"  {refusal}" for refusal in self.obstacles]
        there = Counter(placement.kind for placement in self.placements if placement.on_edge_tpu)
        if there:
            lines.append(
                f"  there: {', '.join(f'{count} {kind}' for kind, count in there.items())}"
            )
        groups: dict[tuple[str, str], list[OpPlacement]] = {}
        for placed in self.placements:
            if not placed.on_edge_tpu:
                groups.setdefault((placed.kind, placed.fix), []).append(placed)
        for (kind, fix), ones in groups.items():
            also = f" and {len(ones) - 1} more" if len(ones) > 1 else ""
            lines.append(
                f"  on the CPU: {kind} (operation {ones[0].index}{also}): {ones[0].reason}; {fix}"
            )
        lines.append(f"  rules: {REQUIREMENTS}; the compiler's log is the last word")
        lines.append(
            f"  compile: edgetpu_compiler --show_operations {shlex.quote(file)}  ({COMPILER})"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "operations": len(self.placements),
            "on_edge_tpu": self.taken,
            "compiled": self.compiled,
            "parameter_bytes": self.parameter_bytes,
            "cache_bytes": CACHE_BYTES,
            "obstacles": list(self.obstacles),
            "placements": [asdict(placement) for placement in self.placements],
            "sources": [REQUIREMENTS, COMPILER],
        }


def edge_tpu_report(graph: LiteGraph) -> EdgeTpuReport:
    """Each operation of a model by the published rules.

    From the first operation that is not supported on, the compiler leaves everything to the CPU, unless it is told to
    try several parts (``edgetpu_compiler --enable_multiple_subgraphs``).
    """
    compiled = any(op.custom and op.kind == COMPILED for op in graph.ops)
    obstacles = () if compiled else tuple(_of_model(graph))
    mixed = any(op.kind not in MOVES and op.precision in EIGHT_BITS for op in graph.ops)
    placed: list[OpPlacement] = []
    first: OpPlacement | None = None
    for index, op in enumerate(graph.ops):
        hindrance = obstacle(op)
        if hindrance is not None and mixed and op.kind not in FIXES and _floats(op):
            hindrance = Obstacle(
                "it stays in floating point, as 8 bits would lose its numbers", ATTENTION
            )
        reason, fix = ("", "") if hindrance is None else hindrance
        if hindrance is None and first is not None:
            reason = f"it comes after {first.kind} (operation {first.index}), where the compiler divides the model"
            fix = f"mend operation {first.index}, or compile with edgetpu_compiler --enable_multiple_subgraphs"
        elif hindrance is None and obstacles:
            reason, fix = "the model as a whole is refused", "see above"
        placement = OpPlacement(
            index=index,
            kind=op.kind,
            tensor=op.outputs[0].name if op.outputs else "",
            place="cpu" if reason else "edge-tpu",
            reason=reason,
            fix=fix,
        )
        placed.append(placement)
        if hindrance is not None and first is None:
            first = placement
    return EdgeTpuReport(
        placements=tuple(placed),
        obstacles=obstacles,
        parameter_bytes=graph.constant_bytes,
        compiled=compiled,
    )


def _of_model(graph: LiteGraph) -> Iterator[str]:
    """Obstacles for the whole model."""
    dynamic = next((t for op in graph.ops for t in (*op.inputs, *op.outputs) if t.dynamic), None)
    if dynamic is not None:
        yield f"{dynamic.name} has a dim without a size, and all sizes must be known at compile time; export with --batch 1 and, for text, --sequence"
    for tensor in graph.inputs:
        if tensor.shape[:1] and tensor.shape[0] > 1 and len(tensor.shape) > INNER_DIMS:
            yield f"input {tensor.name} is {tensor}: a batch of {tensor.shape[0]}, and the Edge TPU takes one example a call; export with --batch 1"
    for op in graph.ops:
        if op.version > VERSIONS.get(op.kind, op.version):
            yield f"{op.kind} is of version {op.version}, and compiler 16 reads files up to its version {VERSIONS[op.kind]}; export the model with systolic export --to litert --precision int8 --edge-tpu"
            break
    if graph.graphs > 1:
        yield f"the file has {graph.graphs} graphs, as a loop or a branch makes them, and the compiler takes one; export a model without loops"


def obstacle(op: LiteOp) -> Obstacle | None:
    """Why an operation can't run on the Edge TPU, by itself; None where it can."""
    if op.custom:
        return None if op.kind == COMPILED else _custom(op)
    if op.kind not in RULES:
        return Obstacle(
            f"{op.kind} is not among the supported operations",
            FIXES.get(op.kind, "replace it in the model by supported operations"),
        )
    for check in (_types, _dims, RULES[op.kind]):
        if (reason := check(op)) is not None:
            return reason
    return None


def _floats(op: LiteOp) -> bool:
    """Whether an operation reads or makes floating numbers."""
    return any(tensor.dtype.startswith("FLOAT") for tensor in (*op.inputs, *op.outputs))


def _custom(op: LiteOp) -> Obstacle:
    return Obstacle(
        f"{op.kind} is a custom operation", "replace it in the model by supported operations"
    )


def _types(op: LiteOp) -> Obstacle | None:
    """All numbers in 8 bits; constants may be biases or arguments such as axes."""
    data = [
        tensor
        for tensor in (*op.inputs, *op.outputs)
        if tensor.dtype not in EIGHT_BITS
        and not (tensor.constant and tensor.dtype in ("INT32", "INT64"))
    ]
    if op.kind == "QUANTIZE" and data:
        return Obstacle(
            f"it makes {op.outputs[0].dtype.lower()} of {op.inputs[0].dtype.lower()}, and both must be in 8 bits",
            "export with --precision int8, whose inputs are int8",
        )
    if data:
        return Obstacle(
            f"its numbers are {data[0].dtype.lower()}, and all must be in 8 bits",
            "export with --precision int8",
        )
    return None


def _dims(op: LiteOp) -> Obstacle | None:
    """At most three inner dims larger than 1."""
    for tensor in (*op.inputs, *op.outputs):
        if not tensor.constant and any(size != 1 for size in tensor.shape[:-INNER_DIMS]):
            return Obstacle(
                f"it has a tensor {tensor}, and only the {INNER_DIMS} innermost dims may be larger than 1",
                "export with --batch 1, or reshape in the model",
            )
    return None


# Rules of single operations


def _anything(op: LiteOp) -> Obstacle | None:
    del op
    return None


def _no_activation(op: LiteOp) -> Obstacle | None:
    if op.activation is None:
        return None
    return Obstacle(
        f"{op.activation} is fused into it, which {op.kind} may not have",
        "put an operation between the two in the model",
    )


def _concatenation(op: LiteOp) -> Obstacle | None:
    if (fault := _no_activation(op)) is not None:
        return fault
    constants = [t for t in op.inputs if t.constant]
    zeros = all(t.values is not None and not np.any(t.values) for t in constants)
    if constants and (len(op.inputs) != 2 or not zeros):
        return Obstacle(
            "a constant among its inputs must be one of two, and all zeros",
            "concatenate computed tensors only, or pad with zeros",
        )
    return None


def _dilation(op: LiteOp) -> Obstacle | None:
    width, height = (op.options.get(f"dilation_{side}_factor", 1) for side in "wh")
    if width == height:
        return None
    return Obstacle(
        f"its dilations are {height} and {width}", "use the same dilation for rows and columns"
    )


def _dense(op: LiteOp) -> Obstacle | None:
    if op.options.get("weights_format", 0):
        return Obstacle("its weights are shuffled", "export with the weights as they are")
    shape = op.outputs[0].shape
    if any(size != 1 for size in shape[:-1]):
        return Obstacle(
            f"its output is {op.outputs[0]}, and must be one row",
            "flatten to one row before it, or use a convolution with a 1 x 1 kernel",
        )
    if len(op.inputs) > 1 and not op.inputs[1].constant:
        return Obstacle("its weights are computed", "use weights that are constants")
    if len(op.inputs) > 1 and op.inputs[1].scales > 1:
        # Converters write such layers since 2024 (tensorflow/tflite-micro pull request 2602).
        return Obstacle(
            f"its weights have {op.inputs[1].scales} scales, one for each output, which is newer than the compiler",
            "export with --precision int8 --edge-tpu, which gives them one scale",
        )
    return None


def _axes(op: LiteOp) -> list[int]:
    """Axes of a reduction, counted from the front."""
    values = op.inputs[1].values if len(op.inputs) > 1 else None
    rank = len(op.inputs[0].shape)
    return [] if values is None else [int(value) % max(rank, 1) for value in values]


def _not_batch(op: LiteOp) -> Obstacle | None:
    if 0 in _axes(op) and len(op.inputs[0].shape) > 1:
        return Obstacle("it reduces the batch dim", "reduce inner dims only")
    return None


def _mean(op: LiteOp) -> Obstacle | None:
    if (fault := _not_batch(op)) is not None:
        return fault
    shape = op.inputs[0].shape
    last = len(shape) - 1
    if last in _axes(op) and shape[last] % 4:
        return Obstacle(
            f"it reduces the last dim, of {shape[last]}, which must be a multiple of 4",
            "use a number of channels that 4 divides",
        )
    return None


def _axis(name: str, where: str) -> Callable[[LiteOp], Obstacle | None]:
    """A rule against the batch dim, for an operation with one axis."""

    def check(op: LiteOp) -> Obstacle | None:
        axis = op.options.get("axis")
        if axis is None and op.inputs[0].values is not None:
            axis = int(op.inputs[0].values[0])  # of SPLIT
        of: LiteTensor = op.outputs[0] if name == "packs" else op.inputs[-1]
        if axis is not None and axis % max(len(of.shape), 1) == 0 and len(of.shape) > 1:
            return Obstacle(f"it {name} the batch dim", f"{where} inner dims only")
        return None

    return check


def _pad(op: LiteOp) -> Obstacle | None:
    values = op.inputs[1].values if len(op.inputs) > 1 else None
    if values is not None and len(op.inputs[0].shape) > 1 and np.any(values[:2]):
        return Obstacle("it pads the batch dim", "pad inner dims only")
    return None


def _prelu(op: LiteOp) -> Obstacle | None:
    alpha = op.inputs[1].shape if len(op.inputs) > 1 else ()
    if any(size != 1 for size in alpha[:-1]):
        return Obstacle(
            f"its slopes are {list(alpha)}, and must be one for each channel",
            "share the slopes over rows and columns",
        )
    return None


def _resize(op: LiteOp) -> Obstacle | None:
    if any(size != 1 for size in op.inputs[0].shape[:-3]):
        return Obstacle(f"its input is {op.inputs[0]}, and must have 3 dims", "use --batch 1")
    return None


def _softmax(op: LiteOp) -> Obstacle | None:
    shape = op.inputs[0].shape
    if any(size != 1 for size in shape[:-1]):
        return Obstacle(
            f"its input is {op.inputs[0]}, and must be one row",
            "leave the softmax out of the model, and compute it where the answer is read",
        )
    if shape and shape[-1] > SOFTMAX_MOST:
        return Obstacle(
            f"its input has {shape[-1]} elements, and {SOFTMAX_MOST} is the most",
            "leave the softmax out of the model, and compute it where the answer is read",
        )
    return None


def _strided(op: LiteOp) -> Obstacle | None:
    strides = op.inputs[3].values if len(op.inputs) > 3 else None
    if strides is not None and np.any(strides != 1):
        return Obstacle(
            f"its strides are {strides.tolist()}, and must be 1",
            "use a convolution or a pooling with a stride",
        )
    if op.options.get("ellipsis_mask", 0) or op.options.get("new_axis_mask", 0):
        return Obstacle("it has an ellipsis or a new axis", "slice and reshape one after another")
    return None


RULES: Mapping[str, Callable[[LiteOp], Obstacle | None]] = {
    **dict.fromkeys(
        (
            *("ADD", "EXPAND_DIMS", "L2_NORMALIZATION", "LOGISTIC", "MAXIMUM", "MINIMUM", "MUL"),
            *("QUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "RESHAPE", "RSQRT", "SLICE"),
            *("SPACE_TO_DEPTH", "SQUARED_DIFFERENCE", "SQUEEZE", "SUB", "TANH", "TRANSPOSE"),
            *("TRANSPOSE_CONV", "UNIDIRECTIONAL_SEQUENCE_LSTM", "LSTM"),
        ),
        _anything,
    ),
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), _no_activation),
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D"), _dilation),
    **dict.fromkeys(("REDUCE_MAX", "REDUCE_MIN", "SUM"), _not_batch),
    **dict.fromkeys(("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"), _resize),
    "CONCATENATION": _concatenation,
    "FULLY_CONNECTED": _dense,
    "MEAN": _mean,
    "PACK": _axis("packs", "pack"),
    "PAD": _pad,
    "PRELU": _prelu,
    "SOFTMAX": _softmax,
    "SPLIT": _axis("splits", "split"),
    "STRIDED_SLICE": _strided,
}
"""Supported operations to what is required of each (:data:`REQUIREMENTS`)."""
