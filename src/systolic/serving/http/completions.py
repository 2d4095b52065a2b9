"""``POST /v1/completions``: texts that continue prompts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.grammar import vocabulary_of
from systolic.serving.http.protocol import TextFields, Top, bad, encode, read, room
from systolic.serving.http.responses import (
    DONE,
    attended,
    event,
    grammar_of,
    merged,
    opening_ids,
    streamed,
    submit,
    whole,
)
from systolic.serving.http.state import RequestContext, ServerState, usage
from systolic.serving.registry import ServedText
from systolic.serving.text.request import AnswerStream, Logprob, TextOutput, TextRequest

DEFAULT_TOKENS = 16
"""``max_tokens`` where none is given, as OpenAI has it."""
Ids = list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class CompletionFields(TextFields, kw_only=True):
    """A request of ``/v1/completions``."""

    prompt: str | list[str | int | Ids]
    echo: bool | None = None
    logprobs: Top | None = None
    suffix: str | None = None


async def completions(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    fields = await read(request, CompletionFields)
    fields.check()
    served, context = state.text(request, fields.model), RequestContext.of(request)
    requests = await _requests(fields, served, context, state)
    context.answer("cmpl")
    writers = [_ChoiceWriter(fields, served, n, requests[n].tokens) for n in range(len(requests))]
    streams = submit(served.engine, requests, context)
    if fields.stream:
        return await streamed(request, _events(fields, context, streams, writers))
    outputs = await attended(request, whole(streams, context))
    choices = [writer.all(output) for writer, output in zip(writers, outputs, strict=True)]
    context.finish = ",".join(sorted({str(choice["finish_reason"]) for choice in choices}))
    usage = context.count(outputs, fields.n or 1, only_prompts=fields.max_tokens == 0)
    answer = context.body("text_completion", choices, usage=usage)
    return Response(encode(answer), media_type="application/json")


async def continued(
    request: Request, state: ServerState, served: ServedText, fields: CompletionFields
) -> list[str]:
    """The texts that continue the prompts of a request of another protocol; errors as the parts that it calls."""
    fields.check()
    context = RequestContext.of(request)
    requests = await _requests(fields, served, context, state)
    streams = submit(served.engine, requests, context)
    outputs = await attended(request, whole(streams, context))
    context.count(outputs, fields.n or 1)
    context.finish = _finishes(outputs)
    return [output.text for output in outputs]


def _finishes(outputs: Sequence[TextOutput]) -> str:
    return ",".join(sorted({output.finish.value for output in outputs if output.finish}))


async def _requests(
    fields: CompletionFields, served: ServedText, context: RequestContext, state: ServerState
) -> list[TextRequest]:
    """The engine's requests, the choices of a prompt beside each other."""
    prompts = await _prompts(fields.prompt, served)
    count, most = len(prompts) * (fields.n or 1), state.limits.prompts
    if count > most:
        if len(prompts) > most:
            raise bad(
                f"prompt has {len(prompts)} texts; at most {most} are taken at once", "prompt"
            )
        raise bad(
            f"the request asks for {count} texts; at most {most} are written at once, ask for n {most // len(prompts)} or less",
            "n",
        )
    if state.log_prompts:
        context.prompt = str(fields.prompt)
    length = served.engine.context
    if fields.max_tokens == 0 and not fields.echo:
        raise bad(
            "max_tokens is 0, which goes with echo: true only; ask for 1 or more", "max_tokens"
        )
    ruled, grammar = fields.rule(), None
    if ruled is not None:
        param, rule = ruled
        grammar = await grammar_of(served.engine, "start: @answer", {"answer": rule}, param)
    scored = bool(fields.echo) and fields.logprobs is not None
    requests = []
    for tokens in prompts:
        # Without a number there are OpenAI's, or as many as are left.
        wanted = min(DEFAULT_TOKENS, max(length - len(tokens), 1))
        if fields.max_tokens is not None:
            wanted = max(fields.max_tokens, 1)
        tokens = fields.truncated(tokens, fields.max_tokens, length)
        new = room(len(tokens), wanted, length, "prompt", "max_tokens")
        for number in range(fields.n or 1):
            choice = fields.text_request(
                tokens,
                number=number,
                vocab_size=served.tokenizer.vocab_size,
                max_tokens=new,
                logprobs=fields.logprobs,
                deadline_seconds=context.deadline_seconds,
                grammar=grammar,
            )
            requests.append(replace(choice, prompt_logprobs=scored))
    return requests


