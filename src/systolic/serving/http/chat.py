"""``POST /v1/chat/completions``: messages written as the model's template takes them, answers to them, and calls of tools in these, told by the marks of the template.

Grammars of llguidance make the arguments of every call follow their schema.
"""

import json
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from systolic.core.errors import OptionError, SystolicError
from systolic.data.text.messages import REASONING, arguments_of, takes_of
from systolic.inference.grammar import (
    ARGUMENTS,
    Matcher,
    Rule,
    call_rules,
    json_rule,
    thought_rules,
    vocabulary_of,
)
from systolic.serving.http.protocol import (
    Count,
    ProblemError,
    TextFields,
    Top,
    bad,
    encode,
    read,
    refuse,
    room,
)
from systolic.serving.http.responses import (
    DONE,
    attended,
    event,
    grammar_of,
    merged,
    off_loop,
    streamed,
    submit,
    token_ids,
    whole,
)
from systolic.serving.http.state import RequestContext, ServerState, new_id, usage
from systolic.serving.registry import ServedText
from systolic.serving.text.request import AnswerStream, Finish, Logprob, TextOutput, TextRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks of Hermes, Qwen and SmolLM3 around {"name": ..., "arguments": {...}}."""
THOUGHT, THOUGHT_END = "<think>", "</think>"
"""Marks around what a model thinks before it answers."""
_FIELDS = frozenset(("name", "arguments", "parameters", "type", "id"))
"""Fields of a call without marks."""
_CALL = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*" + re.escape(CLOSE), re.DOTALL)
NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function without parameters."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API; others are taken where the template names them."""
OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Names of a template that the request itself gives."""


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
            objects = _objects(rest)
            calls, cut = [self._bare_call(text) for text in objects], ""
            if len(calls) > 1 and calls[-1] is None:
                calls, cut = calls[:-1], objects[-1]
            if calls and all(calls):
                return cut, [call for call in calls if call is not None]
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


class ThoughtReader:
    """Splits what a model thinks from its answer after it, as the text comes.

    Args:
        begun: Whether the prompt has begun the thought; else the text may do it, or be an answer alone.
    """

    def __init__(self, *, begun: bool) -> None:
        self._begun, self._ended, self._held = begun, False, ""
        self._blank = True
        """Whether the answer has no text yet."""

    def push(self, text: str) -> tuple[str, str]:
        """Parts of the thought and of the answer that are certain now."""
        self._held += text
        if not self._begun and not self._ended:
            if len(self._held) < len(THOUGHT) and THOUGHT.startswith(self._held):
                return "", ""
            self._begun = self._held.startswith(THOUGHT)
            self._ended = not self._begun
            self._held = self._held.removeprefix(THOUGHT)
        if self._ended:
            return "", self._answer()
        end = self._held.find(THOUGHT_END)
        certain = end if end >= 0 else len(self._held) - _overlap(self._held, THOUGHT_END)
        thought, self._held = self._held[:certain], self._held[certain:]
        if end < 0:
            return thought, ""
        self._ended, self._held = True, self._held.removeprefix(THOUGHT_END)
        return thought, self._answer()

    def flush(self) -> tuple[str, str]:
        """The rest, when the text has ended."""
        rest, self._held = self._held, ""
        return (rest, "") if self._begun and not self._ended else ("", rest)

    def _answer(self) -> str:
        answer = self._held.lstrip() if self._blank else self._held
        self._blank, self._held = self._blank and not answer, ""
        return answer


def _objects(text: str) -> list[str]:
    """JSON objects of an answer: one, a list of them, or several after each other."""
    objects, rest = [], text.strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [*objects, rest]
        parts = value if isinstance(value, list) else [value]
        objects += [json.dumps(part, ensure_ascii=False) for part in parts]
        rest = rest[end:].lstrip("; \n\r\t")
    return objects


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
    alone = calls or message.get("function_call") or any(message.get(field) for field in REASONING)
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
    answer: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
    names: Mapping[str, Any] | None = None,
) -> str:
    """The text of a chat, by default up to where the model answers.

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
            messages, answer=answer, tools=tools, documents=documents, names=names or {}
        )
    except SystolicError as error:
        raise bad(str(error), "messages") from error


