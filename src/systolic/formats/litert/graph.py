"""The operations and tensors of a .tflite file as values; weights are not read."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flatbuffers import encode, number_types
from flatbuffers.table import Table

from systolic.core.errors import DataError, NotFoundError

_TENSOR_TYPES = """
FLOAT32 FLOAT16 INT32 UINT8 INT64 STRING BOOL INT16 COMPLEX64 INT8 FLOAT64 COMPLEX128 UINT64
RESOURCE VARIANT UINT32 UINT16 INT4 BFLOAT16 INT2 UINT4 FLOAT8_E4M3FN FLOAT8_E5M2
"""

_ACTIVATIONS = "NONE RELU RELU_N1_TO_1 RELU6 TANH SIGN_BIT"

_OPERATORS = """
ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE
EMBEDDING_LOOKUP FLOOR FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D
LOCAL_RESPONSE_NORMALIZATION LOGISTIC LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1
RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM
CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER BATCH_TO_SPACE_ND
SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE
BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM
CAST PRELU MAXIMUM ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE
SIN TRANSPOSE_CONV SPARSE_TO_DENSE TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW
ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK
REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR
LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL REVERSE_V2 ADD_N GATHER_ND COS
WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND HARD_SWISH IF WHILE
NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM
BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG
REAL COMPLEX_ABS HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL
CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL
BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD
UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR
RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE STABLEHLO_MULTIPLY
STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE
STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL
STABLEHLO_REDUCE STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL
STABLEHLO_FLOOR STABLEHLO_LOG STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER
STABLEHLO_REMAINDER STABLEHLO_RSQRT STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH
STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT STABLEHLO_DYNAMIC_SLICE
STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL
STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE
DILATE STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT
STABLEHLO_CBRT STABLEHLO_CASE
"""

TENSOR_TYPES = tuple(_TENSOR_TYPES.split())

ACTIVATIONS = tuple(_ACTIVATIONS.split())

OPERATORS = tuple(_OPERATORS.split())

CUSTOM = OPERATORS.index("CUSTOM")

FIELDS: Mapping[str, Mapping[str, int]] = {
    "Model": {"operator_codes": 1, "subgraphs": 2, "buffers": 4, "signature_defs": 7},
    "OperatorCode": {
        "deprecated_builtin_code": 0,
        "custom_code": 1,
        "version": 2,
        "builtin_code": 3,
    },
    "SubGraph": {"tensors": 0, "inputs": 1, "outputs": 2, "operators": 3},
    "Tensor": {
        "shape": 0,
        "type": 1,
        "buffer": 2,
        "name": 3,
        "quantization": 4,
        "shape_signature": 7,
    },
    "QuantizationParameters": {"scale": 2},
    "Buffer": {"data": 0, "offset": 1, "size": 2},
    "Operator": {"opcode_index": 0, "inputs": 1, "outputs": 2, "builtin_options": 4},
    "SignatureDef": {"inputs": 0, "outputs": 1},
    "TensorMap": {"name": 0, "tensor_index": 1},
    "Conv2DOptions": {
        "fused_activation_function": 3,
        "dilation_w_factor": 4,
        "dilation_h_factor": 5,
    },
    "DepthwiseConv2DOptions": {
        "fused_activation_function": 4,
        "dilation_w_factor": 5,
        "dilation_h_factor": 6,
    },
    "Pool2DOptions": {"fused_activation_function": 5},
    "FullyConnectedOptions": {"fused_activation_function": 0, "weights_format": 1},
    "ConcatenationOptions": {"axis": 0, "fused_activation_function": 1},
    "PackOptions": {"axis": 1},
    "StridedSliceOptions": {"ellipsis_mask": 2, "new_axis_mask": 3},
}
"""Table to the places of those fields that are read."""

OPTIONS: Mapping[str, str] = {
    "AVERAGE_POOL_2D": "Pool2DOptions",
    "CONCATENATION": "ConcatenationOptions",
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "FULLY_CONNECTED": "FullyConnectedOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "PACK": "PackOptions",
    "STRIDED_SLICE": "StridedSliceOptions",
}
"""Operation to the table of its options."""

BYTES = ("fused_activation_function", "weights_format")
"""Options of one byte; the others are int32."""

ONE = ("dilation_w_factor", "dilation_h_factor")
"""Options that are 1 where a file leaves them out; the others are 0."""


IDENTIFIER = b"TFL3"
"""Bytes 4 to 8 of a .tflite file."""

SMALL_BYTES = 4096
"""Constants up to this size are kept as values: axes, paddings, zeros."""

EIGHT_BITS = ("INT8", "UINT8")

WHOLE = {"INT32": np.int32, "INT64": np.int64, "INT8": np.int8, "UINT8": np.uint8}
"""Types of whole numbers in the schema to numpy's."""

