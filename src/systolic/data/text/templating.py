"""The environment that chat templates are programs of: what transformers gives them, in Jinja's sandbox.

A template is written for the environment of transformers (https://huggingface.co/docs/transformers/chat_templating_writing):
the same white space rules, tags, filters and functions, with the same signatures. What fails in a template is one line
that names the line of the template.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from systolic.core.errors import DataError

OPEN, CLOSE = "\ue0f0", "\ue0f1"
"""Marks around a template's ``generation`` blocks while it is rendered, of Unicode's private use."""
REASON = 300
"""Characters of a template's own message that are shown."""


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
