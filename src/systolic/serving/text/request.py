"""A request for text, how its tokens are sampled, and the stream of what comes back."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from systolic.core.ranges import COUNT, NOT_NEGATIVE, Range, check
from systolic.data.text.stops import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's next token is chosen from its logits.

    Raises:
        OptionError: a value out of its range.
    """

    temperature: Annotated[float, Range(least=0, most=100)] = 1.0
    """Softmax temperature; 0 takes the likeliest token."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Chooses among the k likeliest; 0 among all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Chooses among the fewest tokens whose probabilities sum to this."""
    min_p: Annotated[float, Range(least=0, most=1)] = 0.0
    """Drops tokens less likely than this share of the likeliest."""
    presence_penalty: Annotated[float, Range(least=-2, most=2)] = 0.0
    """Taken off the logits of tokens that were generated before."""
    frequency_penalty: Annotated[float, Range(least=-2, most=2)] = 0.0
    """Taken off for each time that a token was generated before."""
    repetition_penalty: Annotated[float, Range(above=0, most=100)] = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens of the prompt or generated before (Keskar et al. 2019)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    seed: int | None = None
    """The same seed gives the same text, whatever else runs beside it; None draws one."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """A prompt to continue."""

    tokens: Sequence[int]
    """Ids of the prompt, at least one."""
    max_tokens: Annotated[int, COUNT]
    """At most so many new tokens."""
    sampling: SamplingParams = SamplingParams()
    stop: Sequence[str] = ()
    """The text ends before the first of these."""
    stop_tokens: Sequence[int] = ()
    """Ids that end the text beside those of the model."""
    ignore_ends: bool = False
    """Goes on after the model's own end tokens; for measurements."""
    logprobs: int | None = None
    """Log-probabilities of the chosen tokens and of so many likeliest ones; None gives none."""
    prompt_logprobs: bool = False
    """Log-probabilities of the prompt's tokens as well, with as many likeliest ones as ``logprobs``."""
    deadline_seconds: float | None = None
    """Ends the text so long after it was submitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token of a text."""

    id: int
    logprob: float | None = None
    """Natural logarithm of its probability before temperature and cuts; None where none was asked for, and of a prompt's first."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest ids with their log-probabilities, likeliest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTimes:
    """When what happened to a text."""

    submitted_ns: int
    """Unix nanoseconds."""
    queue_seconds: float
    """Until its first token was read."""
    first_token_seconds: float | None
    """Until its first new token was known; None where there was none."""
    seconds: float
    """Until it ended."""

    def phases(self) -> Mapping[str, float]:
        """Seconds of its phases, in their order."""
        if self.first_token_seconds is None:
            return {"queue": self.queue_seconds, "prefill": self.seconds - self.queue_seconds}
        return {
            "queue": self.queue_seconds,
            "prefill": self.first_token_seconds - self.queue_seconds,
            "decode": self.seconds - self.first_token_seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """What is new of a text: whole characters, none of which can be the start of a stop string."""

    text: str = ""
    tokens: Sequence[Token] = ()
    """Tokens that were read since the last piece; their text may still be held back."""
    prompt: Sequence[Token] = ()
    """The prompt's tokens, in the first piece, where their log-probabilities were asked for."""
    finish: Finish | None = None
    """In the last piece."""
    usage: "Usage | None" = None
    """In the last piece."""
    times: TextTimes | None = None
    """In the last piece."""
    message: str = ""
    """Of an error, one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in pages of earlier requests."""


class AnswerStream(Protocol):
    """A submitted request, read from one thread or event loop."""

    def __iter__(self) -> Iterator[TextPiece]:
        """Blocks for each piece; ends after the one with ``finish``."""
        ...

    def __aiter__(self) -> AsyncIterator[TextPiece]:
        """Waits for each piece in the running event loop."""
        ...

    def cancel(self) -> None:
        """Ends the request and frees its pages before the next step; from any thread, more than once."""
        ...


class TextEngine(Protocol):
    """A language model that continues many texts at once."""

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        ...

    def submit(self, request: TextRequest) -> AnswerStream:
        """Queues a request; from any thread.

        Raises:
            RefusedError: the queue is full, the engine ends, or the request can never run here.
        """
        ...


class Stream:
    """Implements :class:`systolic.serving.text.request.AnswerStream`.

    Args:
        cancel: Asks the engine to end the request.
    """

    def __init__(self, cancel: Callable[["Stream"], None]) -> None:
        self._cancel = cancel
        self._pieces: deque[TextPiece] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._ended = False

    def put(self, piece: TextPiece) -> None:
        """Hands a piece to the reader; from the engine's thread."""
        with self._changed:
            self._pieces.append(piece)
            wake = self._wake
            self._changed.notify()
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """See :class:`systolic.serving.text.request.AnswerStream`."""
        self._cancel(self)

    def __iter__(self) -> Iterator[TextPiece]:
        """Pieces as they come; blocks."""
        while not self._ended:
            with self._changed:
                while not self._pieces:
                    self._changed.wait()
                piece = self._pieces.popleft()
            self._ended = piece.finish is not None
            yield piece

    async def __aiter__(self) -> AsyncIterator[TextPiece]:
        """Pieces as they come; waits in the running loop."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                self.cancel()  # The loop is closed: nobody reads any more.

        with self._changed:
            self._wake = wake
        while not self._ended:
            event.clear()
            with self._changed:
                pieces, self._pieces = self._pieces, deque()
            if not pieces:
                await event.wait()
            for piece in pieces:
                self._ended = piece.finish is not None
                yield piece