class ChatFields(TextFields, kw_only=True):
    """A request of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """More names for the template, as vLLM has them, such as ``enable_thinking``."""
    documents: list[dict[str, Any]] | None = None
    """Texts to answer from, for a template that takes them."""
    # Known and not carried out.
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def most(self) -> int | None:
        """Most new tokens."""
        most = self.max_completion_tokens
        return self.max_tokens if most is None else most

    def used_tools(self, served: ServedText) -> list[dict[str, Any]]:
        """The tools that the model is told of.

        Raises:
            ProblemError: its template takes none, or one is no function.
        """
        if not self.tools or self.tool_choice == "none":
            return []
        if served.template is not None and not served.template.takes_tools:
            raise bad(f"the chat template of {served.name} takes no tools; leave them out", "tools")
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if (
                tool.get("type") != "function"
                or not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
            ):
                raise bad(
                    f"tools[{number}] is no function with a name; send {{type: function, function: {{name, ...}}}}",
                    f"tools[{number}]",
                )
        return self.tools

    def forced(self, tools: list[dict[str, Any]], *, marked: bool) -> ForcedCall | None:
        """How the answer has to begin, where ``tool_choice`` demands a call.

        Raises:
            ProblemError: it is of another form, or names no tool.
        """
        wanted = self.tool_choice
        if wanted in (None, "auto", "none"):
            return None
        names = [tool["function"]["name"] for tool in tools]
        if wanted == "required" and names:
            return ForcedCall.of(names[0] if len(names) == 1 else None, marked=marked)
        function = wanted.get("function") if isinstance(wanted, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name in names:
            return ForcedCall.of(name, marked=marked)
        fault = "needs tools" if wanted == "required" else f"is {str(wanted)[:60]!r}"
        raise bad(
            f"tool_choice {fault}; it takes auto, none, required or {{type: function, function: {{name}}}} of one of the tools",
            "tool_choice",
        )


async def chat_completions(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    fields = await read(request, ChatFields)
    fields.check()
    served, context = state.text(request, fields.model), RequestContext.of(request)
    requests, forced, begun = await chat_requests(fields, served, context, state)
    context.answer("chatcmpl")
    writers = [
        ChatWriter(fields, served, context, n, forced, len(text.tokens), begun)
        for n, text in enumerate(requests)
    ]
    streams = submit(served.engine, requests, context)
    if fields.stream:
        return await streamed(request, _events(fields, context, streams, writers))
    outputs = await attended(request, whole(streams, context))
    choices = [writer.choice(output) for writer, output in zip(writers, outputs, strict=True)]
    context.finish = ",".join(sorted({str(choice["finish_reason"]) for choice in choices}))
    usage = context.count(outputs, len(outputs))
    answer = context.body("chat.completion", choices, usage=usage)
    return Response(encode(answer), media_type="application/json")


async def chat_requests(
    fields: ChatFields, served: ServedText, context: RequestContext, state: ServerState
) -> tuple[list[TextRequest], ForcedCall | None, bool | None]:
    """The engine's requests, one for each choice, how their answers have to begin, and whether a thought before them has begun: None where there is none."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad("top_logprobs goes with logprobs: true", "top_logprobs")
    if fields.modalities not in (None, ["text"]):
        raise bad("modalities other than text are not supported; leave them out", "modalities")
    if (fields.n or 1) > state.limits.prompts:
        raise bad(
            f"n is {fields.n}; at most {state.limits.prompts} answers are written at once", "n"
        )
    tools = fields.used_tools(served)
    messages = checked_messages(fields.messages, served)
    if fields.add_generation_prompt is False:
        refuse("add_generation_prompt", False)
    names = fields.chat_template_kwargs or {}
    documents = fields.documents or ()
    text = await off_loop(
        size_of(messages),
        lambda: rendered(served, messages, tools=tools, documents=documents, names=names),
    )
    marked = _marks(served, tools)
    forced = fields.forced(tools, marked=marked)
    begun = None if forced is not None or fields.rule() is None else _thought(served, text)
    text += "" if forced is None else forced.begin
    one_call = forced is not None and forced.name is not None
    one_call |= bool(tools) and fields.parallel_tool_calls is False
    if state.log_prompts:
        context.prompt = text
    tokens = await token_ids(served.tokenizer, text, special=False)
    field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    tokens = fields.truncated(tokens, fields.most, served.engine.context)
    most = room(len(tokens), fields.most, served.engine.context, "messages", field)
    grammar = await _grammar(
        fields, served, tools, marked=marked, several=not one_call, forced=forced, begun=begun
    )
    requests = [
        fields.text_request(
            tokens,
            number=number,
            vocab_size=served.tokenizer.vocab_size,
            max_tokens=most,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            deadline_seconds=context.deadline_seconds,
            grammar=grammar,
        )
        for number in range(fields.n or 1)
    ]
    if one_call and marked:
        requests = [replace(request, stop=[*request.stop, CLOSE]) for request in requests]
    return requests, forced, begun


