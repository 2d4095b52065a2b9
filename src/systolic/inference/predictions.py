"""Predictions for files: labels of images, scores and vectors of texts, transcripts of recordings, answers for rows of tables, outputs of an exported program."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.data.arrays import Arrays
from systolic.data.audio import Recordings, read_sound
from systolic.data.input_files import InputFiles, TableInputs
from systolic.data.text.text_data import Sentences, TextData, read_text
from systolic.inference.predictor import Arrays as Given
from systolic.inference.predictor import (
    Example,
    FixedForm,
    Form,
    Predictor,
    SpeechReader,
    TextReader,
    joined,
)
from systolic.inference.rows import MOST, Bucket, Row, enough
from systolic.job import Task
from systolic.job.data import MASK, Data
from systolic.runs.weights import Weights
from systolic.steps.step_functions import StepFunctions
from systolic.steps.tasks import ArrayClassification

UNREADABLE = (DataError, NotFoundError, OSError)
"""Errors of a file that do not affect the others."""
WINDOWS = 8
"""Fewest windows per call, rounded up to a multiple of the devices."""
SHORTEST = 8
"""Fewest tokens of a row."""
ROWS = 256
"""Most rows of a call."""
Reader = TypeVar("Reader", bound=Form | TextReader | SpeechReader)
Answer = dict[str, Any]


class RowPrograms:
    """Programs of a model over rows, one for each size of a call, kept for later calls by any thread.

    Sizes are few: powers of two up to :data:`ROWS`, rounded up to what devices and examples that stay together need.
    """

    def __init__(self, steps: StepFunctions, weights: Weights) -> None:
        self.steps, self.weights = steps, weights
        self._lock = threading.Lock()
        self._kept: dict[Any, tuple[Any, Predictor]] = {}

    def of(self, make: Callable[[StepFunctions], Reader]) -> tuple[Reader, Predictor]:
        """A reader of rows that ``make`` makes of the steps, a form or what has one, and the predictor of its form; the first call makes them."""
        with self._lock:
            if make not in self._kept:
                reader, weights = make(self.steps), self.weights
                form = reader if isinstance(reader, Form) else reader.form
                predictor = Predictor(form, weights.params, weights.model_state)
                self._kept[make] = reader, predictor
            return self._kept[make]


def predictions(programs: RowPrograms, files: Sequence[Path]) -> Iterator[tuple[Path, Answer]]:
    """Predictions by file, as plain values, in the order of the files.

    For a file that can't be read ``error`` has the reason.
    """
    data = programs.steps.job.data
    if isinstance(data, Recordings):
        yield from transcriptions(programs, files)
        return
    if isinstance(data, TextData) and "targets" in data.fields():
        for file in files:
            try:
                yield file, _score(programs, data, file)
            except UNREADABLE as error:
                yield file, {"error": _reason(file, error)}
        return
    if isinstance(data, InputFiles):
        run = Runner(programs, MOST, data.together)
        for file in files:
            try:
                arrays = _stacked(run, data, file)
                yield file, {name: array.tolist() for name, array in arrays.items()}
            except UNREADABLE as error:
                yield file, {"error": _reason(file, error)}
        return
    run = Runner(programs, enough(len(files)))
    for start in range(0, len(files), run.batch):
        group = files[start : start + run.batch]
        loaded = [_load(data, file) for file in group]
        outputs = run(example for example in loaded if not isinstance(example, str))
        for file, example in zip(group, loaded, strict=True):
            if isinstance(example, str):
                yield file, {"error": example}
            else:
                yield file, named(next(outputs), data.labels())


def output_arrays(programs: RowPrograms, file: Path) -> dict[str, np.ndarray]:
    """Outputs [examples, ...] of a model that takes arrays by name, for all examples of a file.

    Raises:
        OptionError: the model takes something else.
        NotFoundError: there is no such file.
        DataError: it lacks inputs, or has no examples.
    """
    data = programs.steps.job.data
    if not isinstance(data, InputFiles):
        raise OptionError(
            f"--out takes the arrays of an exported program, and {programs.steps.job.name} is none; leave it out, or take --json"
        )
    return _stacked(Runner(programs, MOST, data.together), data, file)


def _stacked(run: "Runner", data: InputFiles, file: Path) -> dict[str, np.ndarray]:
    """Outputs of all examples of a file."""
    each = list(run(data.examples(file)))
    if not each:
        raise DataError(f"{file} has no examples; give arrays of one or more")
    stacks = {name: np.stack([example[name] for example in each]) for name in each[0]}
    # numpy's files have no bfloat16.
    return {
        name: array.astype(np.float32) if array.dtype == jax.numpy.bfloat16 else array
        for name, array in stacks.items()
    }


def _load(data: Data, file: Path) -> Mapping[str, np.ndarray] | str:
    """Example from a file, or the reason that it is none."""
    try:
        return data.load(file)
    except UNREADABLE as error:
        return _reason(file, error)


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{file} can't be read ({error.strerror}); check the path"
    return str(error)


class Runner:
    """The predict step over any number of examples; ``together`` of them that follow each other are never divided."""

    def __init__(self, programs: RowPrograms, examples: int, together: int = 1) -> None:
        form, self._run = programs.of(FixedForm)
        unit = math.lcm(form.ways, together)
        self.batch = -(-examples // unit) * unit

    def __call__(
        self, examples: Iterator[Mapping[str, np.ndarray]]
    ) -> Iterator[dict[str, np.ndarray]]:
        """One output for each example: name to array."""
        while group := [Row(arrays=example) for example in itertools.islice(examples, self.batch)]:
            yield from self._run(group, Bucket(rows=self.batch))


def _score(programs: RowPrograms, data: TextData, file: Path) -> dict[str, Any]:
    """Score of a text under the model."""
    from systolic.data.text.corpus import check_text
    from systolic.data.text.rows import cut, lay

    check_text(file)
    text = file.read_bytes()
    documents = data.get_tokenizer().documents([text])
    sequence = data.fields()["tokens"].shape[0]
    rows = lay(cut(documents, sequence), sequence)
    if not text or not len(rows["tokens"]):
        raise DataError(f"{file} is empty; give a text to score")
    run = Runner(programs, enough(len(rows["tokens"])))
    outputs = list(
        run({name: array[i] for name, array in rows.items()} for i in range(len(rows["tokens"])))
    )
    nats = float(sum(output["nats"] for output in outputs))
    tokens = float(sum(output["tokens"] for output in outputs))
    return {
        "bits_per_byte": nats / math.log(2) / len(text),
        "perplexity": math.exp(min(nats / tokens, 700.0)),
        "tokens": int(tokens),
    }


def named(output: Mapping[str, np.ndarray], labels: Sequence[str]) -> dict[str, Any]:
    """Plain values, with classes by name."""
    if "label" in output and "probability" in output and output["label"].ndim:
        names = [labels[i] if i < len(labels) else str(i) for i in output["label"].tolist()]
        chances = output["probability"].tolist()
        return {
            "label": names[0],
            "probability": chances[0],
            "top": dict(zip(names, chances, strict=True)),
        }
    return {name: value.tolist() for name, value in output.items()}


def transcriptions(programs: RowPrograms, files: Sequence[Path]) -> Iterator[tuple[Path, Answer]]:
    """``text`` of each file, in the order of the files; ``error`` has the reason for one that can't be read.

    Raises:
        OptionError: the job is not about speech, or its tokens are not the model's.
    """
    reader, run = programs.of(SpeechReader)
    write = _Scribe(reader, run, Bucket(rows=run.up(WINDOWS)))
    waiting: list[tuple[Path, Example]] = []
    for file in files:
        try:
            waiting.append((file, reader.read(read_sound(file))))
        except (DataError, NotFoundError) as error:
            yield from write(waiting)
            waiting = []
            yield file, {"error": str(error)}
            continue
        if sum(len(example.rows) for _, example in waiting) >= write.bucket.rows:
            yield from write(waiting)
            waiting = []
    yield from write(waiting)


class _Scribe:
    """The transcription program over any number of windows."""

    def __init__(self, reader: SpeechReader, run: Predictor, bucket: Bucket) -> None:
        self._reader, self._run, self.bucket = reader, run, bucket

    def __call__(
        self, waiting: Sequence[tuple[Path, Example]]
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The answers for some files."""
        rows = [row for _, example in waiting for row in example.rows]
        size = self.bucket.rows
        outputs = iter(
            [
                output
                for start in range(0, len(rows), size)
                for output in self._run(rows[start : start + size], self.bucket)
            ]
        )
        for file, example in waiting:
            spoken = self._reader.spoken(example, [next(outputs) for _ in example.rows])
            yield file, {"text": joined(spoken)}


