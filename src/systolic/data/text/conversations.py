"""Conversations read from JSONL, tokenized by a chat template, and laid into rows."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from systolic.core.errors import DataError, NotFoundError, nearest
from systolic.core.files import nearest_file
from systolic.data.random_access import Picks, Table
from systolic.data.text.chat import ChatTemplate, Rendered
from systolic.data.text.line_files import is_lines, lines_of, not_json, refuse_other
from systolic.data.text.messages import (
    ANSWERS,
    FLAGS,
    READ,
    REASONING,
    Messages,
    arguments_of,
    is_learned,
    takes_of,
    text_of,
)
from systolic.data.text.row_forms import (
    ALIASES,
    BESIDE,
    KNOWN,
    TABLES,
    USUAL,
    RowReading,
    array_rows,
    as_messages,
    table_rows,
    unread,
)
from systolic.data.text.rows import Piece, fit, lay
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Split

if TYPE_CHECKING:
    from systolic.data.text.instructions import Instructions

NOTHING = -1
"""Target where nothing is learned."""
NAMED = 8
"""Most columns that a note names."""
COPIED = 20
"""Characters of an answer from which on a question that holds all of it is noted."""
UNREAD = ("functions",)
"""Fields of a line that change what a template writes and that it is not given."""
REASONS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of an answer that may stand without a content."""
DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")
"""Parts that differ between faults of one kind: numbers and quoted texts."""
SHORT: Messages = ({"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"})
"""A question with its answer."""
ARROW_NOTES = ("state.json", "dataset_info.json")
"""Files beside those in Arrow's form in a folder that datasets saved."""
TELLS = ("system", "developer")
"""Roles whose turns ask nothing."""
FORMS = "messages, or prompt and completion, or instruction and output, or question and answer"