async def _grammar(
    fields: ChatFields,
    served: ServedText,
    tools: Sequence[Mapping[str, Any]],
    *,
    marked: bool,
    several: bool,
    forced: ForcedCall | None,
    begun: bool | None,
) -> Matcher | None:
    """Grammar of the answer: calls, the form that the request asks for, or either; None where it is free.

    Raises:
        ProblemError: it cannot be followed.
    """
    ruled = None if forced is not None else fields.rule()
    if ruled is None and not tools:
        return None
    lines, rules = _calls(tools, marked=marked, several=several, forced=forced)
    param = "tools"
    if ruled is None:
        start = "start: free" if forced is None else "start: calls"
    else:
        param, rules["answer"] = ruled
        if tools and not marked:
            raise bad(
                f"{param} goes with tools only where the chat template marks calls, and that of {served.name} does not; leave one out",
                param,
            )
        start = "start: thought calls | thought @answer" if tools else "start: thought @answer"
        lines += thought_rules(THOUGHT, THOUGHT_END, begun=begun)
    try:
        return await grammar_of(served.engine, "\n".join((start, *lines)), rules, param)
    except ProblemError:
        for name, rule in rules.items():  # Tells whose fault it is.
            where = f"tools[{name.removeprefix(ARGUMENTS)}].function.parameters"
            where = param if name == "answer" else where
            await grammar_of(served.engine, "start: @answer", {"answer": rule}, where)
        raise


def _calls(
    tools: Sequence[Mapping[str, Any]], *, marked: bool, several: bool, forced: ForcedCall | None
) -> tuple[list[str], dict[str, Rule]]:
    """Rules of :func:`systolic.inference.grammar.call_rules`, and of the arguments that they name.

    Raises:
        ProblemError: a tool's parameters are no schema.
    """
    rules: dict[str, Rule] = {}
    if not tools:
        return [], rules
    field, heads = "arguments" if marked else "parameters", []
    for number, tool in enumerate(tools):
        function, where = tool["function"], f"tools[{number}].function.parameters"
        heads.append(f'{{"name": "{function["name"]}", "{field}": ')
        schema, lenient = function.get("parameters"), function.get("strict") is False
        try:
            rules[f"{ARGUMENTS}{number}"] = json_rule(schema or NOTHING, lenient=lenient)
        except OptionError as error:
            raise bad(f"{where}: {error}", where) from error
    begin, marks = "" if forced is None else forced.begin, (OPEN, CLOSE) if marked else None
    return call_rules(heads, marks=marks, several=several, begin=begin), rules


def _thought(served: ServedText, prompt: str) -> bool | None:
    """Whether a prompt has begun a thought before the answer; None where there is none, or its marks would be left out of the text."""
    words = vocabulary_of(served.tokenizer)
    marks = [served.tokenizer.find(mark) for mark in (THOUGHT, THOUGHT_END)]
    ids = [index for index in marks if index is not None]
    text = "" if served.template is None else served.template.text
    if THOUGHT_END not in text or not all(words.contents(ids)):
        return None
    end = prompt.rstrip()
    return None if end.endswith(THOUGHT_END) else end.endswith(THOUGHT)


def _marks(served: ServedText, tools: list[dict[str, Any]]) -> bool:
    """Whether the model's template marks calls of tools."""
    return served.template is not None and OPEN in served.template.chosen(tools=bool(tools))


async def _events(
    fields: ChatFields,
    context: RequestContext,
    streams: Sequence[AnswerStream],
    writers: "Sequence[ChatWriter]",
) -> AsyncIterator[bytes]:
    last: dict[int, TextOutput] = {}
    async with aclosing(merged(streams, context)) as outputs:
        async for number, output in outputs:
            written = writers[number].events(output)
            if output.finish is not None:
                last[number] = output
            if written:
                yield written
    ended = [last[number] for number in sorted(last)]
    context.finish = ",".join(sorted({output.finish.value for output in ended if output.finish}))
    usage = context.count(ended, len(streams))
    if fields.counts_usage:
        yield event(context.body("chat.completion.chunk", [], usage=usage))
    yield DONE


