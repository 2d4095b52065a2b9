"""Calls of tools in a model's text, told from the rest by the marks of its chat template."""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.serving.http.state import new_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks of Hermes, Qwen and SmolLM3 around {"name": ..., "arguments": {...}}."""
_FIELDS = frozenset(("name", "arguments", "parameters", "type", "id"))
"""Fields of a call without marks."""
_CALL = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*" + re.escape(CLOSE), re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON."""

    def body(self, index: int | None = None, *, short: bool = False) -> dict[str, Any]:
        """The call as clients read it, and send it back.

        Args:
            index: Counts the calls of a stream.
            short: Whether the template takes ids of nine letters and digits alone.
        """
        call: dict[str, Any] = {
            "id": secrets.token_hex(5)[:9] if short else new_id("call"),
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True, kw_only=True)
class ForcedCall:
    """The begin of an answer that has to be a call."""

    begin: str
    name: str | None = None
    """Name of the function, if the client named it or there is only one."""

    @classmethod
    def of(cls, name: str | None, *, marked: bool) -> "ForcedCall":
        """The begin of a call of a function, or of any."""
        field = "arguments" if marked else "parameters"
        rest = "" if name is None else f'{name}", "{field}": '
        mark = f"{OPEN}\n" if marked else ""
        return cls(begin=f'{mark}{{"name": "{rest}', name=name)


class CallReader:
    """Splits a text into what is said and what is called, as it comes.

    Holds back what can be the start of a mark, and a call until it is whole. What only looks like a call is text.

    Args:
        forced: How a call begins that the answer has to begin with, and that the model was given.
        marked: Whether the template marks calls. One that does not (Llama 3) makes the whole text one JSON object or several
            lines of them, with ``parameters`` or ``arguments``; such a text is held back while it can be that.
        names: Of the tools.
    """

    def __init__(
        self, *, marked: bool, names: Collection[str], forced: "ForcedCall | None" = None
    ) -> None:
        self._marked, self._names, self._forced = marked, names, forced
        self._held = "" if forced is None else forced.begin
        self._plain = False
        """Whether an unmarked text was told to be no call."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Text and calls that are certain now."""
        self._held += text
        if not self._marked:
            return self._bare()
        said, calls = "", []
        while (start := self._held.find(OPEN)) >= 0:
            match = _CALL.match(self._held, start)
            if match is None:
                break
            call = _read(match[1])
            said += self._held[:start] if call is not None else self._held[: match.end()]
            calls += [] if call is None else [call]
            self._held = self._held[match.end() :]
        start = self._held.find(OPEN)
        keep = len(self._held) - start if start >= 0 else _overlap(self._held, OPEN)
        certain = len(self._held) - keep
        said, self._held = said + self._held[:certain], self._held[certain:]
        return said, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The rest, when the text has ended."""
        rest, self._held = self._held, ""
        forced = self._forced
        if forced is not None and forced.name and rest.startswith(forced.begin):
            return "", [ToolCall(name=forced.name, arguments=_first(rest[len(forced.begin) :]))]
        if self._marked and rest.lstrip().startswith(OPEN):
            # The model ended without the mark, or was ended at it.
            call = _read(_first(rest.lstrip().removeprefix(OPEN).lstrip()))
            return (rest, []) if call is None else ("", [call])
        if not self._marked and not self._plain:
            calls = [self._bare_call(line) for line in _objects(rest)]
            if calls and all(calls):
                return "", [call for call in calls if call is not None]
        return rest, []

    def _bare_call(self, text: str) -> ToolCall | None:
        """A call without marks: JSON with other fields, or with the name of no tool, is an answer."""
        call = _read(text)
        if call is None or call.name not in self._names or not _FIELDS.issuperset(json.loads(text)):
            return None
        return call

    def _bare(self) -> tuple[str, list[ToolCall]]:
        start = self._held.lstrip()
        if not self._plain and start and start[0] not in "{[":
            self._plain = True
        if self._plain:
            said, self._held = self._held, ""
            return said, []
        return "", []


def _objects(text: str) -> Sequence[str]:
    stripped = text.strip()
    try:
        calls = json.loads(stripped)
    except ValueError:
        return [line for line in re.split(r"[;\n]\s*(?=\{)", stripped) if line]
    return [json.dumps(call) for call in calls] if isinstance(calls, list) else [stripped]


def _read(text: str) -> ToolCall | None:
    """A call from its JSON; None where it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=call["name"], arguments=arguments)


def _first(text: str) -> str:
    """The JSON value that a text begins with; all of it where it was cut off within the value."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that starts a mark."""
    return next(
        (
            size
            for size in range(min(len(text), len(mark) - 1), 0, -1)
            if mark.startswith(text[-size:])
        ),
        0,
    )
