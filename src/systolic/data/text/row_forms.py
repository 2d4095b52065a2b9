"""Rows of fine-tuning data in the forms that people have: ShareGPT, questions with answers, preference pairs; tables in CSV and TSV, and JSON arrays."""

import csv
import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec

from systolic.core.arguments import Alternative
from systolic.core.errors import DataError, OptionError, nearest
from systolic.core.ranges import check
from systolic.data.text.messages import FLAGS

TABLES = (".csv", ".tsv")
DELIMITERS = ",;\t|"
MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
"""Columns of whole conversations."""
ROLES, CONTENTS = ("role", "from", "speaker"), ("content", "value", "text")
"""Fields of a turn: OpenAI's, ShareGPT's, others."""
ASKS = ("prompt", "instruction", "question", "query", "problem", "user", "human")
"""Columns of what is asked, the first that a row has where none has an answer of :data:`SETS`."""
REPLIES = ("completion", "output", "response", "solution", "generated_solution", "answer", "reply", "assistant", "gpt")  # fmt: skip
"""Columns of the answer, likewise: a solution goes before the answer that it ends with."""
SETS: Mapping[str, Sequence[str]] = {
    "prompt": ("completion",),
    "instruction": ("output", "response"),
    "problem": ("solution", "generated_solution"),
    "question": ("response", "solution", "answer"),
    "query": ("response", "answer"),
    "user": ("assistant",),
    "human": ("gpt", "assistant"),
}
"""Columns that belong together, a question to its answers; the first pair that a row has goes before any others that it has. A ``prompt`` beside Alpaca's columns is their text with the answer in it."""
INPUTS = ("input", "context")
"""Columns of what an instruction is about; ``input`` alone is what is asked."""
THOUGHTS = ("complex_cot", "reasoning_content", "reasoning", "thinking")
"""Columns of the thoughts before an answer: medical-o1's and those of the fields of a message."""
BESIDE = {"tools": "tools", "documents": "documents", "chat_template_kwargs": "names"}
"""Columns that a template is given beside the messages, to what :meth:`ChatTemplate.conversation` calls them."""
MASKS = ("loss_mask", "masked", "mask", "train_detail", "training_detail", "loss_weight", "loss_scale")  # fmt: skip
"""Fields that say what of a row or a turn is learned, in ways that are not taken."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a conversation is about besides text."""
SYSTEMS = ("system", "system_prompt")
HISTORY = "history"
"""Column of Alpaca's earlier turns: pairs of a question and its answer."""
PAIRED = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"), ("preferred", "dispreferred"), ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"))  # fmt: skip
"""Columns of preference pairs: TRL's, OpenAI's, others'."""
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
SPOKEN = re.compile(r"\n\n(Human|Assistant):")
"""Starts of the turns of a dialogue in one text: Anthropic's hh-rlhf and what was made of it."""
LABEL = "label"
"""Column of preference data of single answers that are good or bad."""
KNOWN = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API; others are taken where the chat template names them."""
ALIASES = {
    **dict.fromkeys(("human", "user", "prompter", "instruction"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "model", "chatgpt", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}  # fmt: skip
"""Who speaks in ShareGPT's turns and in other people's, as roles of messages."""
CALLS = ("function_call", "tool_call")
"""Who speaks where the model calls functions: the value is JSON with name and arguments, or a list of them."""


class Pairs(enum.Enum):
    """Handling of preference pairs, whose rows have a chosen and a rejected answer."""

    refuse = "refuse"
    """They are refused: no preference is learned of them here."""
    chosen = "chosen"
    """Their chosen answers are learned like any others; the rejected ones are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of fields that a row has for its parts; those left empty are found by their usual names."""

    messages: str = ""
    """Whole conversations: a list of turns."""
    role: str = ""
    """Who speaks, of a turn."""
    content: str = ""
    """Text of a turn."""
    prompt: str = ""
    """Question."""
    answer: str = ""
    """Answer."""
    input: str = ""
    """Text behind the question, such as the text that it is about."""
    system: str = ""
    """The system's turn."""


USUAL_COLUMNS = Columns()


def columns_of(names: Mapping[str, str]) -> Columns:
    """Columns of a mapping from their parts to their names.

    Raises:
        OptionError: it has an unknown part.
    """
    known = [column.name for column in fields(Columns)]
    for name in names:
        if name not in known:
            raise OptionError(
                f"columns has {name!r}{nearest(str(name), known)}; it takes {', '.join(known)}"
            )
    return Columns(**names)


