"""Base of all text sources: the fields of a row of tokens, and a tokenizer."""

import enum
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from systolic.core.errors import OptionError
from systolic.core.ranges import Range
from systolic.job.data import Data, Field

if TYPE_CHECKING:
    from systolic.data.text.chat import ChatTemplate, Messages
    from systolic.data.text.tokenizer import Tokenizer

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
                f"the tokenizer {self.get_tokenizer().file() or 'of bytes'} has no chat template, so the model knows no chat; leave --chat out"
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