def embeddings(
    programs: RowPrograms, texts: Sequence[str | Path]
) -> Iterator[tuple[str | Path, dict[str, Any]]]:
    """``embedding``, a list of numbers, of each text, in their order.

    A text that is the path of a file stands for its content; for one that can't be read ``error`` has the reason.
    """
    reader, run = programs.of(TextReader)
    for start in range(0, len(texts), enough(len(texts))):
        group = texts[start : start + enough(len(texts))]
        contents = [_content(text) for text in group]
        rows = [
            example.rows[0]
            for example in reader.read([text for text, error in contents if error is None])
        ]
        outputs = iter(())
        if rows:
            # Few lengths mean few programs to compile, and a short text takes a short time.
            longest = max(row.length for row in rows)
            width = min(max(SHORTEST, 1 << (longest - 1).bit_length()), reader.most)
            outputs = iter(run(rows, Bucket(rows=run.up(enough(len(rows))), length=width)))
        for text, (_, error) in zip(group, contents, strict=True):
            if error is None:
                yield text, {"embedding": next(outputs)["embedding"].astype(np.float32).tolist()}
            else:
                yield text, {"error": error}


def _content(text: str | Path) -> tuple[str, str | None]:
    """A text, or "" and the reason that there is none."""
    try:
        if isinstance(text, Path) or is_file(text):
            name, content = str(text), read_text(Path(text))
        else:
            name, content = "a text", text
    except (DataError, NotFoundError) as error:
        return "", str(error)
    return content, None if content else f"{name} is empty; give a text"


