"""Messages of a conversation as a chat template takes them, and the environment that templates are programs of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from systolic.core.errors import DataError

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Marks around a template's ``generation`` blocks while it is rendered, of Unicode's private use."""
REASON = 300
"""Characters of a template's own message that are shown."""
Messages = Sequence[Mapping[str, Any]]
"""``role`` and ``content`` of each message, and what else a template may read of it."""
ANSWERS = "assistant"
"""Role whose turns are the model's."""
FLAGS = ("weight", "train", "loss")
"""Fields of an answer that say whether it is learned: OpenAI's, Axolotl's and ms-swift's."""
READ = "systolic.read"
"""Field of an answer that is read and not learned without saying so; templates are not given it."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning: the first is the one that templates read, ``thinking`` that of gpt-oss."""
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that a template may name."""
ONE, OTHER = "zqxone", "zqxother"
"""Texts of samples, which no template has."""
CALL = "zqx000001"
"""Id of a sample's call: Mistral's templates take nine letters and digits."""
CALLING: Sequence[Mapping[str, Any]] = ({}, {"content": None}, {"content": "a"})
"""Contents beside a sample's call: templates ask whether it is none, or whether it is there, or read it as any other."""
SAMPLES = ("user", "system", "developer", ANSWERS, "tool")
"""Roles of which there are samples."""
ABSENT, NONE, EMPTY, SAID = "absent", "none", "empty", "said"
CONTENTS: Mapping[str, Mapping[str, Any]] = {
    ABSENT: {},
    NONE: {"content": None},
    EMPTY: {"content": ""},
    SAID: {"content": OTHER},
}
"""Contents of a sample's answer with a call."""


class _Answers(Extension):
    """``{% generation %}``, which marks the model's own words."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = self.call_method("marked")
        return jinja2.nodes.CallBlock(marked, [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        """Content of the block, between marks."""
        return OPEN + caller() + CLOSE


class _Unmarked(_Answers):
    """The same block without marks, which a template's own filters and tests would see."""

    def marked(self, caller: Any) -> str:
        """Content of the block."""
        return caller()


