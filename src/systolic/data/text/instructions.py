"""Instructions for fine-tuning: conversations from JSONL in rows, with a loss on the answers only."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import DataError, OptionError
from systolic.core.files import as_paths
from systolic.core.ranges import NOT_NEGATIVE, SHARE, check
from systolic.data.text.chat import ChatTemplate
from systolic.data.text.messages import is_learned
from systolic.data.text.row_forms import USUAL, RowReading
from systolic.data.text.text_data import FILL, ROW, TextData, row_fields
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.job import Layout
from systolic.job.data import Batches, Contents, Field, Read, Split

if TYPE_CHECKING:
    from systolic.data.text.chat import Messages
    from systolic.data.text.conversations import Rows


class Filling(enum.Enum):
    """How conversations are laid into rows."""

    packed = "packed"
    """Several in a row, wherever one has room (best fit); they don't see each other."""
    single = "single"
    """One in each row."""


class TooLong(enum.Enum):
    """Handling of a conversation that is longer than a row."""

    cut = "cut"
    """Its start is kept; without an answer in it, it is left out."""
    drop = "drop"
    """It is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instructions(TextData):
    """Conversations of a file or of a folder of them: JSONL (which may be compressed), a JSON array, Parquet, CSV or TSV.

    A row is one JSON object: ``{"messages": [{"role": …, "content": …}, …]}``, or ShareGPT's ``{"conversations": [{"from": …,
    "value": …}, …]}``, or ``{"prompt": …, "completion": …}``, ``{"question": …, "answer": …}`` or ``{"instruction": …, "input": …,
    "output": …}`` (``input`` may be left out or empty; ``system``, and ``history`` with earlier turns, may come beside them). An answer
    of ``"weight": 0``, ``"train": false`` or ``"loss": false`` is read and not learned, and so is one before the first question without a
    ``"weight": 1``. ``tools``, ``documents`` and
    ``chat_template_kwargs`` may come beside the messages. Rows are packed once; their order changes every epoch.
    """

    path: Path | None
    """None where only shapes are needed, as for a forecast."""
    tokenizer: Path | None
    """A ``tokenizer.json`` or its folder; None where only shapes are needed."""
    template: str
    """The chat template, in Jinja."""
    tool_template: str = ""
    """That for conversations with tools, where the model has one for them; else ""."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Special tokens by the names that the template has for them."""
    sequence: Annotated[int, ROW] = 1024
    """Tokens per row."""
    validation: Path | None = None
    """Validation conversations, like ``path``; None takes a share of the conversations."""
    validation_share: Annotated[float, SHARE] = 0.05
    """The share of conversations that are for validation, chosen by a hash of the line: equal lines are on the same side."""
    filling: Filling = Filling.packed
    """How conversations are laid into rows."""
    too_long: TooLong = TooLong.cut
    """Handling of a conversation that is longer than a row."""
    stops: tuple[int, ...] = ()
    """Ids that end a generated text, besides the tokenizer's end and the template's end of an answer (generation_config.json: eos_token_id)."""
    vocab: Annotated[int, NOT_NEGATIVE] = 0
    """Token ids that the model has; conversations with others are refused. 0 for no limit."""
    reading: RowReading = USUAL
    """Columns with other names than the usual ones, and what happens to preference pairs."""
    around: Around = Around.own
    """Tokens around a text without turns, as the model had them before."""
    positions: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens of a text that the model was made for before; 0 takes those of a row."""

    def __post_init__(self) -> None:
        as_paths(self, "path", "tokenizer", "validation")
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """tokens, targets (-1 where nothing is learned), segments, positions: int32[sequence]."""
        return row_fields(self.sequence)

    def missing(self) -> str:
        """See :class:`Data`."""
        if self.path is None:
            return "sft is given no conversations, which only a forecast does without; add --data with JSONL, one conversation a line"
        if self.tokenizer is None:
            return "the model that sft begins with has no tokenizer.json, which only a forecast does without; give a folder as --from that has it beside the weights"
        return ""

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer given.

        Raises:
            OptionError: there is none.
        """
        if self.tokenizer is None:
            raise OptionError(replace(self, path=Path()).missing())
        return Tokenizer(path=self.tokenizer, around=self.around)

    @property
    def context(self) -> int:
        """See :class:`TextData`: the context of the model before, which rows of conversations neither shorten nor lengthen."""
        return self.positions or self.sequence

    @property
    def ends(self) -> frozenset[int]:
        """See :class:`TextData`; also those of the model before, the token that the template ends an answer with, and others that end a turn."""
        from systolic.data.text.chat import turn_ends
        from systolic.data.text.conversations import closing

        tokenizer = self.get_tokenizer()
        own = (tokenizer.end, closing(self.chat_template, tokenizer))
        ends = frozenset((*self.stops, *(number for number in own if number is not None)))
        return ends | turn_ends(self.chat_template, tokenizer)

    def with_tokenizer(self, path: Path) -> "Instructions":
        """See :class:`TextData`."""
        return replace(self, tokenizer=path)

    @property
    def chat_template(self) -> ChatTemplate:
        """The template with its tokens."""
        origin = self.get_tokenizer().path
        assert origin is not None
        return ChatTemplate(
            text=self.template,
            with_tools=self.tool_template,
            tokens=self.tokens,
            origin=origin,
        )

    def find_template(self) -> ChatTemplate:
        """See :class:`TextData`; that of the training."""
        return self.chat_template

    def at(self, path: Path) -> TextData:
        """See :class:`Data`; the template and the rows are the same. Text without turns is read as such, and rows that lack the columns of the training by the usual names."""
        from systolic.data.text.conversations import are_conversations, are_documents
        from systolic.data.text.documents import Passages

        if are_documents(path, self.reading):
            return Passages(
                path=path, validation=path, tokenizer=self.tokenizer, sequence=self.sequence
            )
        usual = replace(self.reading, columns=USUAL.columns)
        known = are_conversations(path, self.reading) or not are_conversations(path, usual)
        reading = self.reading if known else usual
        return replace(self, path=path, validation=path, reading=reading)

    def question(self) -> "Messages | None":
        """The first turns of a validation conversation, up to its last answer; ``None`` where there is none."""
        messages = self.rows(Split.validation).first or self.rows(Split.train).first
        return None if messages is None else asked(messages)

    def size(self, split: Split) -> int | None:
        """Rows of a split; reads and tokenizes its conversations.

        Raises:
            DataError: all of the training split's are left out.
        """
        if split is Split.test:
            return 0
        rows = self.rows(split)
        if split is Split.train and (why := rows.left_out(split)):
            raise DataError(why)
        return len(rows)

    def rows(self, split: Split) -> "Rows":
        """The rows of a split with what was counted on the way.

        Raises:
            NotFoundError: no such path.
            DataError: a line is not a conversation, or the template refuses it; names the line.
        """
        from systolic.data.text.conversations import files_of

        stamp = tuple(file.stat().st_mtime_ns for file in files_of(self.file(split)))
        return _rows(self, split, stamp)

    def file(self, split: Split) -> Path:
        """The path of a split.

        Raises:
            OptionError: there is none.
        """
        own = self.validation if split is Split.validation else None
        path = own or self.path
        if path is None:
            raise OptionError(self.missing())
        return path

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the training file, and of the validation file if it is separate."""
        from systolic.data.fingerprint import of_files

        if split is Split.test or (split is Split.validation and self.validation is None):
            return None
        path = self.file(split)
        return of_files(path if path.is_dir() else path.parent, self.files(split))

    def files(self, split: Split) -> Sequence[Path]:
        """See :class:`Data`."""
        from systolic.data.text.conversations import files_of

        return files_of(self.file(split))

    def lasting(self) -> frozenset[str]:
        """Parameters that decide what is learned and how rows are laid."""
        return frozenset(
            (
                "sequence",
                "template",
                "tool_template",
                "tokens",
                "filling",
                "too_long",
                "validation_share",
                "reading",
            )
        )

    def shrink(self, layout: Layout) -> "Instructions":
        """The same rows: cut conversations would have no answers."""
        del layout
        return self

    def notes(self) -> tuple[str, ...]:
        """Notes on what was cut and left out of the training split, and conversations of it that are also for validation."""
        return self.split_notes(Split.train)

    def split_notes(self, split: Split) -> tuple[str, ...]:
        """Notes on what was cut and left out of a split, and conversations that are in both."""
        return (*self.rows(split).notes(), *self._shared())

    def _shared(self) -> tuple[str, ...]:
        """A note of conversations that are trained on and judged by."""
        import numpy as np

        if self.path is None or self.validation is None:
            return ()
        held_out = self.rows(Split.validation).keys
        both = int(np.isin(held_out, self.rows(Split.train).keys).sum())
        if not both:
            return ()
        count = f"{both:,} of {len(held_out):,}" if both < len(held_out) else f"all {both:,}"
        return (
            f"{count} conversations of --validation are in --data too, so their loss says nothing of text that was not trained on; give others, or leave --validation out for a share of --data",
        )

    def open(self, read: Read) -> Batches:
        """Rows of a split.

        Raises:
            DataError: it has none.
        """
        from systolic.data.random_access import open_table

        if read.split is Split.test:
            raise DataError("instructions have no test split; use validation")
        rows = self.rows(read.split)
        if why := rows.left_out(read.split):
            raise DataError(why)
        return open_table(rows, read, self.fields(), FILL)


def held_out(
    data: TextData, path: Path, sequence: int, stops: tuple[int, ...] = ()
) -> Instructions | None:
    """The conversations at a path in rows of a length, by the chat template of other data's tokenizer; ``None`` where there are none.

    Args:
        data: Whose tokenizer and template they are read by.
        path: A file or folder.
        sequence: Tokens per row.
        stops: Ids that end a generated text.

    Raises:
        OptionError: there are conversations and no template.
    """
    from systolic.data.text.conversations import are_conversations

    if not are_conversations(path):
        return None
    tokenizer, template = data.get_tokenizer(), data.find_template()
    if template is None or tokenizer.path is None:
        raise OptionError(
            f"{path} holds conversations and the tokenizer {tokenizer.file() or 'of bytes'} has no chat template to read them by; give text, or put a chat_template.jinja beside the tokenizer.json"
        )
    return Instructions(
        path=path,
        validation=path,
        tokenizer=tokenizer.path,
        template=template.text,
        tokens=template.tokens,
        sequence=sequence,
        stops=stops,
        around=tokenizer.around,
    )


def asked(messages: "Messages") -> "Messages":
    """The turns of a conversation before its last answer that is learned."""
    last = max(at for at, message in enumerate(messages) if is_learned(message))
    return messages[:last]


@lru_cache(maxsize=4)
def _rows(data: Instructions, split: Split, stamp: tuple[int, ...]) -> "Rows":
    del stamp
    from systolic.data.text.conversations import make_rows

    return make_rows(data, split)