def is_file(text: str) -> bool:
    """Whether a text is the path of a file; a text may be longer than any path."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def are_rows(data: Data) -> bool:
    """Whether a job's examples come from no files of their own, so that new ones are rows of tables."""
    others = TextData | Recordings | InputFiles | Sentences
    return type(data).load is Data.load and not isinstance(data, others)


class TableForm(FixedForm):
    """The task's outputs of rows; of a task that defines none, what its model returns when the loss is computed."""

    _read: TableInputs | None = None

    def function(self) -> Callable[[Given, Given, Given], dict[str, jax.Array]]:
        """See :class:`~systolic.inference.predictor.Form`."""
        task = self.steps.job.task
        return self.steps.predict if type(task).outputs is not Task.outputs else self._returned

    def _returned(self, params: Given, model_state: Given, batch: Given) -> dict[str, jax.Array]:
        network = self.steps.network
        module = network.module(network.cast(params), model_state, train=False)
        watched = _OutputRecorder(module)
        task: Any = self.steps.job.task
        task.terms(watched, batch, False)
        size, outputs = batch[MASK].shape[0], dict[str, jax.Array]()
        for path, value in jax.tree_util.tree_leaves_with_path(watched.returned):
            if isinstance(value, jax.Array) and value.ndim and value.shape[0] == size:
                keys = [key for key in path if isinstance(key, jax.tree_util.DictKey)]
                name = "_".join(str(key.key) for key in keys)
                outputs.setdefault(
                    name or ("output" if not outputs else f"output_{len(outputs)}"), value
                )
        if not outputs:
            name = type(self.steps.job.task).__name__
            raise OptionError(
                f"the task {name} calls its model in a way of its own, so its answers are not known; give it a method outputs(self, model, batch) that returns arrays by name"
            )
        return outputs

    def inputs(self, weights: Weights) -> TableInputs:
        """The fields that the outputs depend on, traced once; others, such as labels, are not read."""
        if self._read is not None:
            return self._read
        data = self.steps.job.data
        batch = self.abstract(Bucket(rows=self.ways))
        variables = weights.params, weights.model_state
        closed = jax.make_jaxpr(self.function())(*variables, batch)
        from jax.interpreters.partial_eval import dce_jaxpr

        _, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        names = sorted(batch)  # in which order a dict is flattened
        read = {*itertools.compress(names, used[-len(names) :])} - {MASK}
        fields = data.fields()
        self._read = TableInputs(
            fields={name: field for name, field in fields.items() if name in read},
            unread=tuple(name for name in fields if name not in read),
            columns=dict(data.columns) if isinstance(data, Arrays) else None,
        )
        return self._read


class _OutputRecorder:
    """A module that remembers what its calls returned."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.returned: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._module(*args, **kwargs)
        self.returned.append(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def rows_of(programs: RowPrograms, files: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``rows``, the answers for each row of a file as plain values, or for a file that is no table of the model's inputs ``error``, one line.

    Raises:
        OptionError: the task's outputs are not known.
    """
    form, run = programs.of(TableForm)
    inputs = form.inputs(programs.weights)
    for file in files:
        try:
            yield file, {"rows": list(_answers(programs.steps, run, inputs.rows(file)))}
        except (DataError, NotFoundError) as error:
            yield file, {"error": str(error)}


def answers_of(programs: RowPrograms, arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer for each row of arrays by name, as plain values.

    Raises:
        OptionError: the model takes files alone.
        DataError: an array is missing, unknown, or of another shape or kind.
    """
    steps, where = programs.steps, "files"
    data = steps.job.data
    if isinstance(data, InputFiles):
        run = Runner(programs, MOST, data.together)
        return [named(output, ()) for output in run(data.examples_of(arrays, where))]
    if not are_rows(data):
        raise OptionError(
            f"files is a dict of arrays, and {steps.job.name} predicts for files; give a path or a list of paths"
        )
    form, run = programs.of(TableForm)
    return list(_answers(steps, run, form.inputs(programs.weights).rows_of(arrays, where)))


def _answers(
    steps: StepFunctions, run: Predictor, rows: Iterator[dict[str, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    while group := [Row(arrays=arrays) for arrays in islice(rows, ROWS)]:
        size = run.up(min(ROWS, 1 << max(len(group) - 1, 0).bit_length()))
        for output in run(group, Bucket(rows=size)):
            yield _plain(steps, output)


def _plain(steps: StepFunctions, output: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Plain values; of a classification with the class and its probability."""
    task, names = steps.job.task, steps.job.data.labels()
    answer: dict[str, Any] = {}
    if isinstance(task, ArrayClassification) and (logits := output[task.output]).ndim == 1:
        best = int(logits.argmax())
        chances = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))
        answer = {
            "label": names[best] if best < len(names) else best,
            "probability": float(chances[best]),
        }
    wide = {
        name: array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        for name, array in output.items()
    }
    return answer | named(wide, names)