class Line(NamedTuple):
    """A conversation and where it is from."""

    place: str
    """``data.jsonl line 3``."""
    messages: Messages
    key: float
    """From 0 to 1 by the line's content; below the validation share it is for validation."""
    beside: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the template beside the messages: ``tools``, ``documents``, ``names``."""
    unread: Sequence[str] = ()
    """Columns with text that are not read."""


class Tokens(NamedTuple):
    """A conversation in tokens."""

    ids: np.ndarray
    """int32[n]."""
    learned: np.ndarray
    """bool[n]: whether a token is of an answer."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Answers that could not be told from the rest (missing), that lack words of the prompt (unopened), and whose reasoning the template leaves out (unreasoned)."""
    opening: str = ""
    """Words of the prompt that answers lack."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Table):
    """Rows of a split in memory."""

    arrays: Mapping[str, np.ndarray]
    """tokens, targets, segments, positions: int32[rows, sequence]."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """conversations, learned (tokens), cut, dropped, unanswered, missing, unopened and unreasoned (answers, see :class:`Tokens`), copied (questions), greetings (answers), beyond (the model's context), longest (tokens)."""
    sequence: int = 0
    context: int = 0
    opening: str = ""
    """Words of a prompt that unopened answers lack."""
    unread: Sequence[str] = ()
    """Columns with text that were not read."""
    first: Messages | None = None
    """The first conversation."""
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Keys of its lines (:attr:`Line.key`)."""

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked rows."""
        return {name: array[picks.indices] for name, array in self.arrays.items()}

    def notes(self) -> tuple[str, ...]:
        """Notes on what was cut and left out, a line each."""
        long = f"longer than a row of {self.sequence} tokens"
        said = {
            "cut": ("conversation", f"{long} and", "cut there"),
            "dropped": ("conversation", f"{long} and", "left out"),
            "unanswered": ("conversation", "without an answer in the row and", "left out"),
            "beyond": (
                "conversation",
                f"longer than the {self.context} tokens that the model was made for; what lies beyond is at positions that it has not seen",
                "",
            ),
            "missing": (
                "answer",
                "written otherwise by the chat template where later turns follow than as the last turn, and not learned",
                "",
            ),
            "unopened": (
                "answer",
                f"without {self.opening!r}, which the chat template begins an answer with in a prompt and leaves out of a conversation; learned as there",
                "",
            ),
            "copied": (
                "question",
                "asked with the whole answer in the text; if that is not meant, name the column of the question with --columns.prompt",
                "",
            ),
            "greetings": (
                "answer",
                'before the first question of a conversation, so read and not learned; give it "weight": 1 to have it learned',
                "",
            ),
            "unreasoned": (
                "answer",
                "without its reasoning, which the chat template leaves out; write it into the content to have it learned",
                "",
            ),
        }
        notes = [
            _note(self.counts[name], *words)
            for name, words in said.items()
            if self.counts.get(name)
        ]
        if self.unread:
            more = ", …" if len(self.unread) > NAMED else ""
            notes.append(
                f"columns that were not read: {', '.join(self.unread[:NAMED])}{more} (--columns.prompt and --columns.answer choose others)"
            )
        return tuple(notes)

    def left_out(self, split: Split) -> str:
        """Why there are no rows although there are conversations, and what helps; "" where that is not so."""
        many, longest = self.counts["conversations"], self.counts["longest"]
        if len(self) or not many:
            return ""
        why = {
            "dropped": f"longer than a row of {self.sequence:,} tokens",
            "unanswered": "without an answer in the row",
        }
        reasons = [f"{self.counts[name]:,} {how}" for name, how in why.items() if self.counts[name]]
        helps = f"the longest has {longest:,} tokens; give --sequence {longest - 1}"
        if longest <= self.sequence + 1:
            helps = "give conversations whose answers are learned"
        elif self.counts["dropped"]:
            helps += ", or --too-long cut, which keeps the answers that begin in the row"
        what = "conversation is" if many == 1 else "conversations are"
        return f"the {split.value} split has no rows, since its {many:,} {what} left out ({', '.join(reasons)}): {helps}"


def _note(count: int, noun: str, how: str, done: str) -> str:
    """A note with its words in the number of what it counts."""
    single = count == 1
    ending = f" {'was' if single else 'were'} {done}" if done else ""
    return f"{count:,} {noun if single else f'{noun}s'} {'is' if single else 'are'} {how}{ending}"


def files_of(path: Path) -> list[Path]:
    """The files of conversations at a path: JSONL, which may be compressed, a JSON array, Parquet, CSV or TSV.

    Raises:
        NotFoundError: there is none.
    """
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if has_rows(file))
    if all(file.name in ARROW_NOTES for file in files):
        for file in itertools.islice(itertools.chain(path.glob("*.arrow"), path.glob("*/*.arrow")), 1):  # fmt: skip
            refuse_other(file)
    if not files:
        what = "has no .jsonl, .json, .parquet, .csv or .tsv file"
        what = what if path.is_dir() else f"does not exist{nearest_file(path)}"
        raise NotFoundError(f"{path} {what}; give a JSONL file of conversations with --data")
    return files


def has_rows(file: Path) -> bool:
    """Whether a file of a folder holds rows, by its name."""
    return is_lines(file) or file.suffix.lower() in TABLES


def read(path: Path, reading: RowReading = USUAL) -> Iterator[Line]:
    """The conversations at a path, in order.

    Raises:
        BadLinesError: lines are none; names the first and what it lacks, and holds all.
    """
    bad: list[str] = []
    good = 0
    for line in parsed(path, reading):
        if isinstance(line, Line):
            good += 1
            yield line
        else:
            bad.append(str(line))
    if bad:
        raise BadLinesError(bad, good + len(bad))


