"""Inputs and outputs of requests by kind of model: pictures, texts, recordings, and arrays of exported programs and users' jobs."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from systolic.compiling.program_store import ProgramSpec, ProgramStore
from systolic.core.errors import DataError, OptionError, nearest
from systolic.data.input_files import InputFiles
from systolic.formats.program.model import ExportedProgram
from systolic.inference.predictor import (
    Example,
    FixedForm,
    Form,
    Output,
    SpeechReader,
    TextReader,
    joined,
)
from systolic.inference.rows import Bucket, Row
from systolic.job import Field
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.request import ANY, BYTES, ArraySpec, ModelKind, RefusedError

Inputs = Mapping[str, np.ndarray]
KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}
"""Kinds of numbers that become a kind."""


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
    reader: TextReader | None = None
    """Reader of texts; None for other models."""

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


class ImageIntake(Intake):
    """Pictures: files that the model's own preparation reads, or pixels as they are."""

    kind = ModelKind.image

    def __init__(self, form: FixedForm, limits: InputLimits) -> None:
        super().__init__(limits)
        self.form, self._data = form, form.steps.job.data
        self.labels = self._data.labels()
        self.inputs = (ArraySpec(name="image", dtype=BYTES, shape=(ANY,)),)
        self._shape = tuple(self._data.fields()["image"].shape)

    def count(self, inputs: Inputs) -> int:
        """See :class:`Intake`."""
        array = inputs["image"]
        if array.dtype == object:
            count = super().count(inputs)
            for value in array:
                self.content("image", value)
            return count
        if array.dtype != np.uint8 or array.shape[1:] != self._shape or not len(array):
            raise OptionError(
                f"image is {form_of(array)}; give files, or uint8[examples, {', '.join(map(str, self._shape))}]"
            )
        self.bound(len(array))
        return len(array)

    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """See :class:`Intake`."""
        array = inputs["image"]
        if array.dtype != object:
            examples = [single_row({"image": pixels}) for pixels in array]
            return [lambda: examples]
        names = names_of("image", len(array))
        return [
            lambda value=value, name=name: [self._read(self.content(name, value), name)]
            for value, name in zip(array, names, strict=True)
        ]

    def _read(self, content: bytes, name: str) -> Example:
        from systolic.data.image.pictures import check_picture

        check_picture(content, self.limits.pixels, name)
        return single_row(self._data.read(content, name))

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """See :class:`Intake`; ``name`` where the program ranks classes."""
        specs = [spec_of(name, array) for name, array in of.items()]
        if self._ranks(of):
            specs.append(ArraySpec(name="name", dtype=BYTES, shape=(ANY, of["label"].shape[1])))
        return specs

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """See :class:`Intake`."""
        (output,) = outputs
        if not self._ranks({name: array[None] for name, array in output.items()}):
            return dict(output)
        known = self.labels
        names = [known[i] if i < len(known) else str(i) for i in output["label"].tolist()]
        return {**output, "name": encoded(names)}

    def _ranks(self, of: Mapping[str, Any]) -> bool:
        return "label" in of and "probability" in of and len(of["label"].shape) == 2


class TextIntake(Intake):
    """Texts to embed, or their token ids."""

    kind = ModelKind.embedding

    def __init__(self, reader: TextReader, vocab: int, limits: InputLimits) -> None:
        super().__init__(limits)
        self.form, self.reader, self._vocab = reader.form, reader, vocab
        self._reader = reader
        self.inputs = (ArraySpec(name="text", dtype=BYTES, shape=(ANY,)),)

    def count(self, inputs: Inputs) -> int:
        """See :class:`Intake`."""
        count = super().count(inputs)
        for index, value in enumerate(inputs["text"]):
            if isinstance(value, str | bytes):
                self.content("text", value)
                if not value:
                    raise OptionError(f"text {index} is empty; give a text")
            else:
                self._check_ids(index, value)
        return count

    def _check_ids(self, index: int, value: Any) -> None:
        ids = np.asarray(value)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise OptionError(f"text {index} is {form_of(ids)}; give a text, or its token ids")
        if ids.min() < 0 or ids.max() >= self._vocab:
            raise OptionError(
                f"text {index} has the token id {ids.max() if ids.min() >= 0 else ids.min()}, and the model has 0 to {self._vocab - 1}"
            )

        self._check_length(index, ids)

    def _check_length(self, index: int, ids: np.ndarray) -> None:
        if len(ids) > self._reader.most:
            raise OptionError(
                f"text {index} has {len(ids)} tokens, and the model reads up to {self._reader.most}; shorten or split it"
            )

    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """See :class:`Intake`; the tokenizer has threads of its own."""
        values = list(inputs["text"])

        def read() -> list[Example]:
            texts = {
                i: _text(value, "text", i)
                for i, value in enumerate(values)
                if isinstance(value, str | bytes)
            }
            ids = dict(zip(texts, self._reader.ids(list(texts.values())), strict=True))
            for index, tokens in ids.items():
                self._check_length(index, tokens)
            return [
                self._reader.of(ids[i] if i in ids else np.asarray(value, np.int32))
                for i, value in enumerate(values)
            ]

        return [read]

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """See :class:`Intake`."""
        specs = [spec_of(name, array) for name, array in of.items()]
        return [*specs, ArraySpec(name="tokens", dtype="int32", shape=(ANY,))]

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """See :class:`Intake`."""
        (output,) = outputs
        return {**output, "tokens": np.int32(example.rows[0].length)}