class _Namespace(Namespace):
    """``namespace(…)`` without attributes of a leading underscore, which transformers refuses too."""

    def __init__(*args: Any, **names: Any) -> None:
        # Without a parameter of its own name, so that a template may have an attribute ``self``.
        attributes, kept = args[1:], args[0]
        names = dict(*attributes, **names)
        for name in names:
            _check_attribute(name)
        Namespace.__init__(kept, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """``dict``: its constructor and ``fromkeys``, without the class itself."""

    def __call__(self, *values: Any, **names: Any) -> dict[Any, Any]:
        return dict(*values, **names)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        """Same as ``dict.fromkeys``."""
        return dict.fromkeys(*values)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace has no attribute {name!r}; rename it without the underscore"
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter of that name writes it: Jinja's own escapes <, > and & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=2)
def environment(*, marked: bool = False) -> ImmutableSandboxedEnvironment:
    """The environment of templates.

    A template is written for the environment of transformers (https://huggingface.co/docs/transformers/chat_templating_writing):
    the same white space rules, tags, filters and functions, with the same signatures. What fails in a template is one line
    that names the line of the template.

    Args:
        marked: Whether generation blocks are put between :data:`OPEN` and :data:`CLOSE`.
    """
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Answers if marked else _Unmarked, loopcontrols],
    )
    sandbox.filters["tojson"] = _to_json
    functions: dict[str, Any] = {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    sandbox.globals.update(functions)
    return sandbox


@lru_cache(maxsize=32)
def _compiled(text: str, marked: bool) -> jinja2.Template:
    return environment(marked=marked).from_string(text)


def check(text: str, origin: Path) -> None:
    """Parses a template.

    Raises:
        DataError: it does not parse; names the line.
    """
    try:
        _compiled(text, False)
    except (
        Exception
    ) as error:  # A template is a program of others; deep nesting is a RecursionError.
        raise DataError(
            f"the chat template of {origin} is not valid ({_reason(error)}){_where(error)}; fix it, or give another with --template"
        ) from error


def rendered(text: str, origin: Path, values: Mapping[str, Any], *, marked: bool = False) -> str:
    """A template's text.

    Args:
        text: The template.
        origin: Its file, for messages.
        values: Names that it may read.
        marked: Whether its generation blocks are put between :data:`OPEN` and :data:`CLOSE`.

    Raises:
        DataError: it does not parse, refuses the values or fails on them; names the line.
    """
    try:
        return _compiled(text, marked).render(values)
    except Exception as error:  # A template is a program of others, run on anyone's messages.
        raise DataError(
            f"the chat template of {origin} fails ({_reason(error)}){_where(error)}; write the messages as it wants them"
        ) from error


def _where(error: BaseException) -> str:
    """The line of the template that failed."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" at line {error.lineno}"
    line, step = None, error.__traceback__
    while step is not None:
        # Jinja gives the frames of a template the lines of its text.
        if step.tb_frame.f_code.co_filename == "<template>":
            line = step.tb_lineno
        step = step.tb_next
    return "" if line is None else f" at line {line}"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= REASON else f"{text[:REASON]}…"


@dataclass(frozen=True, kw_only=True)
class Takes:
    """Treatment of messages by a template."""

    constants: frozenset[str]
    """Texts that it names, with roles among them."""
    absent: Mapping[str, Any]
    """The content that an answer without one has in it: {} for none at all, as from transformers, or one that is none, or an empty text."""
    fills_empty: bool
    """Whether an empty content beside calls is such an answer too."""
    joins_arguments: bool
    """Whether it takes the arguments of a call as text (DeepSeek V3), not as an object."""
    parts: frozenset[str]
    """Roles whose contents it takes as lists of parts."""
    typed: frozenset[str]
    """Roles of these whose contents it does not take as text."""
    short_ids: bool
    """Whether it takes ids of calls of nine letters and digits alone, as Mistral's do."""


def prepared(messages: Messages, template: str) -> list[dict[str, Any]]:
    """Messages as a template takes them.

    As transformers gives them: without fields that are null, with reasoning under each of its names. Arguments of
    calls are decoded from JSON. An answer without a content, as beside calls, has the one with which the template writes
    its calls: one that is none where it asks for that, by any name, or an empty text where it joins it to text.

    Args:
        messages: As a client or a data file has them.
        template: The template, Jinja.

    Raises:
        DataError: arguments of a call are no JSON.
    """
    takes = takes_of(template)
    return [_message(message, takes) for message in messages]


def _message(message: Mapping[str, Any], takes: Takes) -> dict[str, Any]:
    role = message.get("role")
    fields = {name: value for name, value in message.items() if value is not None and name != READ}
    # Many clients send an empty content beside calls in place of none.
    empty = fields.get("content") == "" and fields.get("tool_calls") and takes.fills_empty
    if role == ANSWERS and (empty or "content" not in fields):
        # In its place among the fields, which a template may write as they come.
        names = dict.fromkeys((*message, *takes.absent))
        fields.pop("content", None)
        filled = {**fields, **takes.absent}
        fields = {name: filled[name] for name in names if name in filled}
    if role == "developer" and role not in takes.constants:
        # OpenAI's newer name of the same role; models of before were not trained on it.
        fields["role"] = "system"
    content = fields.get("content")
    if isinstance(content, list) and fields.get("role") not in takes.parts:
        fields["content"] = text_of(content)
    elif isinstance(content, str) and fields.get("role") in takes.typed:
        fields["content"] = [{"type": "text", "text": content}]
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_call(call, takes) for call in calls]
    reasonings = (fields[name] for name in REASONING if name in fields)
    if (reasoning := next(reasonings, None)) is not None:
        fields = {"thinking": reasoning, **fields, REASONING[0]: reasoning}
    return fields


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer to learn: one with a 0 or a false in one of :data:`FLAGS`, or with :data:`READ`, is only read."""
    if message.get("role") != ANSWERS or message.get(READ):
        return False
    return not any(message.get(name) == 0 for name in FLAGS)


def text_of(content: Any) -> str:
    """A content as one text: itself, or the texts of its parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def arguments_of(call: Any) -> Any:
    """The arguments of a call, decoded where they are JSON text; ``None`` where it has none.

    Raises:
        ValueError: they are text and no JSON.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _call(call: Any, takes: Takes) -> Any:
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        raise DataError(
            f"arguments of a tool call are no JSON ({error}); write them as an object"
        ) from error
    if arguments is None:
        return call
    function = call.get("function", call)
    if takes.joins_arguments:
        arguments = function["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        decoded = {**function, "arguments": text}
    else:
        decoded = {**function, "arguments": arguments}
    return {**call, "function": decoded} if "function" in call else decoded


@lru_cache(maxsize=32)
def takes_of(template: str) -> Takes:
    """Treatment of messages by a template, from its text and from samples; nothing particular where it does not parse."""
    try:
        tree = environment().parse(template)
    except Exception:  # Its rendering says what is wrong.
        tree = None
    if tree is None:
        nothing = frozenset[str]()
        return Takes(
            constants=nothing,
            absent={},
            fills_empty=False,
            joins_arguments=False,
            parts=nothing,
            typed=nothing,
            short_ids=False,
        )
    as_text = {role: _shows(template, _sample(role, ONE), ONE) for role in SAMPLES}
    pair = [{"type": "text", "text": ONE}, {"type": "text", "text": OTHER}]
    parts = {
        role
        for role in SAMPLES
        if _shows(template, _sample(role, pair), ONE, OTHER, without="'text'")
    }
    constants = {
        node.value
        for node in tree.find_all(jinja2.nodes.Const)
        if isinstance(node.value, str) and node.value
    }
    joins = _joins_arguments(template)
    absent, fills_empty = _absent(_texts_of_calls(template, joins=joins))
    return Takes(
        constants=frozenset(constants),
        absent=absent,
        fills_empty=fills_empty,
        joins_arguments=joins,
        parts=frozenset(parts),
        typed=frozenset(role for role in parts if not as_text[role]),
        short_ids=as_text["tool"]
        and not _shows(template, _sample("tool", ONE, id=f"call_{CALL}"), ONE),
    )


def _called(arguments: Any, id: str = CALL) -> list[dict[str, Any]]:
    function = {"name": "zqxcall", "arguments": arguments}
    call = {"id": id, "type": "function", "function": function}
    return [{"role": "user", "content": "a"}, {"role": ANSWERS, "tool_calls": [call]}]


def _sample(role: str, content: Any, id: str = CALL) -> list[dict[str, Any]]:
    message = {"role": role, "content": content}
    if role == "tool":
        return [*_called({"a": 1}, id), {**message, "tool_call_id": id, "name": "zqxcall"}]
    after = [] if role == "user" else [{"role": "user", "content": "a"}]
    before = [{"role": "user", "content": "a"}] if role == ANSWERS else []
    return [*before, message, *after]


def _shows(template: str, messages: list[dict[str, Any]], *texts: str, without: str = "\0") -> bool:
    """Whether the text of some messages has some texts, and lacks another."""
    for names in CALLING:
        shown = _text(template, [{**names, **message} for message in messages])
        if shown is not None and all(text in shown for text in texts) and without not in shown:
            return True
    return False


def _text(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str | None:
    """The text of a sample; ``None`` where the template refuses it."""
    values = {"messages": messages, "tools": tools, "documents": None, **dict.fromkeys(TOKENS, "")}
    try:
        return rendered(template, Path("sample"), {**values, "add_generation_prompt": False})
    except DataError:
        return None


def _joins_arguments(template: str) -> bool:
    if _shows(template, _called({"zqxkey": ONE}), ONE, without="{'zqxkey'"):
        return False
    text = json.dumps({"zqxkey": ONE})
    return _shows(template, _called(text), text)


def _texts_of_calls(template: str, *, joins: bool) -> dict[str, str | None]:
    """A sample's text with each content of an answer beside its call; ``None`` where the template refuses it or leaves the call out."""
    arguments = {"zqxkey": ONE}
    question, call = _called(json.dumps(arguments) if joins else arguments)
    result = {"role": "tool", "content": "a", "tool_call_id": CALL, "name": "zqxcall"}
    function = {"name": "zqxother", "description": "a", "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    texts: dict[str, str | None] = dict.fromkeys(CONTENTS)
    for behind in ([], [result, {"role": ANSWERS, "content": "a"}]):
        for tools in (None, [{"type": "function", "function": function}]):
            for name, content in CONTENTS.items():
                text = _text(template, [question, {**call, **content}, *behind], tools)
                shown = text is not None and "zqxcall" in text and ONE in text
                texts[name] = text if shown else None
            if any(texts[name] is not None for name in (ABSENT, NONE, EMPTY)):
                return texts
    return texts


def _absent(texts: Mapping[str, str | None]) -> tuple[Mapping[str, Any], bool]:
    """The content of an answer without one, and whether an empty one is such too, by a sample's texts.

    One that is none where the template was written for it: where it alone shows the call, or is treated in a way of its
    own and a field that is not there as any text.
    """
    absent, none, empty, said = (texts[name] for name in (ABSENT, NONE, EMPTY, SAID))
    like_text = None if said is None else said.replace(OTHER, "")
    # A content that is none and written as such is one that the template does not know.
    if none is not None and none.count("None") > (absent or empty or "").count("None"):
        none = None
    if none is not None and absent is not None and none.count("null") > absent.count("null"):
        none = None
    asks = none is not None and none != absent and (absent is None or none != like_text)
    if asks:
        return CONTENTS[NONE], none != empty
    if absent is not None:
        return {}, empty is None or (none is not None and none != empty)
    return (CONTENTS[EMPTY], False) if empty is not None else ({}, False)
