"""Chat templates of published tokenizers: messages to the text that the model was trained on.

The template is a program of whoever made the model: it runs in Jinja's sandbox, with the functions that
transformers gives it (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from systolic.core.errors import DataError, NotFoundError
from systolic.data.text.tokenizer import CONFIG, Tokenizer, read_fields, token_config, token_text

TEMPLATE = "chat_template.jinja"
"""File of a template, which goes before the one in tokenizer_config.json."""
BOS, EOS = "bos_token", "eos_token"
TOKENS = (
    BOS,
    EOS,
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that a template may name."""
KEPT = "chat_tokens.json"
"""File of a run with the special tokens of its chat template, which go before those of tokenizer_config.json."""
DEFAULT = "default"
"""Name of the template to use where there are several."""

ANSWERS = "assistant"
"""Role whose turns are the model's."""
DATE = date(2024, 7, 26)
"""What ``strftime_now`` says in training, so that a run that resumes another day reads the same text; templates of Llama 3 have this default."""
OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Marks around a template's ``generation`` blocks while it is rendered, of Unicode's private use."""
PLAIN = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "### Response:\n{% generation %}{{ message.content }}{{ eos_token or '' }}{% endgeneration %}{{ '\n\n' }}"
    "{% else %}### {{ 'System' if message.role == 'system' else 'Instruction' }}:\n{{ message.content }}{{ '\n\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
"""Template for a model without one."""

Messages = Sequence[Mapping[str, Any]]
"""``role`` and ``content`` of each message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [start, stop) of each answer, with what the template puts behind it."""
    missing: int = 0
    """Answers that the template changes where later turns follow, so that they can't be told from the rest."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Raises (from :meth:`render`):
        DataError: the template is damaged, or refuses the messages.
    """

    text: str
    """The template, Jinja."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Special tokens by the names that the template has for them."""
    origin: Path
    """Its file, for messages."""

    @property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(self.text))

    def render(
        self,
        messages: Messages,
        *,
        answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation, special tokens included.

        Args:
            messages: From the first to the last.
            answer: Whether the text ends where the model's next answer begins.
            tools: Descriptions of functions that the model may call, for a template that takes them.
            names: What else the template may ask for, such as ``enable_thinking``.
        """
        given = {**names, "tools": list(tools)} if tools else dict(names)
        return _unmarked(self._marked(messages, answer=answer, **given))[0]

    def conversation(self, messages: Messages) -> Rendered:
        """A whole conversation for training, and where its answers are: the template's generation blocks, else what each answer adds to the text before it.

        Raises:
            DataError: also where no answer can be told from the rest.
        """
        marked = self._marked(messages, answer=False, strftime_now=DATE.strftime)
        text, spans = _unmarked(marked)
        if OPEN in marked:
            return Rendered(text=text, answers=tuple(spans))
        found, missing = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            upto, behind = messages[:number], messages[: number + 1]
            before = self._marked(upto, answer=True, strftime_now=DATE.strftime) if number else ""
            after = self._marked(behind, answer=False, strftime_now=DATE.strftime)
            if after.startswith(before) and text.startswith(after):
                found.append((len(before), len(after)))
            else:
                missing += 1
        if missing and not found:
            raise DataError(
                f"the chat template of {self.origin} does not put answers behind the turns before them, so that the loss can't be on the answers alone; mark them in it with generation blocks, or give another with --template"
            )
        return Rendered(text=text, answers=tuple(found), missing=missing)

    def _marked(self, messages: Messages, *, answer: bool, **names: Any) -> str:
        """The text with marks around generation blocks; ``names`` go before the template's functions."""
        try:
            # transformers defines tools and documents for every template, which may ask whether they are none.
            return _compiled(self.text).render(
                {"messages": messages, "tools": None, "documents": None},
                add_generation_prompt=answer,
                **{**dict(self.tokens), **names},
            )
        except jinja2.TemplateError as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"the chat template of {self.origin} fails ({reason}); write the messages as it wants them"
            ) from error


def find_template(folder: Path) -> ChatTemplate | None:
    """The chat template beside a tokenizer.json; ``None`` if there is none.

    Raises:
        DataError: tokenizer_config.json is no JSON.
    """
    config = token_config(folder)
    found, origin = config.get("chat_template"), folder / CONFIG
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
        found = named.get(DEFAULT)
    if (folder / TEMPLATE).is_file():
        found, origin = (folder / TEMPLATE).read_text(), folder / TEMPLATE
    if not isinstance(found, str):
        return None
    return ChatTemplate(text=found, tokens=special_tokens(folder), origin=origin)


def template_for(folder: Path | None, file: Path | None) -> ChatTemplate:
    """The chat template to train with: of a file, else the one beside a tokenizer.json, else :data:`PLAIN`; with the tokenizer's special tokens.

    Args:
        folder: The tokenizer's folder; None where there is none.
        file: A template.

    Raises:
        NotFoundError: the file can't be read.
        DataError: the template does not parse, or tokenizer_config.json is no JSON.
    """
    known = None if folder is None else find_template(folder)
    if file is not None:
        try:
            text, origin = file.read_text(), file
        except OSError as error:
            raise NotFoundError(
                f"{file} can't be read ({error.strerror}); check --template"
            ) from error
    elif known is not None:
        text, origin = known.text, known.origin
    else:
        text, origin = PLAIN, Path("plain")
    try:
        _compiled(text)
    except jinja2.TemplateError as error:
        raise DataError(
            f"the chat template of {origin} is not valid ({error}); fix it, or give another with --template"
        ) from error
    tokens = () if folder is None else special_tokens(folder)
    return ChatTemplate(text=text, tokens=tokens, origin=origin)


def special_tokens(folder: Path) -> tuple[tuple[str, str], ...]:
    """Special tokens beside a tokenizer.json, by the names that templates have for them; of a run those that it was trained with."""
    if kept := read_fields(folder / KEPT):
        return tuple((name, kept[name]) for name in TOKENS if name in kept)
    config = token_config(folder)
    tokens = {name: token_text(config.get(name)) for name in TOKENS}
    unsaid = [name for name in (BOS, EOS) if name not in config]
    if unsaid and (folder / "tokenizer.json").is_file():
        # Those that the tokenizer is used with, which are known by their names.
        tokenizer = Tokenizer(path=folder)
        ids = {BOS: tokenizer.start, EOS: tokenizer.end}
        tokens |= {name: tokenizer.token(one) for name in unsaid if (one := ids[name]) is not None}
    return tuple((name, text) for name, text in tokens.items() if text is not None)


class _Answers(Extension):
    """``{% generation %}``, which marks the model's own words."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = self.call_method("marked")
        return jinja2.nodes.CallBlock(marked, [], [], body).set_lineno(line)

    def marked(self, caller: Any) -> str:
        """What is in the block, between marks."""
        return OPEN + caller() + CLOSE


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks, and the characters that they enclosed."""
    first, *parts = text.split(OPEN)
    out, spans = first, []
    for part in parts:
        inside, _, rest = part.partition(CLOSE)
        if inside:
            spans.append((len(out), len(out) + len(inside)))
        out += inside + rest
    return out, spans


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
    )


@lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    environment = _environment()
    environment.filters["tojson"] = _to_json
    functions = {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(text, globals=functions)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