MOVES = ("QUANTIZE", "DEQUANTIZE")
"""Operations that only change how numbers are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiteTensor:
    """A tensor of a .tflite file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name in the schema: ``FLOAT32``, ``INT8`` …"""
    dynamic: bool = False
    """Whether a dim has no size before the model runs."""
    bytes: int = 0
    """Size of a constant's values; 0 for computed tensors."""
    scales: int = 0
    """Scales of its whole numbers: one, or one for each channel; 0 for other numbers."""
    values: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Values of a small constant of whole numbers."""

    @property
    def constant(self) -> bool:
        """Whether its values are in the file."""
        return self.bytes > 0

    def __str__(self) -> str:
        return f"{self.dtype.lower()}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiteOp:
    """An operation of a .tflite file."""

    kind: str
    """Name in the schema: ``CONV_2D``; of a custom one its own name."""
    inputs: tuple[LiteTensor, ...]
    outputs: tuple[LiteTensor, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its options, such as ``dilation_w_factor``."""
    activation: str | None = None
    """Name of the activation that is fused into it."""
    custom: bool = False
    version: int = 1
    """Version of the operation: newer ones take more types, and older runtimes refuse them."""

    @property
    def precision(self) -> str:
        """Dtype that it computes in: that of its first output, or of its input where it only stores numbers."""
        return (self.outputs or self.inputs)[0].dtype


@dataclass(frozen=True, kw_only=True)
class LiteGraph:
    """The main graph of a .tflite file."""

    ops: tuple[LiteOp, ...]
    inputs: tuple[LiteTensor, ...]
    outputs: tuple[LiteTensor, ...]
    constant_bytes: int
    """Size of all constants of the file."""
    named_inputs: Mapping[str, LiteTensor] = field(default_factory=dict)
    named_outputs: Mapping[str, LiteTensor] = field(default_factory=dict)
    """Outputs by the names of the file's first signature; {} without one."""
    graphs: int = 1
    """Graphs in the file: bodies of loops and branches are graphs of their own."""

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each (operation, dtype) occurs, without operations that only store numbers in another way."""
        return Counter((op.kind, op.precision) for op in self.ops if op.kind not in MOVES)

    def floating(self) -> Counter[str]:
        """Operations that compute in floating point, by name."""
        counts: Counter[str] = Counter()
        for op in self.ops:
            if op.kind in MOVES or not op.precision.startswith(("FLOAT", "BFLOAT")):
                continue
            whole = any(tensor.constant and tensor.scales for tensor in op.inputs)
            counts[f"{op.kind} with int8 weights" if whole else op.kind] += 1
        return counts


def read_graph(file: Path) -> LiteGraph:
    """The main graph of a .tflite file.

    Raises:
        NotFoundError: it can't be read.
        DataError: it is no .tflite file, or is damaged.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{file} can't be read ({error.strerror}); check the path") from error
    return graph_of(content, str(file))


def graph_of(content: bytes, name: str) -> LiteGraph:
    """The main graph of a file's content; ``name`` is for messages. Raises as :func:`read_graph`."""
    if content[4:8] != IDENTIFIER:
        raise DataError(
            f"{name} is no LiteRT model: its bytes 4 to 8 are {content[4:8]!r} and not {IDENTIFIER!r}; give a .tflite file"
        )
    try:
        return _GraphReader(content).graph()
    except Exception as error:  # a flatbuffer is a net of offsets: a wrong one can do anything
        raise DataError(
            f"{name} is damaged ({type(error).__name__}: {error}); copy it again, or export the model again"
        ) from error


class _Record:
    """A table of a flatbuffer, its fields by the names of the schema."""

    def __init__(self, kind: str, content: bytes, place: int) -> None:
        self._table, self._places = Table(content, place), FIELDS[kind]

    def _field(self, name: str) -> int:
        """Place of a field; 0 for a field that the file leaves out."""
        offset = self._table.Offset(4 + 2 * self._places[name])
        return offset and offset + self._table.Pos

    def number(self, name: str, flags: Any = number_types.Int32Flags, default: int = 0) -> int:
        """A number of the type that ``flags`` says."""
        place = self._field(name)
        return int(self._table.Get(flags, place)) if place else default

    def text(self, name: str) -> str:
        """Text, "" without any."""
        place = self._field(name)
        return self._table.String(place).decode(errors="replace") if place else ""

    def numbers(self, name: str, flags: Any = number_types.Int32Flags) -> np.ndarray:
        """A vector of numbers."""
        place = self._field(name)
        if not place:
            return np.zeros(0, np.int64)
        return np.asarray(self._table.GetVectorAsNumpy(flags, place - self._table.Pos))

    def tables(self, name: str, kind: str) -> "list[_Record]":
        """A vector of tables."""
        place = self._field(name)
        if not place:
            return []
        start = self._table.Vector(place - self._table.Pos)
        count = self._table.VectorLen(place - self._table.Pos)
        if not 0 <= count <= len(self._table.Bytes):
            raise ValueError(f"{count} entries of {name}")
        content = self._table.Bytes
        return [
            _Record(kind, content, self._table.Indirect(start + 4 * index))
            for index in range(count)
        ]

    def table(self, name: str, kind: str) -> "_Record | None":
        """A table of its own."""
        place = self._field(name)
        if not place:
            return None
        return _Record(kind, self._table.Bytes, self._table.Indirect(place))


