"""Predictions for single files: labels for images, scores for texts, raw outputs for a user's own kind."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.data.audio.recordings import Recordings
from systolic.data.input_files import InputFiles
from systolic.data.text.text_data import TextData
from systolic.inference.forms import FixedForm
from systolic.inference.predictor import Predictor
from systolic.inference.recordings import transcriptions
from systolic.inference.rows import MOST, Bucket, Row, enough
from systolic.job.data import Data
from systolic.runs.weights import Weights
from systolic.steps.steps import StepFunctions

UNREADABLE = (DataError, NotFoundError, OSError)
"""Errors of a file that do not affect the others."""


def predictions(
    steps: StepFunctions, weights: Weights, files: Sequence[Path]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Predictions by file, as plain values, in the order of the files.

    For a file that can't be read ``error`` has the reason.
    """
    data = steps.job.data
    if isinstance(data, Recordings):
        yield from transcriptions(steps, weights, files)
        return
    if isinstance(data, TextData) and "targets" in data.fields():
        for file in files:
            try:
                yield file, _score(steps, weights, data, file)
            except UNREADABLE as error:
                yield file, {"error": _reason(file, error)}
        return
    if isinstance(data, InputFiles):
        run = Runner(steps, weights, MOST, data.together)
        for file in files:
            try:
                made = _stacked(run, data, file)
                yield file, {name: one.tolist() for name, one in made.items()}
            except UNREADABLE as error:
                yield file, {"error": _reason(file, error)}
        return
    run = Runner(steps, weights, enough(len(files)))
    for start in range(0, len(files), run.batch):
        group = files[start : start + run.batch]
        loaded = [_load(data, file) for file in group]
        outputs = run(found for found in loaded if not isinstance(found, str))
        for file, found in zip(group, loaded, strict=True):
            if isinstance(found, str):
                yield file, {"error": found}
            else:
                yield file, named(next(outputs), data.labels())


def output_arrays(steps: StepFunctions, weights: Weights, file: Path) -> dict[str, np.ndarray]:
    """Outputs [examples, ...] of a model that takes arrays by name, for all examples of a file.

    Raises:
        OptionError: the model takes something else.
        NotFoundError: there is no such file.
        DataError: it lacks inputs, or has no examples.
    """
    data = steps.job.data
    if not isinstance(data, InputFiles):
        raise OptionError(
            f"--out takes the arrays of an exported program, and {steps.job.name} is none; leave it out, or take --json"
        )
    return _stacked(Runner(steps, weights, MOST, data.together), data, file)


def _stacked(run: "Runner", data: InputFiles, file: Path) -> dict[str, np.ndarray]:
    """Outputs of all examples of a file."""
    each = list(run(data.examples(file)))
    if not each:
        raise DataError(f"{file} has no examples; give arrays of one or more")
    made = {name: np.stack([one[name] for one in each]) for name in each[0]}
    # numpy's files have no bfloat16.
    return {
        name: one.astype(np.float32) if one.dtype == jax.numpy.bfloat16 else one
        for name, one in made.items()
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

    def __init__(
        self, steps: StepFunctions, weights: Weights, examples: int, together: int = 1
    ) -> None:
        form = FixedForm(steps)
        self._run = Predictor(form, weights.params, weights.model_state)
        unit = math.lcm(form.ways, together)
        self.batch = -(-examples // unit) * unit

    def __call__(
        self, examples: Iterator[Mapping[str, np.ndarray]]
    ) -> Iterator[dict[str, np.ndarray]]:
        """One output for each example: name to array."""
        while group := [Row(arrays=example) for example in itertools.islice(examples, self.batch)]:
            yield from self._run(group, Bucket(rows=self.batch))


def _score(steps: StepFunctions, weights: Weights, data: TextData, file: Path) -> dict[str, Any]:
    """Score of a text under the model."""
    from systolic.data.text.find_corpus import check_text
    from systolic.data.text.rows import cut, lay

    check_text(file)
    text = file.read_bytes()
    documents = data.get_tokenizer().documents([text])
    sequence = data.fields()["tokens"].shape[0]
    rows = lay(cut(documents, sequence), sequence)
    if not text or not len(rows["tokens"]):
        raise DataError(f"{file} is empty; give a text to score")
    run = Runner(steps, weights, enough(len(rows["tokens"])))
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