class SpeechIntake(Intake):
    """Recordings to write down."""

    kind = ModelKind.transcription

    def __init__(self, reader: SpeechReader, limits: InputLimits) -> None:
        super().__init__(limits)
        self.form, self._reader = reader.form, reader
        self.inputs = (
            ArraySpec(name="audio", dtype=BYTES, shape=(ANY,)),
            ArraySpec(name="language", dtype=BYTES, shape=(ANY,), optional=True),
        )

    def count(self, inputs: Inputs) -> int:
        """See :class:`Intake`."""
        from systolic.data.audio import RATE

        array = inputs["audio"]
        if (languages := inputs.get("language")) is not None:
            if languages.dtype != object or languages.shape != array.shape[:1]:
                raise OptionError(
                    f"language is {form_of(languages)}; give a text for each of {len(array)} recordings"
                )
            for index, value in enumerate(languages):
                self._reader.prompt(_text(value, "language", index))
        if array.dtype == object:
            count = super().count({"audio": array})
            for value in array:
                self.content("audio", value)
            return count
        if array.dtype != np.float32 or array.ndim != 2 or not array.size:
            raise OptionError(
                f"audio is {form_of(array)}; give files, or float32[examples, samples] of {RATE} Hz"
            )
        if array.shape[1] > self.limits.seconds * RATE:
            raise RefusedError(
                f"audio has {array.shape[1] / RATE:.0f} s, and at most {self.limits.seconds:g} s are taken; send it in parts"
            )
        if not np.isfinite(array).all():
            raise OptionError("audio has NaN or infinite samples; give -1 to 1")
        self.bound(len(array))
        return len(array)

    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """See :class:`Intake`."""
        from systolic.data.audio import read_sound

        array = inputs["audio"]

        def read(value: Any, name: str, language: str) -> Sequence[Example]:
            prompt = self._reader.prompt(language)
            if isinstance(value, np.ndarray):
                return [self._reader.read(value, prompt)]
            content = self.content(name, value)
            return [self._reader.read(read_sound(content, name, self.limits.seconds), prompt)]

        names = names_of("audio", len(array))
        languages = inputs.get("language", [""] * len(array))
        codes = [_text(value, "language", index) for index, value in enumerate(languages)]
        return [partial(read, *arguments) for arguments in zip(array, names, codes, strict=True)]

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """See :class:`Intake`."""
        del of
        return (
            ArraySpec(name="text", dtype=BYTES, shape=(ANY,)),
            ArraySpec(name="language", dtype=BYTES, shape=(ANY,)),
            ArraySpec(name="seconds", dtype="float32", shape=(ANY,)),
            ArraySpec(name="segments", dtype=BYTES, shape=(ANY,)),
        )

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """See :class:`Intake`."""
        spoken = self._reader.spoken(example, outputs)
        segments = [
            {"start": part.start_seconds, "end": part.end_seconds, "text": part.text}
            for part in spoken
        ]
        return {
            "text": joined(spoken).encode(),
            "language": self._reader.language(example).encode(),
            "seconds": np.float32(spoken[-1].end_seconds),
            "segments": json.dumps(segments).encode(),
        }


def _text(value: str | bytes, name: str, index: int) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name} {index} is not UTF-8 ({error.reason}); give a text") from error


def kind_of(dtype: Any) -> str:
    """``f``, ``i``, ``u`` or ``b`` as of NumPy's own dtypes."""
    return "f" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


def check_range(name: str, array: np.ndarray, dtype: Any) -> None:
    """Refuses numbers that a dtype can't hold; infinities and NaN are no numbers, and pass to floats.

    Raises:
        OptionError: some are too large or too small.
    """
    dtype, kind = np.dtype(dtype), kind_of(dtype)
    if array.dtype == dtype or not array.size or kind not in "fiu":
        return
    numbers = array if kind_of(array.dtype) != "f" else array[np.isfinite(array)]
    if not numbers.size:
        return
    least, most = numbers.min(), numbers.max()
    about: Any = jnp.finfo(dtype) if kind == "f" else jnp.iinfo(dtype)
    if kind == "f":
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.stack([least, most]).astype(dtype)).all()
    else:
        fits = least >= about.min and most <= about.max
    if not fits:
        raise OptionError(
            f"{name} has numbers from {least} to {most}, and {dtype} holds {about.min} to {about.max}"
        )