class _GraphReader:
    def __init__(self, content: bytes) -> None:
        root = encode.Get(number_types.UOffsetTFlags.packer_type, content, 0)
        self._content, self._model = content, _Record("Model", content, int(root))
        self._codes = self._model.tables("operator_codes", "OperatorCode")
        self._buffers = self._model.tables("buffers", "Buffer")
        self._sizes = [self._size(buffer) for buffer in self._buffers]

    def graph(self) -> LiteGraph:
        """The first graph."""
        graphs = self._model.tables("subgraphs", "SubGraph")
        main = graphs[0]
        tensors = [self._tensor(table) for table in main.tables("tensors", "Tensor")]

        def pick(indices: np.ndarray) -> tuple[LiteTensor, ...]:
            # An input that is left out has the index -1.
            return tuple(tensors[index] for index in indices.tolist() if index >= 0)

        return LiteGraph(
            ops=tuple(self._op(table, pick) for table in main.tables("operators", "Operator")),
            inputs=pick(main.numbers("inputs")),
            outputs=pick(main.numbers("outputs")),
            constant_bytes=sum(self._sizes),
            **self._signature(tensors),
            graphs=len(graphs),
        )

    def _signature(self, tensors: Sequence[LiteTensor]) -> dict[str, dict[str, LiteTensor]]:
        """Inputs and outputs of the first signature by name."""
        signatures = self._model.tables("signature_defs", "SignatureDef")
        if not signatures:
            return {}
        uint = number_types.Uint32Flags
        return {
            f"named_{side}": {
                table.text("name"): tensors[table.number("tensor_index", uint)]
                for table in signatures[0].tables(side, "TensorMap")
            }
            for side in ("inputs", "outputs")
        }

    def _size(self, buffer: _Record) -> int:
        """Bytes of a buffer, in the file's tables or, in large files, behind them."""
        if buffer.number("offset", number_types.Uint64Flags) > 1:
            return buffer.number("size", number_types.Uint64Flags)
        return len(buffer.numbers("data", number_types.Uint8Flags))

    def _values(self, number: int, dtype: str) -> np.ndarray | None:
        """A small constant of whole numbers."""
        kind = WHOLE.get(dtype)
        if kind is None or not 0 < self._sizes[number] <= SMALL_BYTES:
            return None
        start = self._buffers[number].number("offset", number_types.Uint64Flags)
        if start > 1:
            return np.frombuffer(self._content[start : start + self._sizes[number]], kind)
        raw = self._buffers[number].numbers("data", number_types.Uint8Flags)
        return np.frombuffer(raw.tobytes(), kind)

    def _tensor(self, tensor: _Record) -> LiteTensor:
        number = tensor.number("buffer", number_types.Uint32Flags)
        dtype = TENSOR_TYPES[tensor.number("type", number_types.Int8Flags)]
        shape = tuple(tensor.numbers("shape").tolist())
        quantized = tensor.table("quantization", "QuantizationParameters")
        scales = () if quantized is None else quantized.numbers("scale", number_types.Float32Flags)
        return LiteTensor(
            name=tensor.text("name"),
            shape=shape,
            dtype=dtype,
            dynamic=-1 in tensor.numbers("shape_signature") or -1 in shape,
            bytes=self._sizes[number],
            scales=len(scales),
            values=self._values(number, dtype),
        )

    def _op(self, op: _Record, pick: Callable[[np.ndarray], tuple[LiteTensor, ...]]) -> LiteOp:
        code = self._codes[op.number("opcode_index", number_types.Uint32Flags)]
        # Files from before the 128th operation have the code in the old field alone.
        old = code.number("deprecated_builtin_code", number_types.Int8Flags)
        number = max(code.number("builtin_code"), old)
        custom = number == CUSTOM
        kind = OPERATORS[number] if number < len(OPERATORS) else f"operation {number}"
        options = _options(op, kind)
        fused = options.get("fused_activation_function", 0)
        return LiteOp(
            kind=code.text("custom_code") if custom else kind,
            custom=custom,
            inputs=pick(op.numbers("inputs")),
            outputs=pick(op.numbers("outputs")),
            options=options,
            activation=ACTIVATIONS[fused] if fused else None,
            version=code.number("version", default=1),
        )


def _options(op: _Record, kind: str) -> dict[str, int]:
    """Options of an operation by name, those that are read."""
    if kind not in OPTIONS:
        return {}
    table = op.table("builtin_options", OPTIONS[kind])
    options = {}
    for name in FIELDS[OPTIONS[kind]]:
        flags = number_types.Int8Flags if name in BYTES else number_types.Int32Flags
        default = int(name in ONE)
        options[name] = default if table is None else table.number(name, flags, default)
    return options