async def _prompts(prompt: str | list[Any], served: ServedText) -> list[list[int]]:
    """Token ids of each prompt: a text, ids, or several of either."""
    alone = isinstance(prompt, str) or (prompt and all(isinstance(token, int) for token in prompt))
    several: list[Any] = [prompt] if alone else list(prompt)
    if not several:
        raise bad("prompt is empty; send a text or token ids", "prompt")
    tokens = []
    for part in several:
        if isinstance(part, str):
            tokens.append(await opening_ids(served.tokenizer, part))
        elif isinstance(part, list):
            tokens.append(checked_ids(part, served.tokenizer, "prompt"))
        else:
            raise bad("prompt mixes token ids and texts; send several lists of ids", "prompt")
    return tokens


def checked_ids(ids: Sequence[int], tokenizer: Tokenizer, param: str) -> list[int]:
    """Token ids of a request.

    Raises:
        ProblemError: one is no token of the model.
    """
    size = tokenizer.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise bad(f"{param} has the id {wrong}; the model's are 0 to {size - 1}", param)
    return list(ids)


async def _events(
    fields: CompletionFields,
    context: RequestContext,
    streams: Sequence[AnswerStream],
    writers: "Sequence[_ChoiceWriter]",
) -> AsyncIterator[bytes]:
    last: dict[int, TextOutput] = {}
    async with aclosing(merged(streams, context)) as outputs:
        async for number, output in outputs:
            choice = writers[number].part(output)
            if output.finish is not None:
                last[number] = output
                choice["finish_reason"] = output.finish.value
            elif not choice["text"] and choice["logprobs"] is None:
                continue
            more = {"usage": writers[number].usage} if fields.counts_events else {}
            yield event(context.body("text_completion", [choice], **more))
    ended = [last[number] for number in sorted(last)]
    context.finish = _finishes(ended)
    usage = context.count(ended, fields.n or 1, only_prompts=fields.max_tokens == 0)
    if fields.counts_usage:
        yield event(context.body("text_completion", [], usage=usage))
    yield DONE


class _ChoiceWriter:
    """Writes one choice as JSON, whole or in parts.

    Args:
        fields: Body of the request.
        served: The model.
        number: Which choice.
        prompt: Its prompt.
    """

    def __init__(
        self, fields: CompletionFields, served: ServedText, number: int, prompt: Sequence[int]
    ) -> None:
        self._fields, self._served, self._index, self._prompt = fields, served, number, prompt
        self._offset = self._written = 0
        self._echo = bool(fields.echo)

    @property
    def usage(self) -> dict[str, object]:
        """Numbers of the choice's tokens so far."""
        return usage(len(self._prompt), 0 if self._fields.max_tokens == 0 else self._written)

    def all(self, output: TextOutput) -> dict[str, Any]:
        """The whole choice."""
        reason = "stop" if output.finish is None else output.finish.value
        return {**self.part(output), "finish_reason": reason}

    def part(self, output: TextOutput) -> dict[str, Any]:
        """The next part of it."""
        ids, logprobs, text = output.token_ids, output.logprobs, output.text
        self._written += len(ids)
        if self._fields.max_tokens == 0:
            ids, logprobs, text = (
                [],
                [],
                "",
            )  # One was generated, since an engine's request has one.
        if self._echo:
            self._echo = False
            text = self._served.tokenizer.decode(self._prompt) + text
            ids = [*output.prompt_ids, *ids]
            logprobs = [*output.prompt_logprobs, *logprobs]
        written = None
        if self._fields.logprobs is not None and ids:
            written = self._logprobs(ids, logprobs)
        return {"text": text, "index": self._index, "logprobs": written, "finish_reason": None}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        words = vocabulary_of(self._served.tokenizer)
        write = self._fields.written(words)
        offsets = []
        for index in ids:
            offsets.append(self._offset)
            self._offset += len(words.text(index))
        tops = []
        for _, likeliest in logprobs:
            top: dict[str, float] = {}
            # Of tokens with the same text the most probable one stays.
            for index, value in sorted(likeliest, key=lambda pair: -pair[1]):
                top.setdefault(write(index), value)
            tops.append(top or None)
        return {
            "tokens": list(map(write, ids)),
            "token_logprobs": [value for value, _ in logprobs],
            "top_logprobs": tops if self._fields.logprobs else None,
            "text_offset": offsets,
        }
