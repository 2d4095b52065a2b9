"""A request for text: how its tokens are sampled, and the stream of its output."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

from systolic.core.ranges import COUNT, NOT_NEGATIVE, Range, check
from systolic.inference.grammar import Grammars, Matcher
from systolic.inference.results import Finish

TopLogprobs = Sequence[tuple[int, float]]
"""Likeliest ids with their log-probabilities, likeliest first."""
Logprob = tuple[float | None, TopLogprobs]
"""Natural logarithm of a token's probability before temperature and cuts, and the likeliest in its place; None for a prompt's first."""


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

    @property
    def penalizes(self) -> bool:
        """Whether a choice depends on all tokens before it, the last one included."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def cuts(self) -> bool:
        """Whether a choice takes more than a temperature."""
        plain = (self.top_k, self.top_p, self.min_p) == (0, 1.0, 0.0) and not self.logit_bias
        return not plain or self.penalizes


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
    min_tokens: int = 0
    """New tokens before which neither an end token nor a stop string ends the text."""
    priority: int = 0
    """Texts of a lower number run first; those of one number by age."""
    ignore_ends: bool = False
    """Goes on after the model's own end tokens; for measurements."""
    logprobs: int | None = None
    """Log-probabilities of the chosen tokens and of so many likeliest ones; None gives none."""
    prompt_logprobs: bool = False
    """Log-probabilities of the prompt's tokens as well, with as many likeliest ones as ``logprobs``."""
    deadline_seconds: float | None = None
    """Ends the text so long after it was submitted."""
    adapter: int = 0
    """Number of the adapter that answers, from 1; 0 is the model alone."""
    adapter_name: str = ""
    """Its name; empty for the model alone."""
    root: bytes = b""
    """Key of the empty text, of which the keys of its pages are made: texts of other adapters have other keys and values."""
    grammar: Matcher | None = None
    """The beginning of a text in the grammar that the answer follows; the model's end tokens then end it whatever ``ignore_ends`` says."""


@dataclass(kw_only=True, slots=True)
class TextOutput:
    """New text of a request: whole characters, none of which can be the start of a stop string.

    The last output has ``finish``, and what is known of the whole request.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    """Tokens that were chosen since the last output; their text may still be held back."""
    logprobs: Sequence[Logprob] = ()
    """Log-probabilities of these tokens; () unless asked for."""
    prompt_ids: Sequence[int] = ()
    """Scored tokens of the prompt; () unless their log-probabilities were asked for."""
    prompt_logprobs: Sequence[Logprob] = ()
    """Log-probabilities of these tokens."""
    finish: Finish | None = None
    message: str = ""
    """Reason of an error, one line."""
    adapter_name: str = ""
    """Name of the adapter that answered; empty for the model alone."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were found in pages of earlier requests."""
    queried_tokens: int = 0
    """Tokens of the prompt that were looked up in the cache: none if it ended before it ran, or its prompt was scored."""
    drafts: int = 0
    """Steps that verified proposals."""
    drafted_tokens: int = 0
    """Tokens that were proposed."""
    accepted_tokens: int = 0
    started: bool = False
    """Whether a token of it was read."""
    submitted_ns: int = 0
    """Unix nanoseconds."""
    queue_seconds: float = 0.0
    """Until its first token was read."""
    first_token_seconds: float | None = None
    """Until its first new token was known; None if there was none."""
    seconds: float = 0.0
    """Until it ended."""

    @classmethod
    def joined(cls, outputs: "Sequence[TextOutput]") -> "TextOutput":
        """All outputs of a request as one, with what the last one says."""
        return replace(
            outputs[-1],
            text="".join(output.text for output in outputs),
            token_ids=[token for output in outputs for token in output.token_ids],
            logprobs=[value for output in outputs for value in output.logprobs],
            prompt_ids=[token for output in outputs for token in output.prompt_ids],
            prompt_logprobs=[value for output in outputs for value in output.prompt_logprobs],
        )

    def phases(self) -> Mapping[str, float]:
        """Seconds of the request's phases, in their order."""
        if self.first_token_seconds is None:
            return {"queue": self.queue_seconds, "prefill": self.seconds - self.queue_seconds}
        return {
            "queue": self.queue_seconds,
            "prefill": self.first_token_seconds - self.queue_seconds,
            "decode": self.seconds - self.first_token_seconds,
        }


class AnswerStream(Protocol):
    """A submitted request, read from one thread or event loop."""

    def __iter__(self) -> Iterator[TextOutput]:
        """Blocks for each output; ends after the one with ``finish``."""
        ...

    def __aiter__(self) -> AsyncIterator[TextOutput]:
        """Waits for each output in the running event loop."""
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

    @property
    def grammars(self) -> Grammars:
        """Grammars of its tokens."""
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
        self._outputs: deque[TextOutput] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._ended = False

    def put(self, output: TextOutput) -> None:
        """Hands an output to the reader; from the engine's thread."""
        with self._changed:
            self._outputs.append(output)
            wake = self._wake
            self._changed.notify()
        if wake is not None:
            wake()

    def cancel(self) -> None:
        """See :class:`systolic.serving.text.request.AnswerStream`."""
        self._cancel(self)

    def __iter__(self) -> Iterator[TextOutput]:
        """Outputs as they come; blocks."""
        while not self._ended:
            with self._changed:
                while not self._outputs:
                    self._changed.wait()
                output = self._outputs.popleft()
            self._ended = output.finish is not None
            yield output

    async def __aiter__(self) -> AsyncIterator[TextOutput]:
        """Outputs as they come; waits in the running loop."""
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
                outputs, self._outputs = self._outputs, deque()
            if not outputs:
                await event.wait()
            for output in outputs:
                self._ended = output.finish is not None
                yield output
