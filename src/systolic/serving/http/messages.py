"""Messages of a chat: checked, and written as the model's template takes them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from systolic.core.errors import SystolicError
from systolic.serving.http.problems import bad
from systolic.serving.served import ServedText

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role to what templates call it."""


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template: contents as text, arguments of calls as objects.

    Raises:
        ProblemError: a role, a content or a part of one is of a kind that is not taken.
    """
    if not messages:
        raise bad("messages is empty; send at least one", "messages")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(
            f"{where}.role is {str(role)[:40]!r}; it takes {', '.join(ROLES)}", f"{where}.role"
        )
    calls = message.get("tool_calls")
    content = message.get("content")
    found: dict[str, Any] = {"role": ROLES[role]}
    if content is None and not (role == "assistant" and calls):
        raise bad(f"{where}.content is missing; send a text", f"{where}.content")
    found["content"] = "" if content is None else _content(content, f"{where}.content")
    if calls:
        found["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            found[name] = message[name]
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} is no text; send a text or a list of parts", where)
    texts = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad(
                f"{place} is a part of type {str(kind)[:40]!r}; this model reads text only", place
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which templates write in their own way."""
    found = []
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(
                f"{where}[{number}] is no call; send {{type, function: {{name, arguments}}}}",
                f"{where}[{number}]",
            )
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise bad(
                    f"{where}[{number}].function.arguments is no JSON", f"{where}[{number}]"
                ) from error
        found.append(
            {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return found


def rendered(
    served: ServedText,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    names: Mapping[str, Any],
) -> str:
    """The text of a chat up to where the model answers.

    Raises:
        ProblemError: the model knows no chat, or its template refuses the messages.
    """
    if served.template is None:
        raise bad(f"{served.name} has no chat template; ask /v1/completions", "model")
    for own in ("messages", "tools", "documents", "add_generation_prompt"):
        if own in names:
            raise bad(
                f"chat_template_kwargs has {own}, which the request itself says; leave it out",
                "chat_template_kwargs",
            )
    try:
        return served.template.render(messages, answer=True, tools=tools, names=names)
    except SystolicError as error:
        raise bad(str(error), "messages") from error
    except Exception as error:  # Templates are programs of others, run on anyone's messages.
        raise bad(
            f"the chat template fails on these messages ({type(error).__name__})", "messages"
        ) from error
