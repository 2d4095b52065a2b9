"""Messages of a chat: checked, and written as the model's template takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from systolic.core.errors import SystolicError
from systolic.data.text.messages import REASONING, arguments_of, takes_of
from systolic.serving.http.problems import bad
from systolic.serving.served import ServedText

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API; others are taken where the template names them."""
OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Names of a template that the request itself gives."""


def checked_messages(
    messages: Sequence[Mapping[str, Any]], served: ServedText | None = None
) -> Sequence[Mapping[str, Any]]:
    """Messages as they came, once each is of a form that a template can take.

    Raises:
        ProblemError: a role, a content or a part of one is of a kind that is not taken.
    """
    if not messages:
        raise bad("messages is empty; send at least one", "messages")
    template = None if served is None else served.template
    named = frozenset() if template is None else takes_of(template.text).constants
    for number, message in enumerate(messages):
        _check(message, f"messages[{number}]", named)
    return messages


def size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of the contents, at least."""
    return sum(len(str(message.get("content") or "")) for message in messages)


def _check(message: Mapping[str, Any], where: str, named: frozenset[str]) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or role in named):
        raise bad(
            f"{where}.role is {str(role)[:40]!r}; it takes {', '.join(ROLES)}", f"{where}.role"
        )
    calls, content = message.get("tool_calls"), message.get("content")
    alone = calls or message.get("function_call") or any(message.get(one) for one in REASONING)
    if content is None and not (role == "assistant" and alone):
        raise bad(f"{where}.content is missing; send a text", f"{where}.content")
    if content is not None:
        _check_content(content, f"{where}.content")
    if calls:
        _check_calls(calls, f"{where}.tool_calls")


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise bad(f"{where} is no text; send a text or a list of parts", where)
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad(
                f"{place} is a part of type {str(kind)[:40]!r}; this model reads text only", place
            )


def _check_calls(calls: Any, where: str) -> None:
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(
                f"{where}[{number}] is no call; send {{type, function: {{name, arguments}}}}",
                f"{where}[{number}]",
            )
        try:
            arguments_of(call)
        except ValueError as error:
            raise bad(
                f"{where}[{number}].function.arguments is no JSON", f"{where}[{number}]"
            ) from error


def rendered(
    served: ServedText,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
    names: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat up to where the model answers.

    Raises:
        ProblemError: the model knows no chat, or its template refuses the messages.
    """
    if served.template is None:
        raise bad(f"{served.name} has no chat template; ask /v1/completions", "model")
    for own in OWN:
        if names and own in names:
            raise bad(
                f"chat_template_kwargs has {own}, which the request itself says; leave it out",
                "chat_template_kwargs",
            )
    if documents and not served.template.takes_documents:
        raise bad(
            f"the chat template of {served.name} takes no documents; leave them out", "documents"
        )
    try:
        return served.template.render(
            messages, answer=True, tools=tools, documents=documents, names=names or {}
        )
    except SystolicError as error:
        raise bad(str(error), "messages") from error