NamedColumns = Annotated[Columns, Alternative(Mapping, columns_of)]
"""Columns, or in Python a mapping of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReading:
    """How rows become conversations.

    Raises:
        OptionError: ``columns`` as a mapping has an unknown part.
    """

    columns: Columns = USUAL_COLUMNS
    pairs: Pairs = Pairs.refuse

    def __post_init__(self) -> None:
        if isinstance(self.columns, Mapping):
            object.__setattr__(self, "columns", columns_of(self.columns))
        check(self)


USUAL = RowReading()
"""Columns by their usual names."""


def table_rows(
    file: Path, *, blanks: bool = False
) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """Place (``data.csv line 3``) and fields of each row of a CSV or TSV file, whose first line names the columns; or what is wrong with the row.

    The delimiter of a .csv file is the one of ``, ; | tab`` that its first line has most.

    Args:
        file: The file.
        blanks: Whether empty cells are fields too.

    Raises:
        DataError: it is no text in UTF-8, or has no names.
    """
    csv.field_size_limit(2**31 - 1)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            delimiter = "\t" if file.suffix.lower() == ".tsv" else max(DELIMITERS, key=first.count)
            reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
            names = reader.fieldnames or ()
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise DataError(
                    f"{file} line 1 does not name its columns, each by another name ({first.strip()[:80]}); write the names there"
                )
            last = reader.line_num
            for row in reader:
                place, last = f"{file} line {last + 1}", reader.line_num
                if None in row or None in row.values():
                    cells = sum(value is not None for name, value in row.items() if name)
                    have = cells + len(row.get(None) or ())
                    yield (
                        place,
                        DataError(
                            f"{place} has {have} columns and the first line names {len(names)}; put texts with {delimiter!r} or line breaks in double quotes"
                        ),
                    )
                    continue
                yield place, {name.strip(): value for name, value in row.items() if value or blanks}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(
            f"{file} line {last + 1} is no {file.suffix[1:].upper()} ({error}); check its quotes"
        ) from error


def array_rows(file: Path) -> Iterator[tuple[str, Any]] | None:
    """Place (``data.json row 3``) and value of each element of a file that is one JSON array; ``None`` for any other file.

    Raises:
        DataError: it begins as an array and is none.
    """
    with file.open("rb") as lines:
        start = lines.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if file.suffix.lower() != ".json" or not start.startswith(b"["):
        return None
    try:
        rows = msgspec.json.decode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        raise DataError(
            f"{file} begins as a JSON array and is none ({error}); write it again"
        ) from error
    return ((f"{file} row {number}", row) for number, row in enumerate(rows, 1))


def as_messages(row: Mapping[str, Any], reading: RowReading, place: str) -> list[Any] | None:
    """The turns of a row in any of the forms, as ``role`` and ``content``; ``None`` for a row to leave out, whose answer is a bad one.

    Raises:
        DataError: it has none of the forms; names what it has and lacks.
    """
    columns = reading.columns
    # Refuses a row that lacks a column which was named.
    for option in ("messages", "prompt", "answer"):
        name = getattr(columns, option)
        if name and name not in row:
            raise DataError(
                f"{place} has no {name} (--columns.{option}){nearest(name, list(row))}; it has {', '.join(row) or 'no field'}"
            )
    _refuse_masks(row, place)
    low = _low(row)
    pair = next((pair for pair in PAIRED if set(pair) <= set(low)), None)
    if pair is not None:
        return _chosen(row, low, reading, place, (low[pair[0]], low[pair[1]]))
    if isinstance(row.get(low.get(LABEL, "")), bool) and _named(low, ASKS) is not None:
        # An answer that is labelled good; ``None`` for a bad one.
        if reading.pairs is Pairs.refuse:
            raise DataError(
                f"{place} is an answer labelled good or bad ({low[LABEL]}), and sft learns answers, not preferences; give --pairs chosen to learn the good answers alone"
            )
        return _asked(row, low, reading.columns, place) if row[low[LABEL]] else None
    field = columns.messages or _conversation(row, low)
    if field is not None and not (columns.prompt and columns.answer):
        turns = _decoded(row[field])
        if not isinstance(turns, list) or not turns:
            raise DataError(
                f"{place} has {field} that are no list of turns; give role and content of each"
            )
        if isinstance(_decoded(row.get(low.get(HISTORY, ""))), list) and row[low[HISTORY]]:
            raise DataError(
                f"{place} has {low[HISTORY]} beside {field}; put its turns at the start of {field}, or take it out"
            )
        for number, turn in enumerate(turns, 1):
            _refuse_masks(turn, f"{place}, turn {number}")
        messages = [_turn(turn, columns, f"{place}, turn {n}") for n, turn in enumerate(turns, 1)]
        has_system = messages[0].get("role") == "system"
        return messages if has_system else [*_system(row, low, columns, place), *messages]
    return _asked(row, low, columns, place)


def unread(row: Mapping[str, Any], reading: RowReading) -> list[str]:
    """Columns of a row that hold text or pictures, or say what is learned, and that are not read."""
    columns, low = reading.columns, _low(row)
    pair = next((pair for pair in PAIRED if set(pair) <= set(low)), ())
    field = columns.messages or _conversation(row, low)
    used = {low[name] for name in pair} | {columns.system or _named(low, SYSTEMS)}
    if pair or field is None or (columns.prompt and columns.answer):
        asks, replies = _question(low, columns)
        asks = asks or (field if pair else None)
        extra = _extra(low, columns, asks)
        used |= {asks, extra, low.get(HISTORY), *(() if pair else (replies, _named(low, THOUGHTS)))}
    else:
        used.add(field)
        if _role(_decoded(row[field])[0], columns) == "system":
            used -= {columns.system or _named(low, SYSTEMS)}
    used |= set(BESIDE)
    return [
        name
        for name, value in row.items()
        if name not in used
        and (
            (isinstance(value, str) and value.strip())
            or (name.lower() in MEDIA and value)
            or (name.lower() in FLAGS and value is not None)
        )
    ]


def _low(row: Mapping[str, Any]) -> dict[str, str]:
    """The names of a row's columns by those in small letters."""
    return {name.lower(): name for name in reversed(list(row))}


