"""A model's program over rows: one executable for each bucket, a class for each way in which rows become its arguments, and readers of inputs as rows and of outputs as answers."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from systolic.chips.host import num_cpus
from systolic.compiling.program_store import ProgramSpec, ProgramStore, ReadyProgram, made_ready
from systolic.core.errors import OptionError
from systolic.core.files import digest
from systolic.data.audio import Recordings, checked_prompt
from systolic.data.text.text_data import Sentences
from systolic.inference.rows import Bucket, Row
from systolic.job.data import MASK
from systolic.models.program.config import ForeignModel
from systolic.models.whisper.config import Whisper, language_of, name_of, token_of
from systolic.steps.decode import Transcribe
from systolic.steps.jaxpr import FoldedProgram
from systolic.steps.step_functions import StepFunctions

Arrays = dict[str, Any]
NO_LABEL = {"label": -1, "targets": -1}
"""Values other than 0 of arrays that a row lacks."""
FEATURES = "features"
"""A recording's spectrogram."""
PROMPT = "prompt"
"""Ids that a recording's text starts with."""
TOKENS = "tokens"
PIECE_BYTES = 12 * 2**20
"""Largest array of a piece of a batch on a CPU, of two rows at least. 8 pictures of MobileNetV2 take 0.65 of the time in pieces of two,
32 texts of MiniLM 0.85 in pieces of 8: caches hold what they compute, and glibc maps memory of 32 MiB or more anew in each call."""
CORE_MFLOPS = 500
"""Work of a core, of two rows at least, from which on the cores of a CPU answer parts of a batch side by side, one thread each, in place of one
operation after another together: 0.7 to 0.95 of the time on two idle cores, and half of it where they share no cache (MobileNetV2, MiniLM, ResNet-18)."""
Output = Mapping[str, np.ndarray]
"""Outputs of a row by name."""


class Constants(NamedTuple):
    """Facts about a bucket's program that need no trace of it."""

    key: str
    """Digest of the program that computes them."""
    shapes: list[jax.ShapeDtypeStruct]
    flops: float
    """FLOPs of a call's products."""


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
        """Shardings of the arrays of a batch."""
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
        arrays = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.shapes(bucket).items()
        }
        for index, row in enumerate(rows):
            arrays[TOKENS][index, : row.length] = row.arrays[TOKENS]
            arrays["segments"][index, : row.length] = 1
        arrays["positions"][:] = np.arange(bucket.length, dtype=np.int32)
        arrays[MASK] = (np.arange(bucket.rows) < len(rows)).astype(np.float32)
        return arrays


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


