"""Conversations read from JSONL, tokenized by a chat template, and laid into rows."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.data.random_access import Picks, Table
from systolic.data.text.chat import ANSWERS, ChatTemplate, Messages, Rendered
from systolic.data.text.row_forms import (
    TABLES,
    USUAL,
    RowReading,
    array_rows,
    as_messages,
    table_rows,
)
from systolic.data.text.rows import Piece, fit, lay
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Split

if TYPE_CHECKING:
    from systolic.data.text.instructions import Instructions

SUFFIXES = (".jsonl", ".json", *TABLES)
NOTHING = -1
"""Target where nothing is learned."""
UNREAD = ("tools", "functions", "documents")
"""Fields of a line that change what a template writes and that it is not given."""
SHORT: Messages = ({"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"})
"""A question with its answer."""
FORMS = "messages, or prompt and completion, or instruction and output, or question and answer"


class Line(NamedTuple):
    """A conversation and where it is from."""

    place: str
    """``data.jsonl line 3``."""
    messages: Messages
    key: float
    """From 0 to 1 by the line's content; below the validation share it is for validation."""


class Tokens(NamedTuple):
    """A conversation in tokens."""

    ids: np.ndarray
    """int32[n]."""
    learned: np.ndarray
    """bool[n]: whether a token is of an answer."""
    missing: int
    """Answers that could not be told from the rest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Table):
    """Rows of a split in memory."""

    arrays: Mapping[str, np.ndarray]
    """tokens, targets, segments, positions: int32[rows, sequence]."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """conversations, learned (tokens), cut, dropped, unanswered, missing (answers)."""
    sequence: int = 0
    first: Messages | None = None
    """The first conversation."""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked rows."""
        return {name: array[picks.indices] for name, array in self.arrays.items()}

    def notes(self) -> tuple[str, ...]:
        """What was cut and left out, a line each."""
        said = {
            "cut": f"conversations are longer than a row of {self.sequence} tokens and were cut there",
            "dropped": f"conversations are longer than a row of {self.sequence} tokens and were left out",
            "unanswered": "conversations have no answer in their row and were left out",
            "missing": "answers are changed by the chat template where later turns follow, and are not learned",
        }
        return tuple(
            f"{self.counts[name]} {text}" for name, text in said.items() if self.counts[name]
        )


def files_of(path: Path) -> list[Path]:
    """The JSONL files at a path.

    Raises:
        NotFoundError: there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
    if not found:
        what = "has no .jsonl, .json, .csv or .tsv file" if path.is_dir() else "does not exist"
        raise NotFoundError(f"{path} {what}; give a JSONL file of conversations with --data")
    return found


def read(path: Path, reading: RowReading = USUAL) -> Iterator[Line]:
    """The conversations at a path, in order.

    Raises:
        BadLinesError: lines are none; names the first and what it lacks, and holds all.
    """
    bad: list[str] = []
    for one in parsed(path, reading):
        if isinstance(one, Line):
            yield one
        else:
            bad.append(str(one))
    if bad:
        raise BadLinesError(bad)


class BadLinesError(DataError):
    """Lines that are no conversations."""

    def __init__(self, lines: Sequence[str]) -> None:
        more = len(lines) - 1
        told = f" ({more:,} more such lines; systolic data inspect sft lists all)" if more else ""
        super().__init__(lines[0] + told)
        self.lines = tuple(lines)
        """What is wrong with each, with its place."""


def parsed(path: Path, reading: RowReading = USUAL) -> Iterator[Line | DataError]:
    """The conversations at a path, in order, with what is wrong with those lines that are none; rows that the reading leaves out are not among them."""
    for file in files_of(path):
        for place, row in _rows_of(file):
            if isinstance(row, DataError):
                yield row
                continue
            content = row if isinstance(row, bytes) else msgspec.json.encode(row)
            hashed = hashlib.sha256(content.strip()).digest()
            try:
                messages = messages_of(row, place, reading)
            except DataError as error:
                yield error
                continue
            if messages is not None:
                yield Line(place, messages, int.from_bytes(hashed[:8], "big") / 2.0**64)


def are_conversations(path: Path, reading: RowReading = USUAL) -> bool:
    """Whether the first row at a path is a conversation, and no document with a field ``text``."""
    try:
        place, row = next(row for file in files_of(path) for row in _rows_of(file))
        value = msgspec.json.decode(row) if isinstance(row, bytes) else row
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            return False
        return messages_of(value, place, reading) is not None
    except (StopIteration, NotFoundError, DataError, ValueError, OSError):
        return False


def are_documents(path: Path, reading: RowReading = USUAL) -> bool:
    """Whether a path holds text without turns: files of text, or rows with a field ``text`` that are no conversations."""
    try:
        file = next(iter(files_of(path)), path)
        if file.suffix not in SUFFIXES:
            return not are_conversations(path, reading)
        _, row = next(_rows_of(file))
        value = msgspec.json.decode(row) if isinstance(row, bytes) else row
    except (StopIteration, NotFoundError, DataError, ValueError, OSError):
        return path.is_dir() and any(one.suffix not in SUFFIXES for one in path.iterdir())
    return isinstance(value, dict) and isinstance(value.get("text"), str)


def _rows_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Place and value of each row of a file: of JSONL its bytes."""
    if file.suffix in TABLES:
        yield from table_rows(file)
        return
    if (rows := array_rows(file)) is not None:
        yield from rows
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file} line {number}", line


