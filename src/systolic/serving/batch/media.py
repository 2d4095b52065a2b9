"""Pictures, texts and recordings of requests."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.inference.predictor import FixedForm
from systolic.inference.readers import Example, Output, SpeechReader, TextReader, joined
from systolic.serving.batch.buckets import InputLimits
from systolic.serving.batch.intake import (
    Inputs,
    Intake,
    encoded,
    form_of,
    names_of,
    single_row,
    spec_of,
)
from systolic.serving.batch.request import ANY, BYTES, ArraySpec, ModelKind
from systolic.serving.errors import RefusedError


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
        self.form, self._reader, self._vocab = reader.form, reader, vocab
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
        from systolic.data.audio.sound import RATE

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
        from systolic.data.audio.sound import read_sound

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
