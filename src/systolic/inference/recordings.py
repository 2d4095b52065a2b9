"""Texts of sound files, many windows in one call of a program that is compiled once."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, NotFoundError
from systolic.data.audio.sound import read_sound
from systolic.inference.predictor import Predictor
from systolic.inference.readers import Example, SpeechReader, joined
from systolic.inference.rows import Bucket
from systolic.runs.weights import Weights
from systolic.steps.steps import StepFunctions

WINDOWS = 8
"""Fewest windows per call, rounded up to a multiple of the devices."""


def transcriptions(
    steps: StepFunctions, weights: Weights, files: Sequence[Path]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``text`` of each file, in the order of the files; ``error`` has the reason for one that can't be read.

    Raises:
        OptionError: the job is not about speech, or its tokens are not the model's.
    """
    reader = SpeechReader(steps)
    run = Predictor(reader.form, weights.params, weights.model_state)
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
        made = iter(
            [
                output
                for start in range(0, len(rows), size)
                for output in self._run(rows[start : start + size], self.bucket)
            ]
        )
        for file, example in waiting:
            spoken = self._reader.spoken(example, [next(made) for _ in example.rows])
            yield file, {"text": joined(spoken)}
