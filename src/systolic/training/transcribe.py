"""Texts of sound files, many windows in one call of a program that is compiled once."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.artifact.weights import Weights
from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.data.audio.recordings import Recordings, checked_prompt
from systolic.models.whisper.config import Whisper
from systolic.steps.transcribe import Transcribe
from systolic.training.setup import Setup

WINDOWS = 8
"""Fewest windows per call, rounded up to a multiple of the devices."""


def transcriptions(
    setup: Setup, weights: Weights, files: Sequence[Path]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``text`` of each file, in the order of the files; ``error`` has the reason for one that can't be read.

    A recording longer than the model's window is cut in the quietest 0.1 s of each window's last sixth; its
    windows are transcribed on their own and their texts joined.

    Raises:
        OptionError: the job is not about speech, or its tokens are not the model's.
    """
    data, model = setup.job.data, setup.job.model
    if not isinstance(data, Recordings) or not isinstance(model, Whisper):
        raise OptionError(f"{setup.job.name} does not write down speech; use systolic eval")
    write = Writer(setup, weights, data, model)
    waiting: list[tuple[Path, int]] = []
    windows: list[np.ndarray] = []
    for file in files:
        try:
            found = data.windows(file)
        except (DataError, NotFoundError) as error:
            yield from _told(write, waiting, windows)
            waiting, windows = [], []
            yield file, {"error": str(error)}
            continue
        waiting.append((file, len(found)))
        windows += found
        if len(windows) >= write.batch:
            yield from _told(write, waiting, windows)
            waiting, windows = [], []
    yield from _told(write, waiting, windows)


def _told(
    write: "Writer", waiting: Sequence[tuple[Path, int]], windows: Sequence[np.ndarray]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The answers for some files, each of so many of the windows."""
    texts = write(windows)
    for file, count in waiting:
        parts = [text for text in (next(texts).strip() for _ in range(count)) if text]
        yield file, {"text": " ".join(parts)}


class Writer:
    """The transcription program over any number of windows."""

    def __init__(self, setup: Setup, weights: Weights, data: Recordings, model: Whisper) -> None:
        checked_prompt(data.writing, model.vocab)
        steps, ways = setup.steps, setup.job.layout.batch_ways
        self.batch = -(-WINDOWS // ways) * ways
        self._data, self._weights = data, weights
        self._sharding = steps.batch_shardings["features"]
        self._tokenizer = data.get_tokenizer()
        self._program = jax.jit(
            Transcribe(steps, data.writing, model.positions),
            compiler_options=steps.target.compiler_options,
        )

    def __call__(self, windows: Sequence[np.ndarray]) -> Iterator[str]:
        """The text of each window f32[frames, mels]."""
        for start in range(0, len(windows), self.batch):
            group = windows[start : start + self.batch]
            features = np.zeros((self.batch, *group[0].shape), np.float32)
            features[: len(group)] = np.stack(group)
            tokens = self._program(
                self._weights.params,
                self._weights.model_state,
                jax.device_put(features, self._sharding),
                np.arange(self.batch) < len(group),
            )
            for row in np.asarray(tokens)[: len(group)].tolist():
                ended = row.index(self._data.writing.end) if self._data.writing.end in row else None
                yield self._tokenizer.decode(row[:ended])