class BadLinesError(DataError):
    """Lines that are no conversations."""

    def __init__(self, lines: Sequence[str], total: int) -> None:
        self.lines = tuple(lines)
        """Fault of each, with its place."""
        self.total = total
        """Lines that were read, with these."""
        kinds: dict[str, list[str]] = {}
        for line in lines:
            kinds.setdefault(DETAIL.sub("#", line), []).append(line)
        self.kinds = tuple(
            f"{len(same):,} of {total:,} lines: {same[0]}" if len(same) > 1 else same[0]
            for same in kinds.values()
        )
        """Faults by kind, with the place of the first and how many have it."""
        more = len(lines) - 1
        hint = f" ({more:,} more such line{'s'[: more > 1]}; systolic data inspect sft names them by their kind)"
        super().__init__(self.kinds[0] if len(self.kinds) == 1 else lines[0] + hint)


def parsed(path: Path, reading: RowReading = USUAL) -> Iterator[Line | DataError]:
    """The conversations at a path, in order, with what is wrong with those lines that are none; rows that the reading leaves out are not among them."""
    for file in files_of(path):
        for place, content in _rows_of(file):
            if isinstance(content, DataError):
                yield content
                continue
            line = content if isinstance(content, bytes) else msgspec.json.encode(content)
            hashed = hashlib.sha256(line.strip()).digest()
            try:
                row = _row(content, place)
                messages, beside = messages_of(row, place, reading), beside_of(row, place)
            except DataError as error:
                yield error
                continue
            if messages is not None:
                key = int.from_bytes(hashed[:8], "big") / 2.0**64
                yield Line(place, messages, key, beside, unread(row, reading))


def are_conversations(path: Path, reading: RowReading = USUAL) -> bool:
    """Whether the first row at a path is a conversation, and no document with a field ``text``."""
    try:
        place, content = next(row for file in files_of(path) for row in _rows_of(file))
        row = _row(content, place)
        return not isinstance(row.get("text"), str) and messages_of(row, place, reading) is not None
    except (StopIteration, NotFoundError, DataError, OSError):
        return False


def are_documents(path: Path, reading: RowReading = USUAL) -> bool:
    """Whether a path holds text without turns: files of text, or rows with a field ``text`` that are no conversations."""
    try:
        file = next(iter(files_of(path)), path)
        if not has_rows(file):
            return not are_conversations(path, reading)
        place, content = next(_rows_of(file))
        return isinstance(_row(content, place).get("text"), str)
    except (StopIteration, NotFoundError, OSError):
        return path.is_dir() and any(not has_rows(file) for file in path.iterdir())
    except DataError:
        return False


def _rows_of(file: Path) -> Iterator[tuple[str, Any]]:
    """Place and content of each row of a file: bytes of a line, fields, or what is wrong with it."""
    refuse_other(file)
    if file.suffix.lower() in TABLES:
        yield from table_rows(file)
    elif (rows := array_rows(file)) is not None:
        yield from rows
    else:
        yield from lines_of(file)


def _row(content: Any, place: str) -> dict[str, Any]:
    """Fields of a row."""
    if isinstance(content, DataError):
        raise content
    try:
        row = msgspec.json.decode(content) if isinstance(content, bytes) else content
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} {not_json(error, 'each line is one JSON object')}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place} is not a JSON object; it takes one with {FORMS}")
    return row


