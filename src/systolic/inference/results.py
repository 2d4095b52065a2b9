"""Results of ``generate``, ``predict`` and ``eval``, what they report while they work, and the ends of generated texts."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import check_writable, nearest_file, write_atomically
from systolic.core.option_words import path_text
from systolic.core.reporter import reporter

if TYPE_CHECKING:
    import numpy as np

    from systolic.inference.model import TrainedModel

NPZ = ".npz"
OUT_ROWS = ".jsonl", ".csv", ".tsv"


class Finish(StrEnum):
    """Why a text ended."""

    stop = "stop"
    """An end token or a stop string."""
    length = "length"
    """Its number of tokens, or the model's context."""
    cancelled = "cancelled"
    deadline = "deadline"
    error = "error"


@dataclass(kw_only=True, eq=False)
class Continuation(Iterator[str]):
    """Text after a prompt: an iterator of its pieces, and then how it ended."""

    finish: Finish | None = None
    """``stop`` or ``length``; None while there are more pieces."""
    pieces: Iterator[str] = field(default_factory=lambda: iter(()), repr=False)
    at_length: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called where it ended by its length."""

    def __next__(self) -> str:
        return next(self.pieces)


class Stops:
    """Ends a text before the first complete stop string, for any division into pieces.

    Args:
        strings: One or more; a str is one.

    Raises:
        OptionError: a string is empty.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in strings:
            raise OptionError("a stop string is empty; give one with a character or leave it out")
        self.strings = strings
        self.met = False
        """Whether a stop string was found."""
        self._held = ""

    def push(self, piece: str) -> str:
        """Text without a stop string so far; a possible start of one is held back."""
        text = self._held + piece
        matches = [(text.find(stop) + len(stop), stop) for stop in self.strings if stop in text]
        if matches:
            self.met, self._held = True, ""
            # Prefers the longer of two that end at the same place.
            end = min(end for end, _ in matches)
            return text[: end - max(len(stop) for at, stop in matches if at == end)]
        longest = max((_overlap(text, stop) for stop in self.strings), default=0)
        certain = len(text) - longest
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Text held back at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are the start of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A step of the text that continues a prompt: its begin, a piece, or its end."""

    number: int
    """Number of the prompt, from 0."""
    prompt: Any
    """A text, or messages."""
    is_chat: bool = False
    """Whether the prompt is a message that is answered, or several."""
    text: str = ""
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCompletion:
    """A prompt and the text that continues it."""

    prompt: Any
    """A text, or messages."""
    text: str
    """Without the prompt."""
    finish: Finish | None
    """Why it ended."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "prompt" if isinstance(self.prompt, str) else "messages": self.prompt,
            "text": self.text,
            "finish_reason": self.finish and self.finish.value,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedTexts:
    """Texts that a model generated, one for each prompt."""

    path: Path
    """Folder of the model."""
    step: int
    """Training step of its checkpoint; 0 for a model that is no run."""
    texts: Sequence[TextCompletion]
    seconds: float
    """Seconds of all texts."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values: those of one text beside the model's, several as ``answers``."""
        answers = [text.to_json() for text in self.texts]
        record = answers[0] if len(answers) == 1 else {"answers": answers}
        return {"run": path_text(self.path), "step": self.step, **record, "seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class FileAnswer:
    """The answer for one file, or text."""

    file: Path | str
    answer: Mapping[str, Any]
    """Plain values; ``error`` of a file that can't be read, ``rows`` of a table."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"file": path_text(self.file), **self.answer}


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """A model's answers for files."""

    path: Path
    """Folder of the model."""
    step: int
    """Training step of its checkpoint; 0 for a model that is no run."""
    answers: Sequence[FileAnswer]
    """One for each file; of an exported program whose outputs are written none."""
    inputs: str = "files"
    """``inputs`` for a model of embeddings, which takes texts, too."""
    out: Path | None = None
    """File of the answers of all rows, or of the outputs."""
    outputs: "Mapping[str, np.ndarray]" = field(default_factory=dict)
    """Outputs [examples, ...] of an exported program that are written to ``out``."""
    warnings: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """Files without an answer."""
        return sum("error" in each.answer for each in self.answers)

    @property
    def rows(self) -> int:
        """Rows of tables that were answered."""
        return sum(len(each.answer.get("rows", ())) for each in self.answers)

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``predictions``, or what was written."""
        record = {"run": path_text(self.path), "step": self.step}
        if self.out is None:
            return {**record, "predictions": [each.to_json() for each in self.answers]}
        if self.outputs:
            shapes = {name: list(array.shape) for name, array in self.outputs.items()}
            return {**record, "out": str(self.out), "outputs": shapes}
        return {**record, "out": str(self.out), "rows": self.rows}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredModel:
    """Metrics of a model."""

    path: Path
    """Folder of the model."""
    step: int
    """Training step of its checkpoint; 0 for a model that is no run."""
    metrics: Mapping[str, Mapping[str, float]]
    """By split, or by the path of other data."""
    baselines: Mapping[str, float]
    """Baselines of the metrics, such as the bits per byte of gzip."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run": path_text(self.path),
            "step": self.step,
            "metrics": {name: dict(values) for name, values in self.metrics.items()},
            "baselines": dict(self.baselines),
        }


