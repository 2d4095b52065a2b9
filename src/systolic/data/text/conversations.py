"""Conversations read from JSONL, tokenized by a chat template, and laid into rows."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.data.random_access import Picks, Table
from systolic.data.text.chat import ChatTemplate, Rendered
from systolic.data.text.line_files import is_lines, lines_of
from systolic.data.text.messages import ANSWERS, Messages, arguments_of
from systolic.data.text.rows import Piece, fit, lay
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Split

if TYPE_CHECKING:
    from systolic.data.text.instructions import Instructions

NOTHING = -1
"""Target where nothing is learned."""
BESIDE = {"tools": "tools", "documents": "documents", "chat_template_kwargs": "names"}
"""Fields of a line that a template is given beside the messages, to what :meth:`ChatTemplate.conversation` calls them."""
UNREAD = ("functions",)
"""Fields of a line that change what a template writes and that it is not given."""
REASONS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of an answer that may stand without a content."""
SHORT: Messages = ({"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"})
"""A question with its answer."""
FORMS = "messages, or prompt and completion, or instruction and output"


class Line(NamedTuple):
    """A conversation and where it is from."""

    place: str
    """``data.jsonl line 3``."""
    messages: Messages
    key: float
    """From 0 to 1 by the line's content; below the validation share it is for validation."""
    beside: Mapping[str, Any] = MappingProxyType({})
    """What the template is given beside the messages: ``tools``, ``documents``, ``names``."""


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
    """conversations, learned (tokens), cut, dropped, unanswered, missing (answers), beyond (the model's context)."""
    sequence: int = 0
    context: int = 0

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
            "beyond": f"conversations are longer than the {self.context} tokens that the model was made for; what lies beyond is at positions that it has not seen",
            "missing": "answers are changed by the chat template where later turns follow, and are not learned",
        }
        return tuple(
            f"{self.counts[name]} {text}" for name, text in said.items() if self.counts[name]
        )


def files_of(path: Path) -> list[Path]:
    """The files of conversations at a path: JSONL, which may be compressed, or Parquet.

    Raises:
        NotFoundError: there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if is_lines(file))
    if not found:
        what = "has no .jsonl or .parquet file" if path.is_dir() else "does not exist"
        raise NotFoundError(f"{path} {what}; give a JSONL file of conversations with --data")
    return found


def read(path: Path) -> Iterator[Line]:
    """The conversations at a path, in order.

    Raises:
        DataError: a line is none; names it and what it lacks.
    """
    for file in files_of(path):
        for place, line in lines_of(file):
            hashed = hashlib.sha256(line.strip()).digest()
            key = int.from_bytes(hashed[:8], "big") / 2.0**64
            row = _row(line, place)
            yield Line(place, messages_of(row, place), key, beside_of(row, place))


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); each line is one JSON object") from error
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object; it takes one with {FORMS}")
    return row


def beside_of(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What a row gives the template beside its messages: tools, documents, and names such as ``enable_thinking``.

    Raises:
        DataError: one is of another form.
    """
    found = {}
    for column, name in BESIDE.items():
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            # A column of a dataset has one type, so tools of many forms are kept in it as JSON.
            try:
                value = msgspec.json.decode(value)
            except ValueError as error:
                raise DataError(f"{place} has {column} that are no JSON ({error})") from error
        if not value:
            continue
        form, rows = (dict, [value]) if name == "names" else (list, value)
        if not isinstance(value, form) or not all(isinstance(one, dict) for one in rows):
            told = "an object" if form is dict else "a list of objects"
            raise DataError(f"{place} has {column} of another form; give {told}")
        found[name] = value
    return found


def messages_of(row: Mapping[str, Any], place: str) -> Messages:
    """The turns of a row.

    Raises:
        DataError: it is no conversation.
    """
    for name in UNREAD:
        if row.get(name):
            raise DataError(
                f"{place} has {name}, which templates are not given here; take the field out, or write it into the system's turn"
            )
    if "messages" in row:
        return _turns(row["messages"], place)
    for asks, answers in (("prompt", "completion"), ("instruction", "output")):
        if asks not in row and answers not in row:
            continue
        texts = {name: row.get(name, "") for name in (asks, answers, "input", "system")}
        for name, text in texts.items():
            if name in (asks, answers) and name not in row:
                raise DataError(
                    f"{place} has {asks if name == answers else answers} and lacks {name}; add it"
                )
            if text is not None and not isinstance(text, str):
                raise DataError(f"{place} has a {name} that is no text; give a text")
        asked = texts[asks]
        if asks == "instruction" and texts["input"]:
            asked = f"{asked}\n\n{texts['input']}"
        system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
        return [
            *system,
            {"role": "user", "content": asked},
            {"role": ANSWERS, "content": texts[answers] or ""},
        ]
    raise DataError(f"{place} has {', '.join(row) or 'no field'}; it lacks {FORMS}")