class ChatWriter:
    """Writes one choice as JSON, whole or in events.

    Args:
        fields: Body of the request.
        served: The model.
        context: Of the request.
        number: Which choice.
        forced: How its answer begins.
        prompt_tokens: Of its prompt.
        begun: Whether the prompt begins a thought before it; None where there is none.
    """

    def __init__(
        self,
        fields: ChatFields,
        served: ServedText,
        context: RequestContext,
        number: int,
        forced: ForcedCall | None,
        prompt_tokens: int,
        begun: bool | None,
    ) -> None:
        self._prompt_tokens, self._written = prompt_tokens, 0
        self._fields, self._served, self._context, self._index = fields, served, context, number
        tools = fields.used_tools(served)
        self._thoughts = None if begun is None else ThoughtReader(begun=begun)
        self._reader: CallReader | None = None
        if tools and served.template is not None:
            self._reader = CallReader(
                marked=_marks(served, tools),
                names=[tool["function"]["name"] for tool in tools],
                forced=forced,
            )
        self._begun = False
        self._calls = 0
        self._ids: list[int] = []
        """Tokens without an event so far."""
        self._likely: list[Logprob] = []
        """Their log-probabilities."""

    def choice(self, output: TextOutput) -> dict[str, Any]:
        """The whole choice."""
        thought, said, calls = self.split(output, last=True)
        reason = "stop" if output.finish is None else output.finish.value
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["content"] = said.strip() or None
            message["tool_calls"] = [call.body(short=self.short_ids) for call in calls]
            reason = "tool_calls" if reason == "stop" else reason
        logprobs = None
        if self._fields.logprobs:
            logprobs = self.logprobs(output.token_ids, output.logprobs)
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def events(self, output: TextOutput) -> bytes:
        """Events of the next output; the last one with the reason of the end."""
        written, finish = b"", output.finish
        if not self._begun:
            self._begun = True
            written += self._event({"role": "assistant", "content": ""})
        self._written += len(output.token_ids)
        thought, said, calls = self.split(output, last=finish is not None)
        if thought:
            written += self._event({"reasoning_content": thought})
        if self._fields.logprobs:
            self._ids += output.token_ids
            self._likely += output.logprobs
        if said or self._ids:
            written += self._event({"content": said}, logprobs=True)
        for call in calls:
            body = call.body(self._calls, short=self.short_ids)
            written += self._event({"tool_calls": [body]})
            self._calls += 1
        if finish is not None:
            called = self._calls and finish is Finish.stop
            written += self._event({}, finish="tool_calls" if called else finish.value)
        return written

    def split(self, output: TextOutput, *, last: bool) -> tuple[str, str, list[ToolCall]]:
        """Thought, text and calls that are certain now."""
        thought, said = "", output.text
        calls: list[ToolCall] = []
        if self._thoughts is not None:
            thought, said = self._thoughts.push(said)
            if last:
                rest, late = self._thoughts.flush()
                thought, said = thought + rest, said + late
        if self._reader is not None:
            said, calls = self._reader.push(said)
            if last:
                end, more = self._reader.flush()
                said, calls = said + end, [*calls, *more]
        return thought, said, calls

    def _event(
        self, delta: dict[str, Any], *, finish: str | None = None, logprobs: bool = False
    ) -> bytes:
        written = None
        if logprobs and self._fields.logprobs:
            written = self.logprobs(self._ids, self._likely)
            self._ids, self._likely = [], []
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": written,
            "finish_reason": finish,
        }
        counted = self._fields.counts_events
        more = {"usage": usage(self._prompt_tokens, self._written)} if counted else {}
        return event(self._context.body("chat.completion.chunk", [choice], **more))

    @property
    def short_ids(self) -> bool:
        """Whether the template takes back ids of calls of nine characters alone."""
        template = self._served.template
        return template is not None and takes_of(template.chosen(tools=True)).short_ids

    def logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """``logprobs`` of some tokens."""
        words = vocabulary_of(self._served.tokenizer)
        write = self._fields.written(words)

        def written(index: int, value: float | None) -> dict[str, Any]:
            return {"token": write(index), "logprob": value, "bytes": words.raw(index)}

        content = []
        for index, (value, top) in zip(ids, logprobs, strict=True):
            tops = [written(*likely) for likely in top]
            content.append({**written(index, value), "top_logprobs": tops})
        return {"content": content, "refusal": None}