def check_out(files: Sequence[Path | str], out: Path) -> None:
    """Refuses an output that does not fit the files, before the model is opened.

    Raises:
        OptionError: its name says neither arrays nor rows, or arrays are for several files.
    """
    if len(files) != 1 and out.suffix == NPZ:
        raise OptionError(
            f"--out is one file, and {len(files)} files were given; predict them one by one"
        )
    if out.suffix not in (NPZ, *OUT_ROWS):
        raise OptionError(
            f"--out is {out}; name a file that ends in .npz for the arrays of an exported program, or in {' or '.join(OUT_ROWS)} for the answers to rows"
        )
    check_writable(out)


def check_files(files: Sequence[Path | str]) -> None:
    """Refuses files of which none is there.

    Raises:
        NotFoundError: names the first.
    """
    if not any(Path(file).is_file() for file in files):
        raise NotFoundError(
            f"{path_text(files[0])} is not a file{nearest_file(Path(files[0]))}; check the path"
        )


def answered(model: "TrainedModel", files: Sequence[Path | str]) -> Predictions:
    """Answers for files, each reported as it comes."""
    answers = []
    for file, answer in model.predictions(files):
        answers.append(FileAnswer(file, answer))
        if "error" in answer:
            reporter().warn(answer["error"])
        else:
            reporter().update(answers[-1])
    inputs = "inputs" if model.takes_texts else "files"
    return Predictions(path=model.path, step=model.step, answers=answers, inputs=inputs)


def written_rows(model: "TrainedModel", files: Sequence[Path | str], out: Path) -> Predictions:
    """Answers for all rows of tables, written to a file.

    Raises:
        OptionError: the model answers for files.
        DataError: no row was answered; nothing is written.
    """
    from systolic.data.input_files import write_rows

    if not model.takes_rows:
        raise OptionError(
            f"--out {out} takes the answers for rows of tables, and {model.path} answers for files; leave it out, or take --json"
        )
    answers: list[FileAnswer] = []
    rows: list[dict[str, Any]] = []
    for file, answer in model.predictions(files):
        answers.append(FileAnswer(file, answer))
        if "error" in answer:
            reporter().warn(answer["error"])
        name = {"file": str(file)} if len(files) > 1 else {}
        rows += [
            {**name, "row": number, **row} for number, row in enumerate(answer.get("rows", ()), 1)
        ]
    if not rows:
        raise DataError(f"no row was answered, and {out} is not written")
    write_atomically(out, write_rows(out, rows))
    return Predictions(path=model.path, step=model.step, answers=answers, out=out)


def written_arrays(model: "TrainedModel", files: Sequence[Path | str], out: Path) -> Predictions:
    """Outputs of an exported program for a file, written as arrays.

    Raises: as :meth:`~systolic.inference.model.TrainedModel.outputs`.
    """
    import numpy as np

    outputs, packed = model.outputs(files[0]), io.BytesIO()
    np.savez(packed, **outputs)
    write_atomically(out, packed.getvalue())
    return Predictions(path=model.path, step=model.step, answers=(), out=out, outputs=outputs)
