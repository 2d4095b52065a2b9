"""Chat templates of published tokenizers: messages to the text that the model was trained on.

The template is a program of whoever made the model: it runs in Jinja's sandbox, with the functions that
transformers gives it (https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from systolic.core.errors import DataError
from systolic.data.text.tokenizer import CONFIG

TEMPLATE = "chat_template.jinja"
"""File of a template, which goes before the one in tokenizer_config.json."""
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
DEFAULT = "default"
"""Name of the template to use where there are several."""

Messages = Sequence[Mapping[str, Any]]
"""``role`` and ``content`` of each message."""


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

    def render(self, messages: Messages, *, answer: bool) -> str:
        """The text of a conversation, special tokens included.

        Args:
            messages: From the first to the last.
            answer: Whether the text ends where the model's next answer begins.
        """
        try:
            return _compiled(self.text).render(
                messages=messages, add_generation_prompt=answer, **dict(self.tokens)
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
    config = _config(folder / CONFIG)
    found, origin = config.get("chat_template"), folder / CONFIG
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
        found = named.get(DEFAULT)
    if (folder / TEMPLATE).is_file():
        found, origin = (folder / TEMPLATE).read_text(), folder / TEMPLATE
    if not isinstance(found, str):
        return None
    tokens = {name: _content(config.get(name)) for name in TOKENS}
    known = tuple((name, text) for name, text in tokens.items() if text is not None)
    return ChatTemplate(text=found, tokens=known, origin=origin)


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}); copy it again") from error
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


class _Answers(Extension):
    """``{% generation %}``, which marks the model's own words: here what is in it, and no more."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
    )
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
