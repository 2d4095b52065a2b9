"""How rows become the arguments of a program: one class for each kind of program."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import OptionError
from systolic.data.audio.recordings import Recordings, checked_prompt
from systolic.data.text.sentences import Sentences
from systolic.inference.rows import Bucket, Row
from systolic.job.data import MASK
from systolic.models.whisper.config import Whisper
from systolic.steps.steps import StepFunctions
from systolic.steps.transcribe import Transcribe

Arrays = dict[str, Any]
NO_LABEL = {"label": -1, "targets": -1}
"""Values other than 0 of arrays that a row lacks."""
FEATURES = "features"
"""A recording's spectrogram."""
PROMPT = "prompt"
"""Ids that a recording's text starts with."""
TOKENS = "tokens"


class Form(ABC):
    """Rows of one kind as a batch, and the program that takes it."""

    longest: int | None = None
    """Most positions of a row; None where all rows have one shape."""
    steady = True
    """Whether a call takes the same time whatever its rows hold."""

    def __init__(self, steps: StepFunctions) -> None:
        self.steps = steps

    @property
    def linear(self) -> bool:
        """Whether a call takes about as long as it has positions, as on a CPU: many small calls cost no more than few large ones."""
        return self.steps.target.platform == "cpu"

    @property
    def ways(self) -> int:
        """Rows of a batch are a multiple of this."""
        return self.steps.job.layout.batch_ways

    @property
    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        """Of the arrays of a batch."""
        return self.steps.batch_shardings

    @abstractmethod
    def function(self) -> Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]:
        """(params, model_state, batch) to outputs [rows, ...] by name."""

    @abstractmethod
    def shapes(self, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of a batch, :data:`MASK` left out."""

    def batch(self, rows: Sequence[Row], bucket: Bucket) -> dict[str, np.ndarray]:
        """Rows as the first ones of a batch; the others are padding, which MASK marks with 0."""
        arrays: dict[str, np.ndarray] = {}
        for name, (shape, dtype) in self.shapes(bucket).items():
            whole = np.full(shape, NO_LABEL.get(name, 0), dtype)
            for index, row in enumerate(rows):
                if name in row.arrays:
                    whole[index] = row.arrays[name]
            arrays[name] = whole
        arrays[MASK] = (np.arange(bucket.rows) < len(rows)).astype(np.float32)
        return arrays

    def abstract(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch as ShapeDtypeStructs with shardings."""
        shapes = {**self.shapes(bucket), MASK: ((bucket.rows,), "float32")}
        where = self.shardings
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where[name])
            for name, (shape, dtype) in shapes.items()
        }


class FixedForm(Form):
    """The predict step over examples of one shape."""

    def __init__(self, steps: StepFunctions) -> None:
        super().__init__(steps)
        self._fields = steps.job.data.fields()

    def function(self) -> Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]:
        """See :class:`Form`."""
        return self.steps.predict

    def shapes(self, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], str]]:
        """See :class:`Form`."""
        return {
            name: ((bucket.rows, *field.shape), field.dtype) for name, field in self._fields.items()
        }


class TextForm(FixedForm):
    """The predict step over texts: ids ``tokens`` int32[length] of a row, as long as they are."""

    def __init__(self, steps: StepFunctions, data: Sentences) -> None:
        super().__init__(steps)
        self.longest = data.sequence

    def shapes(self, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], str]]:
        """See :class:`Form`."""
        assert bucket.length is not None
        return dict.fromkeys(self._fields, ((bucket.rows, bucket.length), "int32"))

    def batch(self, rows: Sequence[Row], bucket: Bucket) -> dict[str, np.ndarray]:
        """See :class:`Form`; segments are 1 where there is a token."""
        assert bucket.length is not None
        made = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.shapes(bucket).items()
        }
        for index, row in enumerate(rows):
            made[TOKENS][index, : row.length] = row.arrays[TOKENS]
            made["segments"][index, : row.length] = 1
        made["positions"][:] = np.arange(bucket.length, dtype=np.int32)
        made[MASK] = (np.arange(bucket.rows) < len(rows)).astype(np.float32)
        return made


class SpeechForm(Form):
    """Transcription of windows: ``features`` f32[frames, mels] and ``prompt`` int32[n] of a row to ``tokens`` int32[positions].

    Raises:
        OptionError: the job is not about speech, or its tokens are not the model's.
    """

    steady = False

    def __init__(self, steps: StepFunctions) -> None:
        super().__init__(steps)
        data, model = steps.job.data, steps.job.model
        if not isinstance(data, Recordings) or not isinstance(model, Whisper):
            raise OptionError(f"{steps.job.name} does not write down speech; use systolic eval")
        checked_prompt(data.writing, model.vocab)
        self._transcribe = Transcribe(steps, data.writing, model.positions)
        self._field, self._prompt = data.fields()[FEATURES], len(data.writing.prompt)

    @property
    def shardings(self) -> dict[str, jax.sharding.NamedSharding]:
        """See :class:`Form`."""
        known = self.steps.batch_shardings
        return {**known, PROMPT: known[MASK]}

    def function(self) -> Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]:
        """See :class:`Form`."""

        def write(params: Arrays, model_state: Arrays, batch: Arrays) -> dict[str, jax.Array]:
            heard = batch[FEATURES], batch[PROMPT], batch[MASK] > 0
            return {TOKENS: self._transcribe(params, model_state, *heard)}

        return write

    def shapes(self, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], str]]:
        """See :class:`Form`."""
        return {
            FEATURES: ((bucket.rows, *self._field.shape), self._field.dtype),
            PROMPT: ((bucket.rows, self._prompt), "int32"),
        }
