"""``POST /v1/responses``: OpenAI's Responses API for texts and calls of functions, over the answers of chats."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.chat import ChatFields, ChatWriter, ToolCall, chat_requests
from systolic.serving.http.protocol import (
    Count,
    ProblemError,
    Top,
    Truncation,
    Whole,
    bad,
    encode,
    read,
    refuse,
)
from systolic.serving.http.responses import attended, merged, streamed, submit, whole
from systolic.serving.http.state import RequestContext, ServerState, new_id
from systolic.serving.text.request import AnswerStream, Finish, TextOutput

LOGPROBS = "message.output_text.logprobs"
"""Value of ``include`` that asks for log-probabilities."""
PARTS = ("input_text", "output_text", "text")
"""Types of parts of a content that are texts."""
NOT_KEPT = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need answers, or templates of prompts, to be kept on the server."""
UNSUPPORTED_RESPONSES = (*NOT_KEPT, "reasoning", "max_tool_calls", "context_management")
"""Fields of the Responses API that this server knows and does not carry out."""
_OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Names of a chat's fields in refusals, and those of this API."""
_NAMES = re.compile(rf"\b({'|'.join(_OF_CHATS)})\b")


class ResponseFields(Struct, kw_only=True):
    """A request of ``/v1/responses``."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: Top | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # As vLLM names them.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    min_tokens: Whole | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    # Known and not carried out.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    context_management: Any = None

    def check(self) -> None:
        """Refuses what is not carried out.

        Raises:
            ProblemError: the first such field.
        """
        for name in UNSUPPORTED_RESPONSES:
            value = getattr(self, name)
            if value and name in NOT_KEPT:
                raise bad(
                    f"{name} needs answers that are kept, and this server keeps none; send the whole conversation as input",
                    name,
                    "unsupported_parameter",
                )
            if value and any(value.values() if isinstance(value, dict) else [value]):
                refuse(name, value)
        for value in self.include or ():
            if value not in (LOGPROBS, "reasoning.encrypted_content"):
                raise bad(f"include has {value[:60]!r}; it takes {LOGPROBS}", "include")

    def chat(self) -> ChatFields:
        """The chat that has the same answer.

        Raises:
            ProblemError: an item or a tool is of a type that is not supported.
        """
        same = ("model", "temperature", "top_p", "stream", "top_k", "min_p", "seed", "stop")
        same += ("min_tokens", "priority", "user", "parallel_tool_calls")
        kept = -1 if self.truncation == "auto" else None
        scored = LOGPROBS in (self.include or ())
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        if self.truncate_prompt_tokens is not None:
            kept = self.truncate_prompt_tokens
        return ChatFields(
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            logprobs=scored or None,
            top_logprobs=self.top_logprobs if scored else None,
            tools=[_tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            tool_choice=self._choice(),
            response_format=self._format(),
            truncate_prompt_tokens=kept,
            **fields,
        )

    def _format(self) -> dict[str, Any] | None:
        """``text.format`` as chats have it."""
        form = (self.text or {}).get("format")
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            return form
        inner = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": inner}

    def _choice(self) -> Any:
        """``tool_choice`` as chats have it."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            return {"type": "function", "function": {"name": choice["name"]}}
        return choice

    def _messages(self) -> list[dict[str, Any]]:
        """The items as messages; calls belong to the answer before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            place, kind = f"input[{number}]", item.get("type", "message")
            if kind == "message":
                content = _content(item.get("content"), f"{place}.content")
                messages.append({"role": item.get("role"), "content": content})
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                call = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                calls = messages[-1].setdefault("tool_calls", [])
                calls.append({"id": item.get("call_id"), "type": "function", "function": call})
            elif kind == "function_call_output":
                content = _content(item.get("output"), f"{place}.output")
                messages.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                )
            else:
                raise bad(
                    f"{place} is of type {str(kind)[:40]!r}; it takes message, function_call and function_call_output",
                    place,
                )
        return messages


def _content(content: Any, place: str) -> Any:
    """Texts of an item's content as a message has them; what else it holds is left for the check of messages."""
    if not isinstance(content, list):
        return content
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            raise bad(
                f"{place}[{number}] is a part of type {str(kind)[:40]!r}; this model reads text only",
                f"{place}[{number}]",
            )
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chats have it."""
    kind = tool.get("type")
    if kind != "function":
        raise bad(
            f"tools[{number}] is of type {str(kind)[:40]!r}; only functions are supported",
            f"tools[{number}]",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if n in tool}}


async def responses(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as those of a chat, with the names of this API."""
    fields = await read(request, ResponseFields)
    fields.check()
    context = RequestContext.of(request)
    try:
        chat = fields.chat()
        chat.check()
        served = state.text(request, chat.model)
        (text,), forced, begun = await chat_requests(chat, served, context, state)
    except ProblemError as problem:
        raise _renamed(problem) from problem
    context.answer("resp")
    chat_writer = ChatWriter(chat, served, context, 0, forced, len(text.tokens), begun)
    writer = _ItemWriter(fields, context, chat_writer)
    streams = submit(served.engine, [text], context)
    if fields.stream:
        return await streamed(request, _events(writer, streams, context))
    outputs = await attended(request, whole(streams, context))
    writer.push(outputs[0])
    return Response(encode(writer.end(outputs[0])), media_type="application/json")


