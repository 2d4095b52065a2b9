"""Masked text: a share of the tokens is hidden, for a model that predicts them."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, Range, check
from systolic.data.text.text_data import TextData
from systolic.job import Layout
from systolic.job.data import Batches, Contents, Field, Read, Split

if TYPE_CHECKING:
    import numpy as np

    from systolic.data.text.tokenizer import Tokenizer

HIDDEN, OTHER = 0.8, 0.1
"""Shares of the chosen tokens that become the mask and a random token; the rest stay (Devlin et al. 2019)."""
NO_LABEL = -1
"""Label of an unused prediction of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked(TextData):
    """Rows of a text with a share of the tokens chosen for prediction: masked, replaced or left.

    Which tokens are chosen follows from the row and, in training, from the position in the data: a row
    that comes again is masked differently, a resumed run sees what it would have seen, and an evaluation is
    the same every time.

    Raises:
        OptionError: a number outside its range, or more predictions than tokens.
    """

    text: TextData
    share: Annotated[float, Range(above=0, most=1)] = 0.15
    """Share of a row's tokens to predict."""
    predictions: Annotated[int, COUNT] = 76
    """Most tokens to predict in a row; all rows have room for them."""

    def __post_init__(self) -> None:
        check(self)
        sequence = self.sequence
        if self.predictions > sequence:
            raise OptionError(
                f"predictions is {self.predictions} and a row has {sequence} tokens; lower it, or raise the sequence"
            )

    @property
    def sequence(self) -> int:
        """Tokens per row."""
        return self.text.fields()["tokens"].shape[0]

    @property
    def mask(self) -> int:
        """The id of the mask: the tokenizer's, or one more than its largest."""
        tokenizer = self.text.get_tokenizer()
        return tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask

    def vocab_size(self) -> int:
        """Vocabulary with the mask."""
        return max(self.text.vocab_size(), self.mask + 1)

    def get_tokenizer(self) -> "Tokenizer":
        """The tokenizer of the text."""
        return self.text.get_tokenizer()

    def with_tokenizer(self, path: Path) -> "Masked":
        """See :class:`TextData`."""
        return replace(self, text=self.text.with_tokenizer(path))

    def fields(self) -> Mapping[str, Field]:
        """tokens (with masks), segments, positions int32[sequence]; places, labels (-1: none) int32[predictions]."""
        text = self.text.fields()
        chosen = Field(shape=(self.predictions,), dtype="int32")
        kept = {name: text[name] for name in ("tokens", "segments", "positions")}
        return {**kept, "places": chosen, "labels": chosen}

    def size(self, split: Split) -> int | None:
        """Rows of the text."""
        return self.text.size(split)

    def files(self, split: Split) -> Sequence[Path]:
        """Files of the text."""
        return self.text.files(split)

    def contents(self, split: Split) -> Contents | None:
        """Contents of the text."""
        return self.text.contents(split)

    def lasting(self) -> frozenset[str]:
        """Parameters of the masking; the text's own position holds the others."""
        return frozenset(("share", "predictions"))

    def epochs(self, position: bytes) -> float | None:
        """Epochs of the text."""
        return self.text.epochs(position)

    def earliest(self, positions: Sequence[bytes]) -> bytes:
        """Earliest position of the text."""
        return self.text.earliest(positions)

    def notes(self) -> tuple[str, ...]:
        """Notes of the text."""
        return self.text.notes()

    def at(self, path: Path) -> "Masked":
        """Other text with the same masking."""
        other = self.text.at(path)
        assert isinstance(other, TextData)
        return replace(self, text=other)

    def shrink(self, layout: Layout) -> "Masked":
        """The text in shorter rows, with the same share of predictions."""
        text = self.text.shrink(layout)
        assert isinstance(text, TextData)
        share = text.fields()["tokens"].shape[0] / self.sequence
        return replace(self, text=text, predictions=max(round(self.predictions * share), 1))

    def open(self, read: Read) -> Batches:
        """Rows of a split.

        Raises:
            DataError: see the text's own.
        """
        return MaskedBatches(inner=self.text.open(read), data=self, read=read)


@dataclass(kw_only=True, slots=True)
class MaskedBatches:
    """Batches of masked text; their position is the text's."""

    inner: Batches
    data: Masked
    read: Read

    def __iter__(self) -> Iterator[dict[str, "np.ndarray"]]:
        return self

    def __next__(self) -> dict[str, "np.ndarray"]:
        # An endless stream passes a row again and again; one that ends is for evaluation.
        at = self.inner.get_state() if self.read.epochs is None else b""
        return hide(next(self.inner), self.data, zlib.crc32(at, self.read.seed & 0xFFFFFFFF))

    def get_state(self) -> bytes:
        """See :class:`~systolic.job.data.Batches`."""
        return self.inner.get_state()

    def set_state(self, state: bytes) -> None:
        """See :class:`~systolic.job.data.Batches`."""
        self.inner.set_state(state)

    def close(self) -> None:
        """See :class:`~systolic.job.data.Batches`."""
        self.inner.close()


def hide(batch: Mapping[str, "np.ndarray"], data: Masked, salt: int) -> dict[str, "np.ndarray"]:
    """Masks a batch of text as :class:`Masked` says.

    Args:
        batch: tokens, targets, segments, positions int32[rows, sequence] and the mask of examples.
        data: Share to choose, and the tokenizer, whose document tokens are never chosen.
        salt: Decides, with the tokens of a row, which are chosen.
    """
    import numpy as np

    tokenizer = data.get_tokenizer()
    vocab, mask = tokenizer.vocab_size, data.mask
    marks = [mark for mark in (tokenizer.start, tokenizer.end, mask) if mark is not None]
    tokens = batch["tokens"].copy()
    places = np.zeros((len(tokens), data.predictions), np.int32)
    labels = np.full_like(places, NO_LABEL)
    open_to = (batch["segments"] > 0) & ~np.isin(tokens, marks)
    for row, allowed in enumerate(open_to):
        candidates = np.flatnonzero(allowed)
        if not len(candidates):
            continue
        rng = np.random.default_rng([zlib.crc32(tokens[row].tobytes()), salt])
        count = min(max(round(data.share * len(candidates)), 1), data.predictions)
        chosen = np.sort(rng.choice(candidates, count, replace=False))
        places[row, :count] = chosen
        labels[row, :count] = tokens[row, chosen]
        turn, others = rng.random(count), rng.integers(0, vocab, count, dtype=np.int32)
        kept = np.where(turn < HIDDEN + OTHER, others, tokens[row, chosen])
        tokens[row, chosen] = np.where(turn < HIDDEN, mask, kept)
    left = {name: batch[name] for name in batch if name != "targets"}
    return {**left, "tokens": tokens, "places": places, "labels": labels}