def messages_of(
    row: bytes | Mapping[str, Any],
    place: str,
    reading: RowReading = USUAL,
) -> Messages | None:
    """The turns of a row; ``None`` for one to leave out.

    Raises:
        DataError: it is no conversation.
    """
    if isinstance(row, bytes):
        try:
            row = msgspec.json.decode(row)
        except ValueError as error:
            raise DataError(
                f"{place} is not JSON ({error}); each line is one JSON object"
            ) from error
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object; it takes one with {FORMS}")
    for name in UNREAD:
        if row.get(name):
            raise DataError(
                f"{place} has {name}, which templates are not given here; take the field out, or write it into the system's turn"
            )
    messages = as_messages(row, reading, place)
    if messages is not None:
        _check_turns(messages, place)
    return messages


def _check_turns(messages: Messages, place: str) -> None:
    for number, message in enumerate(messages, 1):
        calls = message.get("role") == ANSWERS and message.get("tool_calls")
        lacking = [
            name
            for name in ("role", "content")
            if not isinstance(message.get(name), str) and not (calls and name == "content")
        ]
        if lacking:
            raise DataError(
                f"{place}, turn {number} lacks a text in {' and '.join(lacking)}; give both"
            )
        if message["role"] == ANSWERS and message.get("weight", 1) != 1:
            raise DataError(
                f"{place}, turn {number} has the weight {message['weight']} and every answer is learned alike; take the field out, or cut the conversation before that turn"
            )
    if all(message["role"] != ANSWERS for message in messages):
        raise DataError(
            f"{place} has no turn of the role {ANSWERS}, so nothing to learn; add one, or take the line out"
        )


def tokenized(lines: Sequence[Line], template: ChatTemplate, tokenizer: Tokenizer) -> list[Tokens]:
    """Conversations in tokens; an answer is learned up to its last special token, such as the end of its turn.

    A token of both an answer and the text before it is not learned.

    Raises:
        BadLinesError: the template refuses conversations; names the lines.
    """
    made, bad = [], []
    for line in lines:
        try:
            made.append(template.conversation(line.messages))
        except DataError as error:
            bad.append(f"{line.place}: {error}")
    if bad:
        raise BadLinesError(bad)
    found = []
    encodings = tokenizer.spans([one.text for one in made])
    for one, (ids, starts, special) in zip(made, encodings, strict=True):
        found.append(Tokens(ids, _learned(one, starts, special), one.missing))
    return found