class Predictor:
    """Weights with the programs that turn rows into outputs.

    Args:
        form: How rows make a batch.
        params: Weights.
        model_state: Other variables.
        store: Where programs are kept; None compiles all.
    """

    def __init__(
        self, form: Form, params: Arrays, model_state: Arrays, store: ProgramStore | None = None
    ) -> None:
        self.form, self._store = form, store
        self._weights = (params, model_state)
        target = form.steps.target
        self._options = target.compiler_options
        self._jitted = jax.jit(form.function(), compiler_options=self._options)
        self._folds = target.platform == "cpu" and target.mesh.size == 1
        # Examples of a model or task that is not of this package may depend on each other.
        job = form.steps.job
        own = all(type(part).__module__.startswith("systolic.") for part in (job.model, job.task))
        independent = own and not isinstance(job.model, ForeignModel)
        self._divides = self._folds and form.steady and independent
        self._constants: dict[str, list[jax.Array]] = {}
        self._described: dict[Bucket, Constants] = {}
        self._compiled: dict[Bucket, Callable[[Arrays], Any]] = {}
        self._tracers: dict[Bucket, Callable[[], FoldedProgram]] = {}
        self._locks: dict[Bucket, threading.Lock] = {}
        self._cores = num_cpus()

    def compile(self, bucket: Bucket) -> ReadyProgram | None:
        """Makes the program of a bucket ready, from the store or compiled; None where it was made before, or by another bucket."""
        bucket = self.of_core(bucket)
        with self._locks.setdefault(bucket, threading.Lock()):
            return None if bucket in self._compiled else self._compile(bucket)

    def of_core(self, bucket: Bucket) -> Bucket:
        """The rows that one core answers where the cores divide a bucket, else all of them."""
        own = replace(bucket, rows=bucket.rows // self._cores)
        if not self._divides or bucket.rows % self._cores or not 2 <= own.rows < bucket.rows:
            return bucket
        return own if self._constants_of(own).flops >= CORE_MFLOPS * 1e6 else bucket

    def _compile(self, bucket: Bucket) -> ReadyProgram:
        constants: Any = self._weights
        if self._folds:
            constants = (self._shared(bucket),)
        spec = self._spec(bucket)

        def lower() -> Any:
            if self._folds:
                jitted = jax.jit(self._in_pieces(bucket), compiler_options=self._options)
                return jitted.lower(*spec.arguments)
            return self._jitted.lower(*spec.arguments)

        program = made_ready(self._store, spec, lower)
        self._compiled[bucket] = partial(program.compiled, *constants)
        self._tracers.pop(bucket, None)
        return program

    def spec(self, bucket: Bucket) -> ProgramSpec:
        """Entry of the program of a bucket in the store."""
        return self._spec(self.of_core(bucket))

    def _spec(self, bucket: Bucket) -> ProgramSpec:
        plain = self._plain(f"predict {bucket}", bucket)
        if not self._folds:
            return plain
        constants = self._constants_of(bucket)
        sizes = {**plain.sizes, "constants": constants.key}
        return replace(plain, sizes=sizes, arguments=(constants.shapes, plain.arguments[-1]))

    def _plain(self, name: str, bucket: Bucket) -> ProgramSpec:
        """A program of a bucket over all weights."""
        sizes = {"form": type(self.form).__name__}
        arguments = (*self._weights, self.form.abstract(bucket))
        return ProgramSpec(name=name, sizes=sizes, arguments=arguments)

    def _folded(self, bucket: Bucket) -> Callable[[], FoldedProgram]:
        """Tracer of the folded program of a bucket; it traces once."""

        def traced() -> FoldedProgram:
            return FoldedProgram(self.form.function(), self._weights, self.form.abstract(bucket))

        return self._tracers.setdefault(bucket, cache(traced))

    def _in_pieces(self, bucket: Bucket) -> Callable[..., Any]:
        """The folded program of a bucket, rows in pieces whose arrays caches hold."""
        folded = self._folded(bucket)()
        rows, largest = bucket.rows, folded.largest
        sizes = [size for size in range(2, rows) if rows % size == 0]
        if not sizes or not self._divides or largest <= PIECE_BYTES:
            return folded
        piece = max(
            (size for size in sizes if size * largest <= PIECE_BYTES * rows), default=sizes[0]
        )
        own = self._folded(replace(bucket, rows=piece))()
        return partial(own.in_pieces, pieces=rows // piece)

    def _constants_of(self, bucket: Bucket) -> Constants:
        """Constants of a bucket's program, from the store or by tracing it."""
        if bucket not in self._described:

            def make() -> Any:
                program = self._folded(bucket)()
                listed = [[list(o.shape), str(o.dtype), bool(o.weak_type)] for o in program.shapes]
                return [digest(program.key), listed, program.flops]

            spec = self._plain(f"constants of {bucket}", bucket)
            key, listed, flops = make() if self._store is None else self._store.facts(spec, make)
            shapes = [
                jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
                for shape, dtype, weak in listed
            ]
            self._described[bucket] = Constants(key, shapes, flops)
        return self._described[bucket]

    def _shared(self, bucket: Bucket) -> list[jax.Array]:
        """Constants of a bucket's program, which others share."""
        key, shapes, _ = self._constants_of(bucket)
        if key not in self._constants:
            leaves = jax.tree.leaves(self._weights)
            spec = ProgramSpec(
                name=f"constants {key}", arguments=(leaves,), outputs=[0] * len(shapes)
            )
            fold = made_ready(
                self._store,
                spec,
                lambda: jax.jit(self._folded(bucket)().fold).lower(*spec.arguments),
            )
            self._constants[key] = fold.compiled(leaves)
        return self._constants[key]

    def outputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Outputs of a bucket's program by name."""
        spec = self._plain(f"outputs of {bucket}", bucket)
        if self._store is None:
            return self._jitted.eval_shape(*spec.arguments)

        def make() -> dict[str, Any]:
            shapes = self._jitted.eval_shape(*spec.arguments)
            return {
                name: [list(struct.shape), str(struct.dtype)] for name, struct in shapes.items()
            }

        return {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (shape, dtype) in self._store.facts(spec, make).items()
        }

    def __call__(self, rows: Sequence[Row], bucket: Bucket) -> list[dict[str, np.ndarray]]:
        """Outputs of each row by name; compiles the bucket's program if that was not done before."""
        self.compile(bucket)
        batch: Arrays = dict(self.form.batch(rows, bucket))
        if not self._folds:
            where = self.form.shardings
            batch = {name: jax.device_put(array, where[name]) for name, array in batch.items()}
        size = self.of_core(bucket).rows
        program = self._compiled[replace(bucket, rows=size)]
        parts = [batch]
        if size < bucket.rows:
            firsts = range(0, bucket.rows, size)
            parts = [{name: a[i : i + size] for name, a in batch.items()} for i in firsts]

        def answered(part: Arrays) -> dict[str, np.ndarray]:
            outputs = program(part)
            if not self._folds:
                return jax.device_get(outputs)
            # Memory of the host, whose copy by device_get would take a tenth of a small call.
            return {name: np.asarray(array) for name, array in outputs.items()}

        answers = list((map if len(parts) == 1 else _threads().map)(answered, parts))
        # A copy, so that an answer does not keep the whole batch in memory.
        return [
            {name: np.array(array[index % size]) for name, array in answers[index // size].items()}
            for index in range(len(rows))
        ]

    def up(self, rows: int) -> int:
        """The least number of rows, at least ``rows``, that the devices divide."""
        return -(-rows // self.form.ways) * self.form.ways


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_cpus(), "systolic-core")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """One thing to answer: a picture, a text, a recording."""

    rows: Sequence[Row]
    """At least one."""
    spans: Sequence[tuple[float, float]] = ()
    """Start and end of each row in a recording, in seconds."""


class Segment(NamedTuple):
    """A part of a recording with its text."""

    start_seconds: float
    end_seconds: float
    text: str


class TextReader:
    """Texts for a model of embeddings."""

    def __init__(self, steps: StepFunctions) -> None:
        data = steps.job.data
        assert isinstance(data, Sentences)
        self.form, self._data = TextForm(steps, data), data
        # One for all texts: a file that is replaced meanwhile belongs to other weights.
        self.tokenizer = data.get_tokenizer()

    def read(self, texts: Sequence[str]) -> list[Example]:
        """Examples of some texts, cut to what the model reads."""
        return [self.of(ids) for ids in self._data.encode(texts, self.tokenizer)]

    def ids(self, texts: Sequence[str], most: int | None = None) -> list[np.ndarray]:
        """Token ids int32[tokens] of some texts, which can be more than :attr:`most` unless so many are kept."""
        return self._data.encode_whole(texts, self.tokenizer, most)

    @property
    def most(self) -> int:
        """Tokens that the model reads of a text, those around it among them."""
        return self._data.sequence

    def of(self, ids: np.ndarray) -> Example:
        """An example of token ids int32[tokens], with the tokens around a text."""
        ids = ids[: self._data.sequence]
        return Example(rows=[Row(arrays={TOKENS: ids}, length=len(ids))])


class SpeechReader:
    """Recordings for a model that writes down speech.

    A recording longer than the model's window is cut in the quietest 0.1 s of each window's last sixth; its
    windows are transcribed on their own and their texts joined.

    Raises:
        OptionError: the job is not about speech, or its tokens are not the model's.
    """

    def __init__(self, steps: StepFunctions) -> None:
        self.form = SpeechForm(steps)
        data = steps.job.data
        assert isinstance(data, Recordings)
        self._data, self._tokenizer = data, data.get_tokenizer()
        assert isinstance(steps.job.model, Whisper)
        self._vocab = steps.job.model.vocab
        self._tongues = [language_of(self._tokenizer.token(i)) for i in data.writing.prompt]

    def language(self, example: Example) -> str:
        """Name of the language that an example is written in, such as ``german``; "" where that is not known."""
        if not any(self._tongues):
            return name_of("en") if self._data.writing.prompt and self._data.tokenizer else ""
        ids = example.rows[0].arrays[PROMPT]
        languages = (language_of(self._tokenizer.token(int(i))) for i in ids)
        return name_of(next(filter(None, languages), ""))

    def prompt(self, language: str) -> np.ndarray:
        """Ids int32[n] that a text in a language starts with; "" is the model's own.

        Raises:
            OptionError: the model does not write it.
        """
        ids = np.array(self._data.writing.prompt, np.int32)
        if not language:
            return ids
        index = self._tokenizer.find(token_of(language))
        if index is not None and not 0 <= index < self._vocab:
            raise OptionError(
                f"language is {language[:40]!r}, whose token has the id {index}, and the model has 0 to {self._vocab - 1}; leave it out, or give the model the tokenizer that belongs to it"
            )
        if any(self._tongues) and index is not None and language_of(token_of(language)):
            return np.where([bool(tongue) for tongue in self._tongues], np.int32(index), ids)
        if not any(self._tongues) and token_of(language) == token_of("en"):
            return ids
        knows = "does not know it" if any(self._tongues) else "writes English alone"
        raise OptionError(
            f"language is {language[:40]!r}, and the model {knows}; leave it out, or give a code such as en"
        )

    def read(self, wave: np.ndarray, prompt: np.ndarray | None = None) -> Example:
        """The windows of a wave f32[samples] of 16 kHz, and the ids int32[n] that each text starts with."""
        windows = self._data.windows(wave)
        start = self.prompt("") if prompt is None else prompt
        return Example(
            rows=[Row(arrays={FEATURES: window.features, PROMPT: start}) for window in windows],
            spans=[(window.start_seconds, window.end_seconds) for window in windows],
        )

    def spoken(self, example: Example, outputs: Sequence[Output]) -> list[Segment]:
        """Text of each window; "" where nothing was said."""
        end, segments = self._data.writing.end, []
        for span, output in zip(example.spans, outputs, strict=True):
            tokens = output[TOKENS].tolist()
            until = tokens.index(end) if end in tokens else None
            segments.append(Segment(*span, self._tokenizer.decode(tokens[:until]).strip()))
        return segments


def joined(spoken: Sequence[Segment]) -> str:
    """The text of a recording."""
    return " ".join(part.text for part in spoken if part.text)
