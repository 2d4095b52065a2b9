"""Base of all text sources: the fields of a row of tokens, and a tokenizer; how documents lie in rows."""

import enum
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, Range, check
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.job import Layout
from systolic.job.data import Data, Field, NoExamples

if TYPE_CHECKING:
    import numpy as np

    from systolic.data.text.chat import ChatTemplate, Messages


ROW = Range(least=1, most=2**24)
"""Tokens of a row; longer ones would not fit any device."""

FILL = {"targets": -1}
"""Padding values other than 0."""


class Packing(enum.Enum):
    """How documents are laid into rows."""

    fit = "fit"
    """Whole documents wherever a row has room (best fit); only longer ones than a row are cut."""
    cut = "cut"
    """One after another, cut at the ends of rows: no padding, more documents without their start."""


class TextData(Data):
    """Rows of tokens for a language model."""

    __slots__ = ()

    @abstractmethod
    def get_tokenizer(self) -> "Tokenizer":
        """The tokenizer of the rows; reads no text."""

    def encoding(self) -> Sequence[str]:
        """Encoding of the tokenizer."""
        return self.get_tokenizer().about()

    def with_tokenizer(self, path: Path) -> "TextData":
        """The same data with the tokenizer in a folder; unchanged if its tokenizer is fixed."""
        del path
        return self

    @property
    def context(self) -> int:
        """Tokens of a text that the model is made for: those that it sees at once in training."""
        return self.row

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.fields()["tokens"].shape[0]

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a generated text."""
        end = self.get_tokenizer().end
        return frozenset() if end is None else frozenset({end})

    def chat(self, messages: "Messages") -> str:
        """Text of a conversation up to where the model answers, by the chat template beside the tokenizer.

        Raises:
            OptionError: there is no chat template.
            DataError: the template is damaged, or refuses the messages.
        """
        template = self.find_template()
        if template is None:
            raise OptionError(
                f"the tokenizer {self.get_tokenizer().file() or 'of bytes'} has no chat template, so the model knows no chat; give prompts as text, without --chat and --system"
            )
        return template.render(messages, answer=True)

    def find_template(self) -> "ChatTemplate | None":
        """The chat template beside the tokenizer; ``None`` for a model that knows no chat.

        Raises:
            DataError: tokenizer_config.json is no JSON.
        """
        file = self.get_tokenizer().file()
        return None if file is None else _template(file.parent)

    def vocab_size(self) -> int:
        """One more than the largest token id; reads the tokenizer's file only, if there is one."""
        return self.get_tokenizer().vocab_size


def _template(folder: Path) -> "ChatTemplate | None":
    from systolic.data.text.chat import find_template

    return find_template(folder)


def row_fields(sequence: int) -> Mapping[str, Field]:
    """tokens, targets (-1: no loss), segments (0: padding) and positions, int32[sequence]."""
    row = Field(shape=(sequence,), dtype="int32", axes=("sequence",))
    return dict.fromkeys(("tokens", "targets", "segments", "positions"), row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences(NoExamples):
    """Texts given one by one; all splits are empty."""

    refusal: ClassVar[str] = (
        "a model of embeddings brings no {split} text; give texts to systolic predict"
    )

    tokenizer: Path | None = None
    """A ``tokenizer.json`` or its folder; None reads bytes."""
    sequence: Annotated[int, COUNT] = 512
    """Most tokens of a text, those around it included; the rest is cut off."""
    lower: bool = False
    """Whether texts are read in lower case."""
    before: str = ""
    """Text before each text, such as ``query: ``."""

    def __post_init__(self) -> None:
        as_paths(self, "tokenizer")
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """tokens, segments (0: padding) and positions, int32[sequence]."""
        row = Field(shape=(self.sequence,), dtype="int32", axes=("sequence",))
        return dict.fromkeys(("tokens", "segments", "positions"), row)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the texts."""
        return Tokenizer(path=self.tokenizer, around=Around.own)

    def encode(
        self, texts: Sequence[str], tokenizer: Tokenizer | None = None
    ) -> "list[np.ndarray]":
        """Ids int32[tokens] of each text, with the tokens around it that the tokenizer adds, at most ``sequence``."""
        return self._encoded(texts, tokenizer, self.sequence)

    def encode_whole(
        self, texts: Sequence[str], tokenizer: Tokenizer | None = None, most: int | None = None
    ) -> "list[np.ndarray]":
        """Ids as those of :meth:`encode`, of texts of any length, or at most ``most``."""
        return self._encoded(texts, tokenizer, most)

    def _encoded(
        self, texts: Sequence[str], tokenizer: Tokenizer | None, most: int | None
    ) -> "list[np.ndarray]":
        import numpy as np

        tokenizer = tokenizer or self.get_tokenizer()
        before, after = _around(tokenizer)
        texts = [self.before + text for text in texts]
        if self.lower:
            texts = [text.lower() for text in texts]
        room = None if most is None else max(most - len(before) - len(after), 0)
        return [np.concatenate([before, ids[:room], after]) for ids in tokenizer.encode_all(texts)]

    def load(self, path: Path) -> dict[str, Any]:
        """The text of a file as one example.

        Raises:
            NotFoundError: there is no such file.
            DataError: it is no text, or empty.
        """
        import numpy as np

        ids = self.encode([read_text(path)])[0]
        row = np.zeros((3, self.sequence), np.int32)
        row[0, : len(ids)], row[1, : len(ids)] = ids, 1
        row[2] = np.arange(self.sequence)
        return dict(zip(("tokens", "segments", "positions"), row, strict=True))

    def shrink(self, layout: Layout) -> "Sentences":
        """Rows of 64 tokens a context shard."""
        return replace(self, sequence=min(self.sequence, 64 * layout.context))


@lru_cache(maxsize=8)
def _around(tokenizer: Tokenizer) -> "tuple[np.ndarray, np.ndarray]":
    """Ids int32[tokens] that a tokenizer puts before and after a text."""
    import numpy as np

    before = np.array(tokenizer.prompt(""), np.int32)
    return before, tokenizer.documents([""])[0][len(before) :]


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is no text, or empty.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise NotFoundError(f"{path} can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}); give a text") from error
    if not text.strip():
        raise DataError(f"{path} is empty; give a text")
    return text
