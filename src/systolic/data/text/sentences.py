"""Texts for a model of embeddings: each alone, cut to what the model reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, check
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.job import Field, Layout
from systolic.job.data import NoExamples

if TYPE_CHECKING:
    import numpy as np


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
        self, texts: Sequence[str], tokenizer: Tokenizer | None = None
    ) -> "list[np.ndarray]":
        """Ids as those of :meth:`encode`, of texts of any length."""
        return self._encoded(texts, tokenizer, None)

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