def beside_of(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Arguments that a row gives the template beside its messages: tools, documents, and names such as ``enable_thinking``.

    Raises:
        DataError: one is of another form.
    """
    beside = {}
    # OpenAI's preference pairs have the tools beside the messages of their input.
    inner = row.get("input")
    row = {**inner, **row} if isinstance(inner, Mapping) else row
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
        if not isinstance(value, form) or not all(isinstance(part, dict) for part in rows):
            wanted = "an object" if form is dict else "a list of objects"
            raise DataError(f"{place} has {column} of another form; give {wanted}")
        beside[name] = value
    return beside


def messages_of(row: Mapping[str, Any], place: str, reading: RowReading = USUAL) -> Messages | None:
    """The turns of a row; ``None`` for one to leave out.

    Raises:
        DataError: it is no conversation.
    """
    for name in UNREAD:
        if row.get(name):
            raise DataError(
                f"{place} has {name}, which templates are not given here; take the field out, or write it into the system's turn"
            )
    messages = as_messages(row, reading, place)
    if messages is None:
        return None
    for number, message in enumerate(messages, 1):
        _check_fields(message, f"{place}, turn {number}")
    messages = _greeted(messages)
    _check_turns(messages, place)
    return messages


def _check_fields(message: Any, place: str) -> None:
    lacking = _lacking(message)
    content = message.get("content") if isinstance(message, dict) else None
    parts = (
        [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    other = next((kind for part in parts if (kind := part.get("type", "text")) != "text"), None)
    if other is not None:
        raise DataError(
            f"{place} has a part of the type {other!r} in its content, and sft learns text only; take the part out, or the line"
        )
    if lacking:
        raise DataError(
            f"{place} lacks a text in {' and '.join(lacking)}; give {'both' if len(lacking) > 1 else 'it'}"
        )


def _greeted(messages: Messages) -> list[Mapping[str, Any]]:
    """Turns whose greetings are only read: answers before the first turn that asks something, without a flag that says that they are learned."""
    first = _first_question(messages)
    return [
        {**message, READ: True}
        if number < first
        and message["role"] == ANSWERS
        and all(message.get(name) is None for name in FLAGS)
        else message
        for number, message in enumerate(messages)
    ]


def _first_question(messages: Messages) -> int:
    """Number from 0 of the first turn that asks something; that behind the last where none does."""
    asks = (n for n, message in enumerate(messages) if message["role"] not in (ANSWERS, *TELLS))
    return next(asks, len(messages))


def _check_turns(messages: Messages, place: str) -> None:
    for number, message in enumerate(messages, 1):
        try:
            for call in message.get("tool_calls") or ():
                arguments_of(call)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place}, turn {number} has a tool call whose arguments are no JSON ({error}); write them as an object"
            ) from error
        if message["role"] == ANSWERS:
            _check_answer(message, f"{place}, turn {number}")
        elif flag := next((name for name in FLAGS[1:] if message.get(name)), None):
            raise DataError(
                f"{place}, turn {number} has {flag} at a turn of the role {message['role']}, and answers alone are learned; take it out"
            )
    answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
    if not answers:
        raise DataError(
            f"{place} has no turn of the role {ANSWERS}, so nothing to learn; add one, or take the line out"
        )
    learned = [number for number in answers if is_learned(messages[number])]
    unasked = not learned and answers[-1] < _first_question(messages)
    if len(answers) == len(messages) or unasked or learned == [0]:
        has_preface = messages[0]["role"] in TELLS
        other = "give the answer a weight of 1" if has_preface else "take the line out"
        raise DataError(
            f"{place} has no question before its answer, so nothing that it answers; add the user's turn, or {other}"
        )
    for number, (before, after) in enumerate(itertools.pairwise(messages), 1):
        if before["role"] == "user" and is_learned(after) and not text_of(before["content"]).strip():  # fmt: skip
            raise DataError(
                f"{place}, turn {number} has an empty question, so nothing that is answered; write it, take the line out, or give its answer a weight of 0"
            )
    if not learned:
        flag = next(name for name in FLAGS if any(messages[n].get(name) == 0 for n in answers))
        raise DataError(
            f"{place} has the {flag} 0 at every answer, so nothing to learn; give one the {flag} 1, or take the line out"
        )


def _check_answer(message: Mapping[str, Any], place: str) -> None:
    for name in FLAGS:
        if message.get(name) not in (None, 0, 1):
            raise DataError(
                f"{place} has the {name} {message[name]!r}; give 1, or 0 for an answer that is not learned"
            )
    said = text_of(message.get("content")).strip()
    if not said and is_learned(message) and not any(message.get(reason) for reason in REASONS):
        raise DataError(
            f"{place} has an empty answer, so nothing to learn; write it, take the line out, or give the turn a weight of 0"
        )


def _lacking(message: Any) -> list[str]:
    """Fields of a turn that are missing or of another form; an answer may be a call or a reasoning alone."""
    if not isinstance(message, dict):
        return ["role", "content"]
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = all(
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
        for part in parts
    )
    alone = content is None and role == ANSWERS and any(message.get(reason) for reason in REASONS)
    have = {"role": isinstance(role, str), "content": texts or alone}
    return [name for name, there in have.items() if not there]


def tokenized(lines: Sequence[Line], template: ChatTemplate, tokenizer: Tokenizer) -> list[Tokens]:
    """Conversations in tokens; an answer is learned up to its last special token, such as the end of its turn.

    A token of both an answer and the text before it is not learned.

    Raises:
        BadLinesError: the template refuses conversations; names the lines.
    """
    conversations, bad = _rendered(lines, template)
    if bad:
        raise BadLinesError(bad, len(lines))
    tokens = []
    encodings = tokenizer.spans([conversation.text for conversation in conversations])
    for line, conversation, (ids, starts, special) in zip(
        lines, conversations, encodings, strict=True
    ):
        left_out = sum(_leaves_out(message, conversation.text) for message in line.messages)
        counts = {
            "missing": conversation.missing,
            "unopened": len(conversation.unopened),
            "unreasoned": left_out,
        }
        opening = conversation.unopened[0] if conversation.unopened else ""
        tokens.append(Tokens(ids, _learned(conversation, starts, special), counts, opening))
    return tokens


def _leaves_out(message: Mapping[str, Any], text: str) -> bool:
    """Whether the text of a conversation lacks the reasoning of an answer that is learned."""
    content = text_of(message.get("content"))
    reasonings = (message.get(name) for name in REASONING)
    reasoning = next((thought for thought in reasonings if thought is not None), None)
    if reasoning is None and "</think>" in content:
        reasoning = content.partition("</think>")[0].rpartition("<think>")[2]
    return is_learned(message) and isinstance(reasoning, str) and reasoning.strip() not in text


def _rendered(lines: Sequence[Line], template: ChatTemplate) -> tuple[list[Rendered], list[str]]:
    """Conversations as text, and what is wrong with those that the template refuses."""
    conversations: list[Rendered] = []
    bad: list[str] = []
    for line in lines:
        try:
            _check_taken(line, template)
            conversation = template.conversation(line.messages, **line.beside)
            _check_calls(line, template, conversation.text)
            conversations.append(conversation)
        except _TemplateError as error:
            bad.append(str(error))
        except DataError as error:
            bad.append(f"{line.place}: {error}")
    return conversations, bad


class _TemplateError(DataError):
    """A conversation that a template does not take, with its place."""


def _check_taken(line: Line, template: ChatTemplate) -> None:
    """Refuses what a template would leave out, and roles that it would write without knowing them."""
    beside = {"tools": template.takes_tools, "documents": template.takes_documents}
    untaken = [name for name, taken in beside.items() if name in line.beside and not taken]
    if untaken:
        raise _TemplateError(
            f"{line.place} has {untaken[0]} and the chat template of {template.origin} takes none; take the field out, or write it into the system's turn"
        )
    named = takes_of(template.chosen(tools="tools" in line.beside)).constants
    for number, message in enumerate(line.messages, 1):
        role = message["role"]
        if role not in KNOWN and role not in named:
            meant = f"; did you mean {ALIASES[role.lower()]}?" if role.lower() in ALIASES else ""
            raise _TemplateError(
                f"{line.place}, turn {number} has the role {role!r}, which the chat template of {template.origin} does not name{meant or nearest(role, ALIASES) or ';'} take {', '.join(KNOWN)}"
            )


def _check_calls(line: Line, template: ChatTemplate, text: str) -> None:
    """Refuses a conversation with a call that a template left out of its text."""
    for number, message in enumerate(line.messages, 1):
        for call in (
            *(message.get("tool_calls") or ()),
            {"function": message.get("function_call")},
        ):
            function = call.get("function", call) if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and name not in text:
                raise _TemplateError(
                    f"{line.place}, turn {number} calls {name}, and the chat template of {template.origin} leaves the call out; write it into the turn's content, or give a template that writes {'tool_calls' if message.get('tool_calls') else 'function_call'} with --template"
                )


def _learned(conversation: Rendered, starts: np.ndarray, special: np.ndarray) -> np.ndarray:
    """bool[n]: whether a token is of an answer."""
    learned = np.zeros(len(starts), bool)
    words = conversation.words or ((),) * len(conversation.answers)
    for (start, stop), known in zip(conversation.answers, words, strict=True):
        inside = (starts >= start) & (starts < stop)
        ends = np.flatnonzero(inside & special)
        if len(ends):  # what follows the end of a turn is the template's
            behind = np.flatnonzero(inside[ends[-1] + 1 :])
            rest = conversation.text[starts[ends[-1] + 1 + behind[0]] : stop] if len(behind) else ""
            own = rest.strip() and (not conversation.words or any(word in rest for word in known))
            if not own:
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
    if not read_lines:
        raise DataError(_nothing(data.file(split)))
    bad = [str(line) for line in read_lines if isinstance(line, DataError)]
    lines = [line for line in read_lines if isinstance(line, Line)]
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
        raise _all_bad(data, read_lines, bad) from error
    if bad:
        raise _all_bad(data, read_lines, bad)
    if data.vocab:
        for line, (ids, *_) in zip(lines, conversations, strict=True):
            if (ids >= data.vocab).any():
                other = int(ids.max())
                raise DataError(
                    f"{line.place} has the token {tokenizer.token(other)!r} with the id {other} and the model has ids below {data.vocab}; take it out of the line or the template, or use the tokenizer that the model came with"
                )
    laid = _laid(data, conversations)
    return replace(
        laid,
        counts={
            **laid.counts,
            "copied": sum(_copies(line.messages) for line in lines),
            "greetings": sum(sum(READ in message for message in line.messages) for line in lines),
        },
        unread=tuple(dict.fromkeys(name for line in lines for name in line.unread)),
        first=lines[0].messages if lines else None,
        keys=np.array([line.key for line in lines]),
    )


def _copies(messages: Messages) -> int:
    """Questions that hold the whole answer behind them."""
    pairs = (
        (text_of(before.get("content")), text_of(after.get("content")).strip())
        for before, after in itertools.pairwise(messages)
        if before["role"] == "user" and is_learned(after)
    )
    return sum(len(answer) >= COPIED and answer in question for question, answer in pairs)


def _nothing(path: Path) -> str:
    files = files_of(path)
    if not any(file.stat().st_size for file in files):
        return f"{path} is empty; write conversations to it, one a line"
    if all(file.suffix.lower() in TABLES for file in files):
        return f"{path} names its columns and has no rows; write one for each conversation"
    return f"{path} has no line to learn; write conversations to it, one a line"


def _all_bad(
    data: "Instructions", read_lines: Sequence[Line | DataError], bad: Sequence[str]
) -> BadLinesError:
    """All bad lines of a file, those of the other split with them."""
    lines = [line for line in read_lines if isinstance(line, Line)]
    _, refused = _rendered(lines, data.chat_template)
    return BadLinesError([*bad, *refused], len(read_lines))


def _laid(data: "Instructions", conversations: Sequence[Tokens]) -> Rows:
    from systolic.data.text.instructions import Filling, TooLong

    names = ("cut", "dropped", "unanswered", "beyond", "missing", "unopened", "unreasoned")
    counts = Counter(conversations=len(conversations), **dict.fromkeys(names, 0))
    counts["longest"] = max((len(ids) for ids, *_ in conversations), default=0)
    pairs, most = [], data.sequence + 1
    opening = ""
    for ids, learned, tally, words in conversations:
        counts.update(tally)
        opening = opening or words
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
    return Rows(
        arrays=arrays,
        counts=counts,
        sequence=data.sequence,
        context=data.context,
        opening=opening,
    )
