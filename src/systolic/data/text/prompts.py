"""A tokenizer without training text: the data of a model that came trained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, check
from systolic.data.text.documents import Documents
from systolic.data.text.text_data import ROW, TextData, row_fields
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.job import Layout
from systolic.job.data import Field, NoExamples


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts(NoExamples, TextData):
    """Prompts and texts from outside for a model whose training text is elsewhere; all splits are empty."""

    refusal: ClassVar[str] = "an imported model brings no {split} text; give the text with --path"

    tokenizer: Path | None = None
    """A ``tokenizer.json`` or its folder; None reads bytes."""
    sequence: Annotated[int, ROW] = 1024
    """Tokens per row of a text that is scored."""
    positions: Annotated[int, COUNT] = 1024
    """Tokens that the model was trained to see at once."""
    stops: tuple[int, ...] = ()
    """Ids that end a generated text, besides the tokenizer's end (generation_config.json: eos_token_id)."""

    def __post_init__(self) -> None:
        as_paths(self, "tokenizer")
        check(self)

    @property
    def context(self) -> int:
        """See :class:`TextData`."""
        return self.positions

    @property
    def ends(self) -> frozenset[int]:
        """See :class:`TextData`; also those that end a turn, which the model's files may not name."""
        from systolic.data.text.chat import turn_ends

        tokenizer = self.get_tokenizer()
        own = frozenset(self.stops if tokenizer.end is None else (*self.stops, tokenizer.end))
        return own | turn_ends(self.find_template(), tokenizer)

    def fields(self) -> Mapping[str, Field]:
        """tokens, targets, segments, positions: int32[sequence]."""
        return row_fields(self.sequence)

    def get_tokenizer(self) -> Tokenizer:
        """See :class:`TextData`."""
        return Tokenizer(path=self.tokenizer, around=Around.own)

    def with_tokenizer(self, path: Path) -> "Prompts":
        """See :class:`TextData`."""
        return replace(self, tokenizer=path)

    def at(self, path: Path) -> TextData:
        """The text at a path, in rows of the same length; conversations by the tokenizer's chat template, where it has one."""
        from systolic.data.text.instructions import held_out

        return held_out(self, path, self.sequence, self.stops) or Passages(
            path=path, validation=path, tokenizer=self.tokenizer, sequence=self.sequence
        )

    def shrink(self, layout: Layout) -> "Prompts":
        """Rows of 64 tokens a context shard."""
        return replace(self, sequence=min(self.sequence, 64 * layout.context))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passages(Documents):
    """Documents with the tokens around them that the tokenizer's own post-processor adds."""

    def get_tokenizer(self) -> Tokenizer:
        """See :class:`Documents`."""
        # The two-argument form: a dataclass with slots is made anew, and super() would name the old class.
        return replace(Documents.get_tokenizer(self), around=Around.own)
