"""Answers of models on their way to a client: choices submitted and merged, streams of events, all cancelled when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from typing import TypeVar, assert_never

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from systolic.core.errors import OptionError, SystolicError
from systolic.data.text.tokenizer import Tokenizer
from systolic.inference.grammar import Matcher, Rule, grammar_text
from systolic.serving.http.protocol import Dialect, ProblemError, bad, encode, problem_of
from systolic.serving.http.state import RequestContext
from systolic.serving.registry import ServedBatch
from systolic.serving.request import ModelKind
from systolic.serving.text.request import AnswerStream, Finish, TextEngine, TextOutput, TextRequest

T = TypeVar("T")
SHORT = 4096
"""Characters of a text that is tokenized in the event loop; a longer one would hold up the others' streams."""
DONE = b"data: [DONE]\n\n"


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """The result of some work on so many characters, in a thread where they are many."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


async def token_ids(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Ids of a text; ``special`` puts before it what starts a prompt."""
    encode = tokenizer.prompt if special else tokenizer.encode
    return await off_loop(len(text), lambda: encode(text))


async def opening_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text to continue, which may be empty: see :meth:`Tokenizer.opening`."""
    return await off_loop(len(text), lambda: tokenizer.opening(text))


async def grammar_of(
    engine: TextEngine, start: str, rules: Mapping[str, Rule], param: str
) -> Matcher:
    """The beginning of an answer by :func:`systolic.inference.grammar.grammar_text`.

    Args:
        engine: Of the model.
        start: As there.
        rules: As there.
        param: Field of the request that asks for it.

    Raises:
        ProblemError: it cannot be followed.
    """
    text = grammar_text(start, rules)
    try:
        return await asyncio.to_thread(engine.grammars.compiled, text)
    except OptionError as error:
        raise bad(f"{param}: {error}", param) from error


def submit(
    engine: TextEngine, requests: Sequence[TextRequest], context: RequestContext
) -> list[AnswerStream]:
    """Streams of some requests, which end with the context; all or none.

    Raises:
        RefusedError: as the engine's.
    """
    streams = []
    for request in requests:
        stream = engine.submit(request)
        context.at_end(stream.cancel)
        streams.append(stream)
    # Choices share their prompt, which counts once; a request that is refused costs none.
    context.spend(
        sum(map(len, {id(request.tokens): request.tokens for request in requests}.values()))
    )
    return streams


def failure(output: TextOutput) -> ProblemError | None:
    """HTTP error of a text that did not end as asked."""
    match output.finish:
        case Finish.error:
            return ProblemError(status=500, message=output.message or "the engine failed")
        case Finish.deadline:
            return ProblemError(
                status=504,
                message="the request's time is over; ask for fewer tokens or more time",
                code="deadline",
            )
        case Finish.cancelled:
            return ProblemError(
                status=503,
                message=output.message or "the server ended before the text did; ask another one",
                code="cancelled",
                retry_seconds=1.0,
            )
        case Finish.stop | Finish.length | None:
            return None
        case reason:
            assert_never(reason)


def count(output: TextOutput, context: RequestContext) -> None:
    """Counts an output's tokens against the key's rate, and keeps the last one of a text."""
    context.spend(len(output.token_ids))
    if output.finish is not None:
        context.ended.append(output)


async def merged(
    streams: Sequence[AnswerStream], context: RequestContext
) -> AsyncGenerator[tuple[int, TextOutput]]:
    """Outputs of several streams with the number of their stream, as they come; their tokens count against the key's rate.

    Raises:
        ProblemError: one of them failed.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            count(output, context)
            if (problem := failure(output)) is not None:
                raise problem
            yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, TextOutput | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AnswerStream) -> None:
        try:
            async for output in stream:
                count(output, context)
                outputs.put_nowait((number, output))
        except Exception as error:
            outputs.put_nowait((number, error))
        outputs.put_nowait((number, None))

    tasks = [asyncio.ensure_future(pump(*numbered)) for numbered in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, output = await outputs.get()
            if output is None:
                left -= 1
            elif isinstance(output, BaseException):
                raise output
            elif (problem := failure(output)) is not None:
                raise problem
            else:
                yield number, output
    finally:
        for task in tasks:
            task.cancel()


async def whole(streams: Sequence[AnswerStream], context: RequestContext) -> list[TextOutput]:
    """The texts of some streams; errors as :func:`merged`."""
    outputs: list[list[TextOutput]] = [[] for _ in streams]
    async with aclosing(merged(streams, context)) as merging:
        async for number, output in merging:
            outputs[number].append(output)
    return [TextOutput.joined(each) for each in outputs]


async def answered(
    request: Request, served: ServedBatch, inputs: Mapping[str, np.ndarray]
) -> Mapping[str, np.ndarray]:
    """The outputs of a model for some inputs.

    Raises: as :meth:`~systolic.serving.batch.model.DynamicBatches.submit` and its future.
    """
    context = RequestContext.of(request)
    future = served.model.submit(inputs, deadline_seconds=context.deadline_seconds)
    context.at_end(future.cancel)
    try:
        outputs = await attended(request, asyncio.wrap_future(future))
    except CancelledError as error:
        raise ProblemError(
            status=503, message="the request was cancelled", retry_seconds=1.0
        ) from error
    context.examples = len(next(iter(outputs.values()), ()))
    if served.model.kind is ModelKind.embedding:
        tokens = int(np.sum(outputs["tokens"]))
        context.spend(tokens)
        context.prompt_tokens = tokens
    return outputs


def objects(values: list[bytes] | list[object]) -> np.ndarray:
    """Values as an object array [n], whatever they are."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


async def attended(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which ends when the client leaves; its body has to be read before.

    Raises:
        ProblemError: the client left; nobody reads it.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        RequestContext.of(request).held.close()
        raise ProblemError(status=499, message="the client left")
    finally:
        left.cancel()
        task.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of events whose first one is known, so that what fails before it still has a status.

    Args:
        context: The request's; what it holds is let go when the client leaves.
        first: The first event.
        rest: Those after it; a problem among them becomes an event, after which the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, context: RequestContext, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._context, self._first, self._rest = context, first, rest
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        writing = asyncio.ensure_future(self._write(send))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((writing, left), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._context.held.close()
            left.cancel()
            writing.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for raw in self._rest:
                await send({"type": "http.response.body", "body": raw, "more_body": True})
        except ProblemError as problem:
            await send(_part(event(problem.body(Dialect.openai))))
        except SystolicError as error:
            await send(_part(event(problem_of(error).body(Dialect.openai))))
        await send({"type": "http.response.body", "body": b""})


def _part(raw: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": raw, "more_body": True}


async def streamed(request: Request, events: AsyncIterator[bytes]) -> Response:
    """The answer of a stream, once its first event is known.

    Raises:
        ProblemError: what failed before it.
    """
    first = await attended(request, anext(events))
    return EventStream(RequestContext.of(request), first, events)