def _refuse_masks(turn: Any, place: str) -> None:
    """Raises DataError for a row or a turn with another way to say what is learned."""
    for name in MASKS:
        value = turn.get(name) if isinstance(turn, Mapping) else None
        if value is not None and value != [] and not (value is False and name.startswith("mask")):
            raise DataError(
                f'{place} has {name}, which is not read, and all answers would be learned; give answers that are not to be learned "weight": 0, and take it out'
            )


def _question(low: Mapping[str, str], columns: Columns) -> tuple[str | None, str | None]:
    """The columns of a row's question and of its answer: a pair that belongs together, else the first of each."""
    for ask, replies in SETS.items():
        if ask not in low or (columns.prompt and low[ask] != columns.prompt):
            continue
        reply = columns.answer or _named(low, replies)
        if reply is not None and reply.lower() in replies:
            return low[ask], reply
    return columns.prompt or _named(low, ASKS), columns.answer or _named(low, REPLIES)


def _extra(low: Mapping[str, str], columns: Columns, asks: str | None) -> str | None:
    """The column that is put behind a question; not that of an instruction which is not the question."""
    other = "instruction" in low and low["instruction"] != asks
    return columns.input or (None if other else _named(low, INPUTS))


def _asked(
    row: Mapping[str, Any], low: Mapping[str, str], columns: Columns, place: str
) -> list[Any]:
    """A question with its answer."""
    asks, replies = _question(low, columns)
    extra = _extra(low, columns, asks)
    if asks is None and replies is not None:
        asks, extra = extra, None
    if asks is None or replies is None:
        _refuse_half(row, asks, replies, place)
    assert asks is not None
    assert replies is not None
    question, answer = _as_turns(row[asks], columns), _as_turns(row[replies], columns)
    if not isinstance(question, list):
        question = _question_turns(row, asks, extra, place)
    if not isinstance(answer, list):
        said = _text(row, replies, place)
        if not said.strip():
            raise DataError(
                f"{place} has an empty {replies}, so nothing to learn; write it, or take the line out"
            )
        thought = _named(low, THOUGHTS)
        text = row[thought] if thought not in (None, asks, replies) else None
        reasoning = {"reasoning_content": text} if isinstance(text, str) and text.strip() else {}
        answer = [{"role": "assistant", "content": _own(said, row[asks]), **reasoning}]
    for name, value in ((asks, question), (replies, answer)):
        if not all(isinstance(turn, dict) for turn in value):
            raise DataError(
                f"{place} has a list in {name} that holds no turns; give a text, or turns with role and content"
            )
    before = _history(row, low, place)
    turns = [*_system(row, low, columns, place), *before, *question, *answer]
    return [_turn(turn, columns, f"{place}, turn {n}") for n, turn in enumerate(turns, 1)]


