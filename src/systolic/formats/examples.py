"""Real inputs of inference functions: rows of the recipe's evaluation data, files, or a passage of text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import lines_of
from systolic.data.audio import Recordings
from systolic.data.input_files import InputFiles
from systolic.data.text.text_data import Sentences, TextData
from systolic.data.text.tokenizer import Tokenizer
from systolic.formats.comparison import LONGEST as FURTHEST
from systolic.formats.comparison import PASSAGE
from systolic.formats.inference import (
    BATCH,
    ENCODED,
    FEATURES,
    IMAGE,
    SEGMENTS,
    SEQUENCE,
    TOKENS,
    ExportableModel,
    Inference,
    run,
)
from systolic.job import Field, Job, Read, Split
from systolic.job.data import MASK
from systolic.models.decoder.config import Decoder
from systolic.models.whisper.config import Whisper

LETTERS = 8
"""Characters that are read for each token of a text: more than any of its tokens has on average."""
LONGEST = 64
"""Most tokens of a row, but for a model with windows."""
BEYOND = 16
"""Tokens of its rows beyond the largest window, and of other rows that are padding in one call."""
MOST_TEXTS = 256
"""Most rows of text files: lines where each text stands alone, windows of the text otherwise."""
ORDER = (Split.validation, Split.test, Split.train)
"""Splits whose rows are taken, the first that has any."""


@dataclass(frozen=True, kw_only=True)
class ExampleInputs:
    """Example inputs of a model's functions."""

    inputs: Mapping[str, Mapping[str, np.ndarray]] = field(repr=False)
    """Name of a function to its inputs by name, [examples, ...]."""
    rows: int
    origin: str
    """Their source in words: ``validation data``, ``files``, ``a passage of text``, ``random pictures`` …"""

    def compared(self, function: Inference) -> list[dict[str, np.ndarray]]:
        """Calls of a comparison: all examples, and one more with other sizes where these are free."""
        other = self.smaller(function)
        return [*self.calls(function), *([] if other is None else [other])]

    def smaller(self, function: Inference) -> dict[str, np.ndarray] | None:
        """One example alone, its texts cut and the end of their mask taken for padding, as far as sizes are free; ``None`` where none is."""
        if not {BATCH, SEQUENCE} & set(function.free):
            return None
        inputs = next(self.calls(function, 1 if BATCH in function.free else None))
        if SEQUENCE in function.free:
            tokens = inputs[TOKENS].shape[1]
            cut = max(tokens - 3, 1)
            for name in {TOKENS, MASK} & set(inputs):
                inputs[name] = inputs[name][:, :cut]
            if MASK in inputs and cut > 1:
                inputs[MASK] = inputs[MASK] * (np.arange(cut) < max(cut - BEYOND, 1)).astype(
                    inputs[MASK].dtype
                )
        return inputs

    def calls(
        self, function: Inference, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """A function's inputs in groups of ``size`` examples, by default the function's own batch or all at once."""
        arrays = self.inputs[function.name]
        size = size or function.batch or self.rows
        for start in range(0, self.rows - size + 1, size):
            yield {
                name: array if name in function.whole else array[start : start + size]
                for name, array in arrays.items()
            }


def example_inputs(
    model: ExportableModel, rows: int = 4, files: Sequence[Path] = ()
) -> ExampleInputs:
    """Inputs for each function of a model: ``rows`` examples or as many as there are, in whole batches where these are not free.

    Args:
        model: The model.
        rows: Examples.
        files: Files in place of the recipe's own data, as ``predict`` takes them; all their examples, of texts the
            lines or windows of up to :data:`MOST_TEXTS`.

    Raises:
        NotFoundError: there is no such file.
        DataError: a file can't be read.
        OptionError: the recipe's data has no form for single files.
    """
    length = model.sizes.get(SEQUENCE) or longest(model.job)
    if not files and length > LONGEST and SEQUENCE not in model.sizes:
        rows = max(1, min(rows, rows * LONGEST // length))
    if files:
        batch, origin = _of_files(model.job, files, length), "files"
    else:
        batch, origin = _own(model.job, rows, length)
        batch = {name: array[:rows] for name, array in batch.items()}
    count = len(next(iter(batch.values())))
    if BATCH in model.sizes:
        count = -(-count // model.sizes[BATCH]) * model.sizes[BATCH]
        batch = {name: np.resize(array, (count, *array.shape[1:])) for name, array in batch.items()}
    inputs: dict[str, dict[str, np.ndarray]] = {}
    for name, function in model.functions.items():
        if ENCODED in function.inputs:
            encode = model.functions_on("cpu")["encode"].call
            batch = {**batch, ENCODED: run(encode, model.params, inputs["encode"])[ENCODED]}
        inputs[name] = function_inputs(function, batch, model.sizes, length)
    return ExampleInputs(inputs=inputs, rows=count, origin=origin)


def longest(job: Job) -> int:
    """Most tokens of a row: beyond the windows of a model's layers, as far as a comparison with another library goes."""
    model = job.model
    if not isinstance(model, Decoder):
        return LONGEST
    tokens = max(model.windows) + BEYOND
    return tokens if LONGEST < tokens <= FURTHEST else LONGEST


def function_inputs(
    function: Inference,
    batch: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    most: int = LONGEST,
) -> dict[str, np.ndarray]:
    """Inputs of a function out of examples as the job's data has them, name to [examples, ...]; of texts up to ``most`` tokens."""
    inputs: dict[str, np.ndarray] = {}
    for own, spec in function.inputs.items():
        array = batch[function.sources.get(own, own)]
        if own in function.whole:
            array = array[0]
        if own in (TOKENS, MASK):
            limit = min(most, function.limits.get(SEQUENCE, most))
            array = _columns(array, limit, sizes.get(SEQUENCE))
        inputs[own] = (array > 0 if own == MASK else array).astype(spec.dtype)
    return inputs


def _columns(array: np.ndarray, most: int, exact: int | None) -> np.ndarray:
    """The first tokens of texts [rows, tokens]: up to ``most``, or ``exact`` with zeros at the end."""
    array = array[:, : exact or most]
    return array if exact is None else np.pad(array, ((0, 0), (0, exact - array.shape[1])))


def _own(job: Job, rows: int, length: int) -> tuple[dict[str, np.ndarray], str]:
    """Rows of the job's own data, else what stands for it."""
    data = job.data
    # Data that has moved since the training is no reason to refuse an export.
    with suppress(NotFoundError, DataError):
        for split in ORDER:
            if data.size(split) != 0:
                return _read(job, split, rows), f"{split.value} data"
    if isinstance(data, TextData):
        tokens = _passage(job, data.get_tokenizer(), rows, length)
        return {TOKENS: tokens, SEGMENTS: np.ones_like(tokens)}, "a passage of text"
    if isinstance(data, Sentences):
        lines = PASSAGE.splitlines()
        texts = [lines[number % len(lines)] for number in range(rows)]
        return _sentences(data, texts, length), "sentences"
    random = np.random.default_rng(0)
    arrays = {name: _random(random, spec, rows) for name, spec in data.fields().items()}
    if isinstance(data, Recordings):
        arrays[TOKENS] = _passage(job, data.get_tokenizer(), rows, length)
    named = "pictures" if IMAGE in arrays else "spectrograms" if FEATURES in arrays else "arrays"
    return arrays, f"random {named}"


def _passage(job: Job, tokenizer: Tokenizer, rows: int, length: int) -> np.ndarray:
    """A passage of text in rows, int32[rows, length]."""
    ids = _known(job, tokenizer.encode(PASSAGE))
    return np.resize(ids, (rows, length)).astype(np.int32)


def _known(job: Job, ids: Sequence[int]) -> np.ndarray:
    """Tokens that a model has: without its tokenizer it may have fewer than there are bytes."""
    known = np.asarray(ids)
    return known % job.model.vocab if isinstance(job.model, Decoder | Whisper) else known


def _read(job: Job, split: Split, rows: int) -> dict[str, np.ndarray]:
    batches = job.data.open(Read(split=split, batch=rows, shuffle=False, epochs=1))
    try:
        first = next(batches)
    finally:
        batches.close()
    kept = first[MASK] > 0
    return {name: array[kept] for name, array in first.items() if name != MASK}


def _sentences(data: Sentences, texts: Sequence[str], length: int) -> dict[str, np.ndarray]:
    """Texts of up to ``length`` tokens, each as long as it is and padded to the longest."""
    ids = replace(data, sequence=min(data.sequence, length)).encode(texts)
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
    segments = np.zeros_like(tokens)
    for row, text in enumerate(ids):
        tokens[row, : len(text)], segments[row, : len(text)] = text, 1
    return {TOKENS: tokens, SEGMENTS: segments}


def _random(random: np.random.Generator, spec: Field, rows: int) -> np.ndarray:
    shape = (rows, *spec.shape)
    if np.dtype(spec.dtype) == np.uint8:
        return random.integers(0, 256, shape, np.uint8)
    if np.issubdtype(np.dtype(spec.dtype), np.floating):
        return random.normal(size=shape).astype(spec.dtype)
    return np.zeros(shape, spec.dtype)


def _of_files(job: Job, files: Sequence[Path], length: int) -> dict[str, np.ndarray]:
    """Examples of files, one or several each."""
    data = job.data
    if isinstance(data, Sentences):
        return _sentences(data, _of_texts(files, _lines), length)
    if isinstance(data, TextData):
        tokenizer = data.get_tokenizer()

        def windows_of(text: str, most: int) -> list[np.ndarray]:
            ids = _known(job, tokenizer.encode(text[: most * length * LETTERS]))
            # Windows of a text, int32[length] each; the text again and again where it is shorter than one.
            count = max(len(ids) // length, 1)
            return list(np.resize(ids, (count, length)).astype(np.int32))

        windows = np.stack(_of_texts(files, windows_of))
        return {TOKENS: windows, SEGMENTS: np.ones_like(windows)}
    if isinstance(data, InputFiles):
        return _stacked([example for file in files for example in data.examples(file)])
    if isinstance(data, Recordings):
        from systolic.data.audio import read_sound

        heard = [window.features for file in files for window in data.windows(read_sound(file))]
        arrays = _stacked([{FEATURES: features} for features in heard])
        return {**arrays, TOKENS: _passage(job, data.get_tokenizer(), len(heard), length)}
    return _stacked([data.load(file) for file in files])


def _of_texts(files: Sequence[Path], rows: Callable[[str, int], Sequence[Any]]) -> list[Any]:
    """Rows of text files, as many of each."""
    from systolic.data.text.text_data import read_text

    most = -(-MOST_TEXTS // len(files))
    return [row for file in files[:MOST_TEXTS] for row in rows(read_text(file), most)[:most]]


def _lines(text: str, most: int) -> list[str]:
    """The first lines of a text that have words."""
    return lines_of(text)[:most]


def _stacked(examples: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    if not examples:
        raise DataError("the files hold no example; give others")
    try:
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}
    except ValueError as error:
        raise OptionError(
            f"the files hold examples of several shapes ({error}); give others"
        ) from error
