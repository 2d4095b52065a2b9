"""Inputs and outputs of requests by kind of model: checks, reading of files, and arrays of results."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from systolic.core.errors import OptionError, nearest
from systolic.inference.predictor import Form
from systolic.inference.readers import Example, Output
from systolic.inference.rows import Row
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.batch.request import ANY, BYTES, ArraySpec, ModelKind
from systolic.serving.errors import RefusedError

Inputs = Mapping[str, np.ndarray]


class Intake(ABC):
    """Requests of one kind as examples, and outputs of their rows as an answer."""

    kind: ModelKind
    form: Form
    inputs: Sequence[ArraySpec]
    labels: Sequence[str] = ()
    reads = True
    """Whether reading takes time: files are decoded, texts become tokens."""
    alone: int | None = None
    """Examples of every request, where a batch may hold no more than one request; None where requests share batches."""

    def __init__(self, limits: InputLimits) -> None:
        self.limits = limits

    def check(self, inputs: Inputs) -> int:
        """Number of examples of a request whose arrays have the right names, dtypes and shapes.

        Raises:
            RefusedError: more examples or bytes than the limits.
            OptionError: an input is missing, unknown, or of another dtype or shape.
        """
        known = {spec.name: spec for spec in self.inputs}
        for name in inputs:
            if name not in known:
                raise OptionError(
                    f"there is no input {name!r}{nearest(name, known)}; give {', '.join(known)}"
                )
        for name, spec in known.items():
            if name not in inputs and not spec.optional:
                raise OptionError(f"the input {name} is missing; give {input_form(spec)}")
        return self.count(inputs)

    @abstractmethod
    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """Reading of a checked request, in order, as calls for several threads."""

    @abstractmethod
    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """Arrays of an answer, from the outputs [rows, ...] of a program."""

    @abstractmethod
    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """An example's values by name, from the outputs of its rows."""

    def answer_of(
        self, examples: Sequence[Example], outputs: Sequence[Sequence[Output | None]]
    ) -> dict[str, np.ndarray]:
        """A request's answer, an array [n, ...] for each name."""
        each = [
            self.answer(example, [output for output in row_outputs if output is not None])
            for example, row_outputs in zip(examples, outputs, strict=True)
        ]
        return {name: _stacked([answer[name] for answer in each]) for name in each[0]}

    def count(self, inputs: Inputs) -> int:
        """Examples by the first dims, which agree, each input being encoded files."""
        (array,) = inputs.values()
        (name,) = inputs
        if array.ndim != 1 or not len(array):
            raise OptionError(f"{name} is {form_of(array)}; give one dim of one or more examples")
        self.bound(len(array))
        return len(array)

    def bound(self, examples: int) -> None:
        """Refuses more examples than the limit."""
        if examples > self.limits.examples:
            raise RefusedError(
                f"the request has {examples} examples, and at most {self.limits.examples} are taken; send fewer at once"
            )

    def content(self, name: str, value: Any) -> bytes:
        """The bytes of an encoded input, within the limit."""
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, bytes | bytearray | memoryview):
            raise OptionError(f"{name} has a {type(value).__name__}; give bytes")
        content = bytes(value)
        if len(content) > self.limits.bytes:
            raise RefusedError(
                f"{name} has {len(content)} bytes, and at most {self.limits.bytes} are taken; send a smaller one"
            )
        return content


def single_row(arrays: Mapping[str, np.ndarray]) -> Example:
    """An example of one row."""
    return Example(rows=[Row(arrays=arrays)])


def size_of(inputs: Inputs) -> int:
    """Bytes that the arrays of a request hold."""
    return sum(
        sum(len(value) for value in array.flat if isinstance(value, bytes | str))
        if array.dtype == object
        else array.nbytes
        for array in inputs.values()
    )


def names_of(name: str, count: int) -> list[str]:
    """Names of the examples in messages."""
    return [f"the {name}"] if count == 1 else [f"{name} {index}" for index in range(count)]


def encoded(texts: Sequence[str]) -> np.ndarray:
    """Texts as an array of bytes."""
    array = np.empty(len(texts), object)
    array[:] = [text.encode() for text in texts]
    return array


def spec_of(name: str, array: Any) -> ArraySpec:
    """An output's array; protocols have no bfloat16."""
    dtype = "float32" if str(array.dtype) == "bfloat16" else str(array.dtype)
    return ArraySpec(name=name, dtype=dtype, shape=(ANY, *array.shape[1:]))


def form_of(array: np.ndarray) -> str:
    """Dtype and shape, for messages."""
    return f"{BYTES if array.dtype == object else array.dtype}{list(array.shape)}"


def _stacked(values: Sequence[Any]) -> np.ndarray:
    if isinstance(values[0], bytes):
        array = np.empty(len(values), object)
        array[:] = values
        return array
    array = np.stack(values)
    return array.astype(np.float32) if str(array.dtype) == "bfloat16" else array


def input_form(spec: ArraySpec) -> str:
    """Dtype and shape that an input has, for messages."""
    dims = ", ".join("examples" if size == ANY else str(size) for size in spec.shape)
    return f"{spec.dtype}[{dims}]"
