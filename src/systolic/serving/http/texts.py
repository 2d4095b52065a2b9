"""Choices of a request: submitted together, their pieces merged as they come."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from systolic.data.text.tokenizer import Tokenizer
from systolic.serving.http.desk import Ticket
from systolic.serving.http.problems import ProblemError
from systolic.serving.text.request import (
    AnswerStream,
    Finish,
    TextEngine,
    TextPiece,
    TextRequest,
    Token,
    Usage,
)

T = TypeVar("T")
SHORT = 4096
"""Characters of a text that is tokenized in the event loop; a longer one would hold up the others' streams."""


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


def submit(
    engine: TextEngine, requests: Sequence[TextRequest], ticket: Ticket
) -> list[AnswerStream]:
    """Streams of some requests, which end with the ticket; all or none.

    Raises:
        RefusedError: as the engine's.
    """
    streams = []
    for request in requests:
        stream = engine.submit(request)
        ticket.at_end(stream.cancel)
        streams.append(stream)
    # Choices share their prompt, which counts once; a request that is refused costs none.
    ticket.spend(sum(map(len, {id(one.tokens): one.tokens for one in requests}.values())))
    return streams


def failure(piece: TextPiece) -> ProblemError | None:
    """What a last piece says where its text did not end as asked."""
    match piece.finish:
        case Finish.error:
            return ProblemError(status=500, message=piece.message or "the engine failed")
        case Finish.deadline:
            return ProblemError(
                status=504,
                message="the request's time is over; ask for fewer tokens or more time",
                code="deadline",
            )
        case Finish.cancelled:
            return ProblemError(
                status=503,
                message="the server ended before the text did; ask another one",
                code="cancelled",
                retry_seconds=1.0,
            )
    return None


def note(piece: TextPiece, ticket: Ticket) -> None:
    """Counts a piece's tokens against the key's rate, and keeps the times of a text that has ended."""
    ticket.spend(len(piece.tokens))
    if piece.times is not None:
        ticket.times.append(piece.times)


async def merged(
    streams: Sequence[AnswerStream], ticket: Ticket
) -> AsyncGenerator[tuple[int, TextPiece]]:
    """Pieces of several streams with the number of their stream, as they come; their tokens count against the key's rate.

    Raises:
        ProblemError: one of them failed.
    """
    if len(streams) == 1:
        async for piece in streams[0]:
            note(piece, ticket)
            if (problem := failure(piece)) is not None:
                raise problem
            yield 0, piece
        return
    pieces: asyncio.Queue[tuple[int, TextPiece | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AnswerStream) -> None:
        try:
            async for piece in stream:
                note(piece, ticket)
                pieces.put_nowait((number, piece))
        except Exception as error:
            pieces.put_nowait((number, error))
        pieces.put_nowait((number, None))

    tasks = [asyncio.ensure_future(pump(*one)) for one in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, piece = await pieces.get()
            if piece is None:
                left -= 1
            elif isinstance(piece, BaseException):
                raise piece
            elif (problem := failure(piece)) is not None:
                raise problem
            else:
                yield number, piece
    finally:
        for task in tasks:
            task.cancel()


@dataclass(kw_only=True)
class Whole:
    """A text that has ended."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    finish: Finish = Finish.stop
    usage: Usage | None = None

    def add(self, piece: TextPiece) -> None:
        """Adds what is new."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.prompt += piece.prompt
        if piece.finish is not None:
            self.finish, self.usage = piece.finish, piece.usage


async def whole(streams: Sequence[AnswerStream], ticket: Ticket) -> list[Whole]:
    """The texts of some streams; errors as :func:`merged`."""
    found = [Whole() for _ in streams]
    async with aclosing(merged(streams, ticket)) as pieces:
        async for number, piece in pieces:
            found[number].add(piece)
    return found


@dataclass(kw_only=True)
class Tally:
    """Tokens of a request with several prompts and choices; a prompt counts once, whatever its choices."""

    choices: int
    """Choices of each prompt."""
    prompts: int = 0
    only_prompts: bool = False
    """Whether no new tokens were asked for; the one that the engine made anyway does not count."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, number: int, usage: Usage | None) -> None:
        """Adds an ended stream of a number."""
        if usage is None:
            return
        self.completion_tokens += 0 if self.only_prompts else usage.completion_tokens
        if number % self.choices == 0:
            self.prompts += 1
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens

    def close(self, ticket: Ticket) -> dict[str, object]:
        """``usage`` as clients read it, noted on the ticket."""
        ticket.usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )
        ticket.examples, ticket.choices = self.prompts, self.choices
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
