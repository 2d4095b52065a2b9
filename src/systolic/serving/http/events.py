"""Answers that wait: whole ones and streams of events, cancelled at once when the client leaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from systolic.core.errors import SystolicError
from systolic.serving.http.bodies import encode
from systolic.serving.http.desk import Ticket
from systolic.serving.http.problems import Dialect, ProblemError, problem_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


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
        Ticket.of(request).held.close()
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
        ticket: The request's; what it holds is let go when the client leaves.
        first: The first event.
        rest: Those after it; a problem among them becomes an event, after which the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._ticket, self._first, self._rest = ticket, first, rest
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
            self._ticket.held.close()
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
    return EventStream(Ticket.of(request), first, events)