def _question_turns(
    row: Mapping[str, Any], asks: str | None, extra: str | None, place: str
) -> list[dict[str, str]]:
    """A question as the user's turn, with what is put behind it; one that is a dialogue up to its answer as turns."""
    more = _text(row, extra, place)
    text = "\n\n".join(part for part in (_text(row, asks, place), more) if part.strip())
    if not text:
        raise DataError(
            f"{place} has an empty {asks}, so nothing that is answered; write it, or take the line out"
        )
    return _dialogue(text)[:-1] if _is_open(text) else [{"role": "user", "content": text}]


def _dialogue(text: str) -> list[dict[str, str]]:
    """Turns of a text that is a whole dialogue, as hh-rlhf has it; [] for any other text."""
    before, *parts = SPOKEN.split(f"\n\n{text.lstrip()}")
    if before or not parts:
        return []
    return [
        {"role": ALIASES[who.lower()], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _is_open(text: Any) -> bool:
    """Whether a question is a dialogue up to where the answer begins."""
    return isinstance(text, str) and text.rstrip().endswith(ASSISTANT) and len(_dialogue(text)) > 1


def _own(answer: str, question: Any) -> str:
    """An answer without the space before it that continues a dialogue."""
    return answer.strip() if _is_open(question) else answer


def _history(row: Mapping[str, Any], low: Mapping[str, str], place: str) -> list[Any]:
    """Earlier turns of Alpaca's form, whose answers are learned too: pairs of a question and its answer, or turns."""
    name = low.get(HISTORY, "")
    pairs = _decoded(row.get(name))
    if not pairs:
        return []
    if isinstance(pairs, list) and all(isinstance(turn, dict) for turn in pairs):
        return pairs
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise DataError(
            f"{place} has {_a(name)} that is no list of pairs; give [[question, answer], …] of the turns before, or take it out"
        )
    return [
        {"role": role, "content": said}
        for pair in pairs
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(isinstance(said, str) for said in value)
    )


def _refuse_half(row: Mapping[str, Any], asks: str | None, replies: str | None, place: str) -> None:
    """Raises DataError for a row without a question or without an answer."""
    if asks is None and replies is None:
        raise DataError(
            f"{place} has {', '.join(row) or 'no field'}; it lacks messages, or prompt and completion, or instruction and output, or question and answer; name other columns with --columns.prompt and --columns.answer"
        )
    if replies is None:
        lacks = {"prompt": "completion", "instruction": "output"}.get(asks or "", "answer")
        raise DataError(
            f"{place} has {asks} and lacks {lacks}; add it, or name the column of the answer with --columns.answer"
        )
    lacks = {"completion": "prompt", "output": "instruction"}.get(replies, "question")
    raise DataError(
        f"{place} has {replies} and lacks {lacks}; add it, or name the column of the question with --columns.prompt"
    )


def _conversation(row: Mapping[str, Any], low: Mapping[str, str]) -> str | None:
    """The column of the whole conversation: one that is named so, and of the less usual names one with a list."""
    for name in MESSAGES:
        if name in low and (name in MESSAGES[:2] or isinstance(_decoded(row[low[name]]), list)):
            return low[name]
    return None


def _chosen(
    row: Mapping[str, Any],
    low: Mapping[str, str],
    reading: RowReading,
    place: str,
    pair: tuple[str, str],
) -> list[Any]:
    """The chosen answer of a preference pair, with what it answers."""
    chosen, rejected = pair
    if reading.pairs is Pairs.refuse:
        raise DataError(
            f"{place} is a preference pair ({chosen} and {rejected}), and sft learns answers, not preferences; give --pairs chosen to learn the chosen answers alone"
        )
    columns = reading.columns
    asks, _ = _question(low, columns)
    asks = asks or columns.messages or _conversation(row, low)
    if asks is None:
        asks = low.get(INPUTS[0])
    before, answer = _as_turns(row[asks], columns) if asks else [], _as_turns(row[chosen], columns)
    if isinstance(before, dict):
        # OpenAI's input, which has tools beside its messages.
        before = before.get("messages")
    if isinstance(before, str):
        extra = _extra(low, columns, asks)
        extra = None if extra == asks else extra
        question = before.strip() or _text(row, extra, place).strip()
        before = _question_turns(row, asks, extra, place) if question else []
    if isinstance(answer, dict):
        answer = [answer]
    if isinstance(answer, str):
        spoken = [] if before and not _is_open(row.get(asks)) else _dialogue(answer)
        if not before and not spoken:
            raise DataError(
                f"{place} has a {chosen} text and no prompt; name the column of the prompt with --columns.prompt, or write {chosen} as turns, or as a dialogue of {HUMAN!r} and {ASSISTANT!r}"
            )
        answer = spoken or [{"role": "assistant", "content": _own(answer, row.get(asks))}]
    if not isinstance(before, list) or not isinstance(answer, list):
        name = chosen if isinstance(before, list) else asks
        raise DataError(f"{place} has {_a(name)} that is neither a text nor a list of turns")
    # A chosen conversation that begins with its prompt is whole.
    whole = bool(answer) and isinstance(answer[0], dict)
    whole = whole and _role(answer[0], columns) != "assistant"
    turns = answer if whole else [*_history(row, low, place), *before, *answer]
    messages = [_turn(turn, columns, f"{place}, turn {n}") for n, turn in enumerate(turns, 1)]
    return [*_system(row, low, columns, place), *messages]


def _system(
    row: Mapping[str, Any], low: Mapping[str, str], columns: Columns, place: str
) -> list[Any]:
    text = _text(row, columns.system or _named(low, SYSTEMS), place)
    return [{"role": "system", "content": text}] if text else []


def _turn(turn: Any, columns: Columns, place: str) -> dict[str, Any]:
    """A turn with ``role`` and ``content``; other fields as they are."""
    if not isinstance(turn, dict):
        raise DataError(f"{place} is no object; give role and content")
    role, content = columns.role or _first(turn, ROLES), columns.content or _first(turn, CONTENTS)
    if role == "role" and content == "content":
        return {**turn, role: _known(turn.get(role))}
    if role is None or not isinstance(turn.get(role), str):
        raise DataError(
            f"{place} lacks a text in role (or from); it has {', '.join(turn) or 'nothing'}; name the field with --columns.role"
        )
    who = turn[role]
    others = {name: value for name, value in turn.items() if name not in (role, content)}
    if who.strip().lower() in CALLS:
        return {
            **others,
            "role": "assistant",
            "content": None,
            "tool_calls": _calls(turn, content, place),
        }
    known = ALIASES.get(who.strip().lower())
    if known is None and role != "role":
        raise DataError(
            f"{place} is from {who!r}, who is nobody known{nearest(who, ALIASES) or ';'} take {', '.join(ALIASES)} or {CALLS[0]}"
        )
    said = turn.get(content) if content is not None else None
    return {"role": known or who, "content": said, **others}


def _known(who: Any) -> Any:
    """A role by its usual name; one that a template may name stays as it is, as those of answers of functions do."""
    if not isinstance(who, str) or who in KNOWN:
        return who
    low = who.strip().lower()
    alias = low if low in KNOWN else ALIASES.get(low)
    return who if alias is None or (alias == "tool" and low != alias) else alias


def _calls(turn: Mapping[str, Any], content: str | None, place: str) -> list[Any]:
    """Calls of functions, from JSON."""
    value = turn.get(content) if content is not None else None
    try:
        decoded: Any = json.loads(value) if isinstance(value, str) else value
        calls: list[Any] = decoded if isinstance(decoded, list) else [decoded]
        return [
            {
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": call.get("arguments", call.get("parameters", {})),
                },
            }
            for call in calls
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f'{place} calls a function without JSON of its name and arguments ({error}); write {{"name": …, "arguments": {{…}}}}'
        ) from error


def _text(row: Mapping[str, Any], name: str | None, place: str) -> str:
    """A text of a row; "" for a field that is not there or null."""
    value = "" if name is None else row.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{place} has {_a(name)} that is no text; give a text")
    return value or ""


def _decoded(value: Any) -> Any:
    """A list of turns or of pairs that a table holds as JSON; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[{", "[[")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _as_turns(value: Any, columns: Columns) -> Any:
    """Turns that a table holds as JSON; any other value as it is, such as an answer that is JSON itself."""
    decoded = _decoded(value)
    turns = isinstance(decoded, list) and all(
        isinstance(turn, dict) and (columns.role or _first(turn, ROLES)) in turn for turn in decoded
    )
    return decoded if turns else value


def _a(name: str | None) -> str:
    return f"{'an' if name and name[0].lower() in 'aeiou' else 'a'} {name}"


def _role(turn: Mapping[str, Any], columns: Columns) -> str | None:
    name = columns.role or _first(turn, ROLES)
    who = None if name is None else turn.get(name)
    return ALIASES.get(who.lower(), who) if isinstance(who, str) else None


def _named(low: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The row's own name of the first of the names that it has."""
    return next((low[name] for name in names if name in low), None)


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)