def _learned(conversation: Rendered, starts: np.ndarray, special: np.ndarray) -> np.ndarray:
    """bool[n]: whether a token is of an answer."""
    learned = np.zeros(len(starts), bool)
    for start, stop in conversation.answers:
        inside = (starts >= start) & (starts < stop)
        ends = np.flatnonzero(inside & special)
        if len(ends):  # what follows the end of a turn is the template's
            inside[ends[-1] + 1 :] = False
        learned |= inside
    return learned


def closing(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that an answer is learned with at its end; ``None`` where there is none, or the template refuses one question with its answer."""
    try:
        short = template.conversation(SHORT)
    except DataError:
        return None
    ((ids, starts, special),) = tokenizer.spans([short.text])
    last = np.flatnonzero(_learned(short, starts, special))[-1:]
    return int(ids[last[0]]) if len(last) and special[last[0]] else None


def make_rows(data: "Instructions", split: Split) -> Rows:
    """Rows of a split."""
    read_lines = list(parsed(data.file(split), data.reading))
    bad = [str(one) for one in read_lines if isinstance(one, DataError)]
    lines = [one for one in read_lines if isinstance(one, Line)]
    if data.validation is None and len(lines) > 1 and data.validation_share:
        chosen = np.array([line.key < data.validation_share for line in lines])
        keys = np.array([line.key for line in lines])
        # A small file gives at least one conversation and keeps at least one.
        chosen[np.argmin(keys)], chosen[np.argmax(keys)] = True, False
        wanted = chosen if split is Split.validation else ~chosen
        lines = [line for line, kept in zip(lines, wanted, strict=True) if kept]
    elif data.validation is None and split is Split.validation:
        lines = []
    tokenizer = data.get_tokenizer()
    try:
        conversations = tokenized(lines, data.chat_template, tokenizer)
    except BadLinesError as error:
        raise BadLinesError([*bad, *error.lines]) from error
    if bad:
        raise BadLinesError(bad)
    if data.vocab:
        for line, (ids, _, _) in zip(lines, conversations, strict=True):
            if (ids >= data.vocab).any():
                other = int(ids.max())
                raise DataError(
                    f"{line.place} has the token {tokenizer.token(other)!r} with the id {other} and the model has ids below {data.vocab}; take it out of the line or the template, or use the tokenizer that the model came with"
                )
    return replace(_laid(data, conversations), first=lines[0].messages if lines else None)


def _laid(data: "Instructions", conversations: Sequence[Tokens]) -> Rows:
    from systolic.data.text.instructions import Filling, TooLong

    counts = Counter(conversations=len(conversations), cut=0, dropped=0, unanswered=0, missing=0)
    pairs, most = [], data.sequence + 1
    for ids, learned, missing in conversations:
        counts["missing"] += missing
        if len(ids) > most and data.too_long is TooLong.drop:
            counts["dropped"] += 1
            continue
        pair = np.stack([ids, np.where(learned, ids, NOTHING)], axis=1)[:most]
        if (pair[1:, 1] == NOTHING).all():
            counts["unanswered"] += 1
            continue
        counts["cut"] += len(ids) > most
        pairs.append(pair)
    if data.filling is Filling.packed:
        pieces = fit(pairs, data.sequence)
    else:
        pieces = [Piece(pair, row) for row, pair in enumerate(pairs)]
    rows = lay([Piece(piece.tokens[:, 0], piece.row) for piece in pieces], data.sequence)
    labels = lay([Piece(piece.tokens[:, 1], piece.row) for piece in pieces], data.sequence)
    arrays = {**rows, "targets": labels["targets"]}
    counts["learned"] = int((arrays["targets"] >= 0).sum())
    return Rows(arrays=arrays, counts=counts, sequence=data.sequence)
