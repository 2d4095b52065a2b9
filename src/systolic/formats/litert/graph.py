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
from systolic.formats.litert.schema import (
    ACTIVATIONS,
    BYTES,
    CUSTOM,
    FIELDS,
    ONE,
    OPERATORS,
    OPTIONS,
    TENSOR_TYPES,
)

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
    """Of a constant's values; 0 for what is computed."""
    scales: int = 0
    """Scales of its whole numbers: one, or one for each channel; 0 for other numbers."""
    values: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Of a small constant of whole numbers."""

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
    """Of the operation: newer ones take more types, and older runtimes refuse them."""

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
    """Of all constants of the file."""
    named_inputs: Mapping[str, LiteTensor] = field(default_factory=dict)
    named_outputs: Mapping[str, LiteTensor] = field(default_factory=dict)
    """By the names that callers use, of the file's first signature; {} without one."""
    graphs: int = 1
    """Graphs in the file: bodies of loops and branches are graphs of their own."""

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each (operation, dtype) occurs, without operations that only store numbers in another way."""
        return Counter((op.kind, op.precision) for op in self.ops if op.kind not in MOVES)

    def floating(self) -> Counter[str]:
        """Operations that compute in floating point, by name."""
        found: Counter[str] = Counter()
        for op in self.ops:
            if op.kind in MOVES or not op.precision.startswith(("FLOAT", "BFLOAT")):
                continue
            whole = any(tensor.constant and tensor.scales for tensor in op.inputs)
            found[f"{op.kind} with int8 weights" if whole else op.kind] += 1
        return found


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
        return _Reader(content).graph()
    except Exception as error:  # a flatbuffer is a net of offsets: a wrong one can do anything
        raise DataError(
            f"{name} is damaged ({type(error).__name__}: {error}); copy it again, or export the model again"
        ) from error


class _Record:
    """A table of a flatbuffer, its fields by the names of the schema."""

    def __init__(self, kind: str, content: bytes, place: int) -> None:
        self._table, self._places = Table(content, place), FIELDS[kind]

    def _field(self, name: str) -> int:
        """Where a field is; 0 where the file leaves it out."""
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


class _Reader:
    def __init__(self, content: bytes) -> None:
        root = encode.Get(number_types.UOffsetTFlags.packer_type, content, 0)
        self._content, self._model = content, _Record("Model", content, int(root))
        self._codes = self._model.tables("operator_codes", "OperatorCode")
        self._buffers = self._model.tables("buffers", "Buffer")
        self._sizes = [self._size(one) for one in self._buffers]

    def graph(self) -> LiteGraph:
        """The first graph."""
        graphs = self._model.tables("subgraphs", "SubGraph")
        main = graphs[0]
        tensors = [self._tensor(one) for one in main.tables("tensors", "Tensor")]

        def pick(indices: np.ndarray) -> tuple[LiteTensor, ...]:
            # An input that is left out has the index -1.
            return tuple(tensors[index] for index in indices.tolist() if index >= 0)

        return LiteGraph(
            ops=tuple(self._op(one, pick) for one in main.tables("operators", "Operator")),
            inputs=pick(main.numbers("inputs")),
            outputs=pick(main.numbers("outputs")),
            constant_bytes=sum(self._sizes),
            **self._signature(tensors),
            graphs=len(graphs),
        )

    def _signature(self, tensors: Sequence[LiteTensor]) -> dict[str, dict[str, LiteTensor]]:
        """Inputs and outputs of the first signature by name."""
        found = self._model.tables("signature_defs", "SignatureDef")
        if not found:
            return {}
        uint = number_types.Uint32Flags
        return {
            f"named_{side}": {
                one.text("name"): tensors[one.number("tensor_index", uint)]
                for one in found[0].tables(side, "TensorMap")
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
    found = op.table("builtin_options", OPTIONS[kind])
    made = {}
    for name in FIELDS[OPTIONS[kind]]:
        flags = number_types.Int8Flags if name in BYTES else number_types.Int32Flags
        default = int(name in ONE)
        made[name] = default if found is None else found.number(name, flags, default)
    return made