class ArrayIntake(Intake):
    """Arrays by name, one entry for each example.

    A program whose examples depend on each other, which was exported for a number of examples, takes requests
    of that number, each alone.
    """

    kind = ModelKind.tensors
    reads = False

    def __init__(self, form: FixedForm, used: Sequence[str], limits: InputLimits) -> None:
        super().__init__(limits)
        self.form = form
        job = form.steps.job
        self._fields: Mapping[str, Field] = {
            name: field for name, field in job.data.fields().items() if name in used
        }
        self._repeated = job.data.repeated if isinstance(job.data, InputFiles) else ()
        if isinstance(job.model, ExportedProgram) and not job.model.about.independent:
            self.alone = job.model.about.batch
        self.inputs = tuple(self._spec(name, field) for name, field in self._fields.items())

    def _spec(self, name: str, field: Field) -> ArraySpec:
        each = () if name in self._repeated else (self.alone or ANY,)
        return ArraySpec(name=name, dtype=field.dtype, shape=(*each, *field.shape))

    def count(self, inputs: Inputs) -> int:
        """See :class:`Intake`."""
        counts: dict[str, int] = {}
        for spec in self.inputs:
            array, field = inputs[spec.name], self._fields[spec.name]
            each = spec.name not in self._repeated
            shape = array.shape[1:] if each else array.shape
            if shape != tuple(field.shape) or (each and not len(array)):
                raise OptionError(f"{spec.name} is {form_of(array)}; give {input_form(spec)}")
            _check_numbers(array, spec)
            if each:
                counts[spec.name] = len(array)
        if len(set(counts.values())) != 1:
            raise OptionError(
                f"the inputs differ in their first dim ({', '.join(f'{name} {count}' for name, count in counts.items())}); it is the number of examples"
            )
        num_examples = next(iter(counts.values()))
        if self.alone is not None and num_examples != self.alone:
            raise OptionError(
                f"the request has {num_examples} examples, and the program was exported for {self.alone} that depend on each other; give {self.alone}"
            )
        self.bound(num_examples)
        return num_examples

    def parts(self, inputs: Inputs) -> Sequence[Callable[[], Sequence[Example]]]:
        """See :class:`Intake`."""
        arrays = {name: inputs[name].astype(field.dtype) for name, field in self._fields.items()}
        repeated = {name: arrays[name] for name in arrays if name in self._repeated}
        shared = b""
        if repeated:
            digest = hashlib.sha256()
            for array in repeated.values():
                digest.update(np.ascontiguousarray(array).tobytes())
            shared = digest.digest()
        several = {name: array for name, array in arrays.items() if name not in repeated}
        count = len(next(iter(several.values())))
        examples = [
            Example(
                rows=[
                    Row(
                        arrays={**repeated, **{name: array[i] for name, array in several.items()}},
                        shared=shared,
                    )
                ]
            )
            for i in range(count)
        ]
        return [lambda: examples]

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        """See :class:`Intake`."""
        return [spec_of(name, array) for name, array in of.items()]

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        """See :class:`Intake`."""
        del example
        (output,) = outputs
        return dict(output)


def _check_numbers(array: np.ndarray, spec: ArraySpec) -> None:
    """Refuses numbers of another kind, and those that the dtype can't hold."""
    if kind_of(array.dtype) not in KINDS.get(kind_of(spec.dtype), ""):
        raise OptionError(
            f"{spec.name} is {array.dtype}, and the model takes {spec.dtype}; convert it"
        )
    check_range(spec.name, array, spec.dtype)


def used_inputs(
    form: FixedForm, params: Any, model_state: Any, store: ProgramStore | None = None
) -> list[str]:
    """Names of the arrays of an example that the program's outputs depend on: labels are none of them.

    Args:
        form: How rows make a batch.
        params: Weights, or their ShapeDtypeStructs.
        model_state: Other variables likewise.
        store: Where the names are kept; None traces the program.
    """
    model = form.steps.job.model
    together = model.about.together if isinstance(model, ExportedProgram) else 1
    batch = form.abstract(Bucket(rows=math.lcm(form.ways, together)))
    if store is None:
        return _traced(form, params, model_state, batch)
    sizes = {"form": type(form).__name__}
    spec = ProgramSpec(name="inputs", sizes=sizes, arguments=(params, model_state, batch))
    return store.facts(spec, lambda: _traced(form, params, model_state, batch))


def _traced(form: FixedForm, params: Any, model_state: Any, batch: dict[str, Any]) -> list[str]:
    names = sorted(batch)
    closed = jax.make_jaxpr(
        lambda params, model_state, arrays: form.function()(
            params, model_state, dict(zip(names, arrays, strict=True))
        )
    )(params, model_state, [batch[name] for name in names])
    needed = {v for v in closed.jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)}
    for equation in reversed(closed.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, jax.extend.core.Literal))
    own = closed.jaxpr.invars[-len(names) :]
    return [
        name
        for name, variable in zip(names, own, strict=True)
        if variable in needed and name in form.steps.job.data.fields()
    ]