def _turns(messages: Any, place: str) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{place} has messages that are no list of turns; give role and content of each"
        )
    for number, message in enumerate(messages, 1):
        lacking = _lacking(message)
        if lacking:
            raise DataError(
                f"{place}, turn {number} lacks a text in {' and '.join(lacking)}; give both"
            )
        try:
            for call in message.get("tool_calls") or ():
                arguments_of(call)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place}, turn {number} has a tool call whose arguments are no JSON ({error}); write them as an object"
            ) from error
        if message["role"] == ANSWERS and message.get("weight", 1) != 1:
            raise DataError(
                f"{place}, turn {number} has the weight {message['weight']} and every answer is learned alike; take the field out, or cut the conversation before that turn"
            )
    if all(message["role"] != ANSWERS for message in messages):
        raise DataError(
            f"{place} has no turn of the role {ANSWERS}, so nothing to learn; add one, or take the line out"
        )
    return messages


def _lacking(message: Any) -> list[str]:
    """Fields of a turn that are missing or of another form; an answer may be a call or a reasoning alone."""
    if not isinstance(message, dict):
        return ["role", "content"]
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = all(
        isinstance(one, dict)
        and one.get("type", "text") == "text"
        and isinstance(one.get("text"), str)
        for one in parts
    )
    alone = content is None and role == ANSWERS and any(message.get(one) for one in REASONS)
    have = {"role": isinstance(role, str), "content": texts or alone}
    return [name for name, there in have.items() if not there]


def tokenized(lines: Sequence[Line], template: ChatTemplate, tokenizer: Tokenizer) -> list[Tokens]:
    """Conversations in tokens; an answer is learned up to its last special token, such as the end of its turn.

    A token of both an answer and the text before it is not learned.

    Raises:
        DataError: the template refuses a conversation; names the line.
    """
    made = []
    for line in lines:
        for name, taken in (
            ("tools", template.takes_tools),
            ("documents", template.takes_documents),
        ):
            if name in line.beside and not taken:
                raise DataError(
                    f"{line.place} has {name} and the chat template of {template.origin} takes none; take the field out, or write it into the system's turn"
                )
        try:
            made.append(template.conversation(line.messages, **line.beside))
        except DataError as error:
            raise DataError(f"{line.place}: {error}") from error
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
    lines = list(read(data.file(split)))
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
    conversations = tokenized(lines, data.chat_template, tokenizer)
    if data.vocab:
        for line, (ids, _, _) in zip(lines, conversations, strict=True):
            if (ids >= data.vocab).any():
                other = int(ids.max())
                raise DataError(
                    f"{line.place} has the token {tokenizer.token(other)!r} with the id {other} and the model has ids below {data.vocab}; take it out of the line or the template, or use the tokenizer that the model came with"
                )
    return _laid(data, conversations)


def _laid(data: "Instructions", conversations: Sequence[Tokens]) -> Rows:
    from systolic.data.text.instructions import Filling, TooLong

    counts = Counter(conversations=len(conversations), cut=0, dropped=0, unanswered=0, missing=0)
    counts["beyond"] = 0
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
        counts["beyond"] += len(pair) > data.context + 1
        pairs.append(pair)
    if data.filling is Filling.packed:
        pieces = fit(pairs, data.sequence)
    else:
        pieces = [Piece(pair, row) for row, pair in enumerate(pairs)]
    rows = lay([Piece(piece.tokens[:, 0], piece.row) for piece in pieces], data.sequence)
    labels = lay([Piece(piece.tokens[:, 1], piece.row) for piece in pieces], data.sequence)
    arrays = {**rows, "targets": labels["targets"]}
    counts["learned"] = int((arrays["targets"] >= 0).sum())
    return Rows(arrays=arrays, counts=counts, sequence=data.sequence, context=data.context)
