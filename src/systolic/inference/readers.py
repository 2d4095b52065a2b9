"""Readers of inputs as rows, and of outputs as answers: one class for each kind of model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from systolic.core.errors import OptionError
from systolic.data.audio import Recordings
from systolic.data.text.text_data import Sentences
from systolic.inference.predictor import FEATURES, PROMPT, TOKENS, SpeechForm, TextForm
from systolic.inference.rows import Row
from systolic.models.whisper.config import Whisper, language_of, name_of, token_of
from systolic.steps.step_functions import StepFunctions

Output = Mapping[str, np.ndarray]
"""Outputs of a row by name."""


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

    def __init__(self, steps: StepFunctions, data: Sentences) -> None:
        self.form, self._data = TextForm(steps, data), data
        # One for all texts: a file that is replaced meanwhile belongs to other weights.
        self._tokenizer = data.get_tokenizer()

    def read(self, texts: Sequence[str]) -> list[Example]:
        """Examples of some texts, cut to what the model reads."""
        return [self.of(ids) for ids in self._data.encode(texts, self._tokenizer)]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids int32[tokens] of some texts, which can be more than :attr:`most`."""
        return self._data.encode_whole(texts, self._tokenizer)

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