def _renamed(problem: ProblemError) -> ProblemError:
    """A chat's refusal with the names of this API."""

    def own(text: str) -> str:
        return _NAMES.sub(lambda match: _OF_CHATS[match[0]], text)

    param = None if problem.param is None else own(problem.param)
    return replace(problem, message=own(problem.message), param=param)


async def _events(
    writer: "_ItemWriter", streams: Sequence[AnswerStream], context: RequestContext
) -> AsyncIterator[bytes]:
    begun = writer.body("in_progress")
    yield writer.event("response.created", response=begun) + writer.event(
        "response.in_progress", response=begun
    )
    async with aclosing(merged(streams, context)) as outputs:
        async for _, output in outputs:
            if events := writer.push(output):
                yield events
            if output.finish is not None:
                body = writer.end(output)
                yield writer.event(f"response.{body['status']}", response=body)


class _ItemWriter:
    """Writes an answer as items, and the events that tell of them.

    Args:
        fields: Body of the request.
        context: Of the request.
        chat: Splits the text into what is said and what is called.
    """

    def __init__(self, fields: ResponseFields, context: RequestContext, chat: ChatWriter) -> None:
        self._fields, self._context, self._chat = fields, context, chat
        self._items: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None
        """The message that is being written, the last item."""
        self._scores: list[dict[str, Any]] = []
        """Log-probabilities of tokens whose text is not written yet."""
        self._number = 0
        """Number of the next event."""

    def event(self, kind: str, **more: Any) -> bytes:
        """The next event of a stream."""
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"

    def push(self, output: TextOutput) -> bytes:
        """Events of the next output."""
        last = output.finish is not None
        _, said, calls = self._chat.split(output, last=last)
        if LOGPROBS in (self._fields.include or ()):
            self._scores += self._chat.logprobs(output.token_ids, output.logprobs)["content"]
        if calls and not said.strip():
            said = ""
        empty = last and not calls and not self._items
        events = self._say(said) if said or empty else b""
        for call in calls:
            events += self._close("completed") + self._call(call)
        ended = "incomplete" if output.finish is Finish.length else "completed"
        return events + (self._close(ended) if last else b"")

    def end(self, output: TextOutput) -> dict[str, Any]:
        """The whole answer, after the last output was pushed."""
        used: Any = self._context.count([output], 1)
        status = "incomplete" if output.finish is Finish.length else "completed"
        self._context.finish = "stop" if output.finish is None else output.finish.value
        details = {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0}
        return self.body(
            status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage={
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": details,
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        )

    def body(self, status: str, **more: Any) -> dict[str, Any]:
        """The answer as far as it is written."""
        fields, context = self._fields, self._context
        body = {
            "id": context.answer_id,
            "object": "response",
            "created_at": context.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": context.model,
            "output": [dict(item) for item in self._items],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": fields.text or {"format": {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": fields.truncation or "disabled",
            "usage": None,
            "user": fields.user,
        }
        return {**body, **more}

    def _place(self, **more: Any) -> dict[str, Any]:
        """Place of an event in the answer."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}

    def _say(self, text: str) -> bytes:
        """Events of text, which begins a message where none is being written."""
        events = b""
        if self._message is None:
            self._message = {
                "id": new_id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            self._items.append(self._message)
            index = len(self._items) - 1
            events += self.event(
                "response.output_item.added", output_index=index, item=self._message
            )
            part: dict[str, Any] = {
                "type": "output_text",
                "text": "",
                "annotations": [],
                "logprobs": [],
            }
            self._message["content"] = [part]
            place = self._place(content_index=0)
            events += self.event("response.content_part.added", **place, part=part)
        (part,) = self._message["content"]
        scores, self._scores = self._scores, []
        part["text"] += text
        part["logprobs"] += scores
        if not text:
            return events
        place = self._place(content_index=0, delta=text, logprobs=scores)
        return events + self.event("response.output_text.delta", **place)

    def _close(self, status: str) -> bytes:
        """Events of the end of the message that is being written, if one is."""
        message, self._message = self._message, None
        if message is None:
            return b""
        message["status"] = status
        (part,) = message["content"]
        place = self._place(content_index=0)
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self.event("response.output_text.done", **place, **text)
            + self.event("response.content_part.done", **place, part=part)
            + self.event(
                "response.output_item.done", output_index=len(self._items) - 1, item=message
            )
        )

    def _call(self, call: ToolCall) -> bytes:
        """Events of a call, which are known at once."""
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.body(short=self._chat.short_ids)["id"],
            "name": call.name,
            "arguments": "",
        }
        self._items.append(item)
        index = len(self._items) - 1
        events = self.event("response.output_item.added", output_index=index, item=item)
        item["arguments"], item["status"] = call.arguments, "completed"
        kind, place = "response.function_call_arguments", self._place()
        events += self.event(f"{kind}.delta", **place, delta=call.arguments)
        events += self.event(f"{kind}.done", **place, arguments=call.arguments, name=call.name)
        return events + self.event("response.output_item.done", output_index=index, item=item)
