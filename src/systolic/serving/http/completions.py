"""``POST /v1/completions``: texts that continue prompts."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from systolic.serving.http.protocol import TextFields, Top, bad, encode, read, room
from systolic.serving.http.responses import (
    DONE,
    Tally,
    Whole,
    attended,
    event,
    merged,
    opening_ids,
    streamed,
    submit,
    whole,
)
from systolic.serving.http.state import RequestContext, ServerState, new_id
from systolic.serving.http.vocabulary import Vocabulary, vocabulary_of
from systolic.serving.registry import ServedText
from systolic.serving.text.request import TextRequest, Token

DEFAULT_TOKENS = 16
"""``max_tokens`` where none is given, as OpenAI has it."""
Ids = list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]


class CompletionFields(TextFields, kw_only=True):
    """A request of ``/v1/completions``."""

    prompt: str | list[str | int | Ids]
    echo: bool | None = None
    logprobs: Top | None = None
    suffix: str | None = None


@dataclass(kw_only=True)
class _AskedTexts:
    """A request that was understood."""

    fields: CompletionFields
    served: ServedText
    context: RequestContext
    prompts: list[list[int]]
    requests: list[TextRequest]
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return self.fields.n or 1

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer or an event."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.context.model,
            "choices": choices,
            **more,
        }


async def completions(request: Request, state: ServerState) -> Response:
    """Answers a request; errors as the parts that it calls."""
    fields = await read(request, CompletionFields)
    fields.check()
    asked = await _understood(request, state, state.text(request, fields.model), fields)
    streams = submit(asked.served.engine, asked.requests, asked.context)
    if fields.stream:
        return await streamed(request, _events(asked, streams))
    texts = await attended(request, whole(streams, asked.context))
    bill = Tally(choices=asked.choices, only_prompts=asked.fields.max_tokens == 0)
    choices = []
    for number, text in enumerate(texts):
        bill.add(number, text.usage)
        choices.append(_ChoiceWriter(asked, number).all(text))
    asked.context.finish = ",".join(sorted({str(one["finish_reason"]) for one in choices}))
    answer = asked.chunk(choices, usage=bill.close(asked.context))
    return Response(encode(answer), media_type="application/json")


async def continued(
    request: Request, state: ServerState, served: ServedText, fields: CompletionFields
) -> list[str]:
    """The texts that continue the prompts of a request of another protocol; errors as the parts that it calls."""
    fields.check()
    asked = await _understood(request, state, served, fields)
    streams = submit(served.engine, asked.requests, asked.context)
    texts = await attended(request, whole(streams, asked.context))
    bill = Tally(choices=asked.choices)
    for number, text in enumerate(texts):
        bill.add(number, text.usage)
    bill.close(asked.context)
    asked.context.finish = ",".join(sorted({one.finish.value for one in texts}))
    return [one.text for one in texts]


async def _understood(
    request: Request, state: ServerState, served: ServedText, fields: CompletionFields
) -> _AskedTexts:
    context = RequestContext.of(request)
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
    requests = []
    for tokens in prompts:
        # Without a number there are OpenAI's, or as many as are left.
        asked = min(DEFAULT_TOKENS, max(length - len(tokens), 1))
        if fields.max_tokens is not None:
            asked = max(fields.max_tokens, 1)
        new = room(len(tokens), asked, length, "prompt", "max_tokens")
        for number in range(fields.n or 1):
            made = fields.text_request(
                tokens,
                number=number,
                vocab_size=served.tokenizer.vocab_size,
                max_tokens=new,
                logprobs=fields.logprobs,
                deadline_seconds=context.deadline_seconds,
            )
            scored = bool(fields.echo) and fields.logprobs is not None
            requests.append(replace(made, prompt_logprobs=scored))
    return _AskedTexts(
        fields=fields, served=served, context=context, prompts=prompts, requests=requests
    )


async def _prompts(given: str | list[Any], served: ServedText) -> list[list[int]]:
    """Token ids of each prompt: a text, ids, or several of either."""
    alone = isinstance(given, str) or (given and all(isinstance(one, int) for one in given))
    several: list[Any] = [given] if alone else list(given)
    if not several:
        raise bad("prompt is empty; send a text or token ids", "prompt")
    found = []
    for one in several:
        if isinstance(one, str):
            found.append(await opening_ids(served.tokenizer, one))
        elif isinstance(one, list):
            found.append(checked_ids(one, served, "prompt"))
        else:
            raise bad("prompt mixes token ids and texts; send several lists of ids", "prompt")
    return found


def checked_ids(ids: Sequence[int], served: ServedText, param: str) -> list[int]:
    """Token ids of a request.

    Raises:
        ProblemError: one is no token of the model.
    """
    size = served.tokenizer.vocab_size
    wrong = next((one for one in ids if not 0 <= one < size), None)
    if wrong is not None:
        raise bad(f"{param} has the id {wrong}; the model's are 0 to {size - 1}", param)
    return list(ids)


async def _events(asked: _AskedTexts, streams: Sequence[Any]) -> AsyncIterator[bytes]:
    writers = [_ChoiceWriter(asked, number) for number in range(len(streams))]
    bill, finishes = Tally(choices=asked.choices, only_prompts=asked.fields.max_tokens == 0), set()
    async with aclosing(merged(streams, asked.context)) as pieces:
        async for number, piece in pieces:
            text = Whole(text=piece.text, tokens=[*piece.tokens], prompt=[*piece.prompt])
            choice = writers[number].part(text)
            if piece.finish is not None:
                bill.add(number, piece.usage)
                choice["finish_reason"] = piece.finish.value
                finishes.add(piece.finish.value)
            elif not choice["text"] and choice["logprobs"] is None:
                continue
            yield event(asked.chunk([choice]))
    asked.context.finish = ",".join(sorted(finishes))
    usage = bill.close(asked.context)
    options = asked.fields.stream_options
    if options is not None and options.include_usage:
        yield event(asked.chunk([], usage=usage))
    yield DONE


class _ChoiceWriter:
    """Turns one choice into its JSON, whole or in parts."""

    def __init__(self, asked: _AskedTexts, number: int) -> None:
        self._asked, self._index = asked, number
        self._offset = 0
        self._echo = bool(asked.fields.echo)
        self._prompt = asked.prompts[number // asked.choices]

    def all(self, text: Whole) -> dict[str, Any]:
        """The whole choice."""
        return {**self.part(text), "finish_reason": text.finish.value}

    def part(self, text: Whole) -> dict[str, Any]:
        """The next part of it."""
        fields, tokens, written = self._asked.fields, text.tokens, text.text
        if fields.max_tokens == 0:
            tokens, written = [], ""  # One was generated, since the engine's requests have one.
        if self._echo:
            self._echo = False
            tokenizer = self._asked.served.tokenizer
            written = tokenizer.decode(self._prompt) + written
            tokens = [*text.prompt, *tokens]
        logprobs = None
        if fields.logprobs is not None and tokens:
            logprobs = self._logprobs(tokens, vocabulary_of(self._asked.served.tokenizer))
        return {"text": written, "index": self._index, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[Token], words: Vocabulary) -> dict[str, Any]:
        write = self._asked.fields.written(words)
        offsets = []
        for one in tokens:
            offsets.append(self._offset)
            self._offset += len(words.text(one.id))
        tops = []
        for one in tokens:
            top: dict[str, float] = {}
            # Of tokens with the same text the most probable one stays.
            for index, value in sorted(one.top, key=lambda pair: -pair[1]):
                top.setdefault(write(index), value)
            tops.append(top or None)
        return {
            "tokens": [write(one.id) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": tops if self._asked.fields.logprobs else None,
            "text_offset": offsets,
        }
