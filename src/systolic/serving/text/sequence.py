"""One request in an engine: its tokens, its text so far, and when it ends."""

import math
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from systolic.core.errors import RunError
from systolic.data.text.stops import Stops
from systolic.serving.text.request import (
    Finish,
    Stream,
    TextPiece,
    TextRequest,
    TextTimes,
    Token,
    Usage,
)
from systolic.serving.text.scheduler import PENDING, Text

if TYPE_CHECKING:
    from systolic.data.text.tokenizer import TextStream, Tokenizer


class Made(NamedTuple):
    """A token that a step chose, or those of a prompt that it scored."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[Token, ...] = ()
    """Tokens of the prompt that were scored."""
    first: int = 0
    """Position of the first of these."""
    read: int = 0
    """Tokens of the text that its step had read: of those that later steps read nothing is known yet."""
    chosen: bool = True
    """Whether a token was chosen; a part of a prompt that is not the last has scores alone."""


def reason(error: BaseException) -> str:
    """One line of what was raised."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__}: {first}"


@dataclass(kw_only=True, eq=False)
class Answer:
    """A request and what was made of it."""

    number: int
    request: TextRequest
    stream: Stream
    tokenizer: "Tokenizer"
    ends: Collection[int]
    """Ids that end it."""
    context: int
    text: Text = field(init=False)
    seed: int = field(init=False)
    submitted: float = field(init=False)
    """Monotonic seconds."""
    submitted_ns: int = field(init=False)
    """Unix nanoseconds."""
    made: int = 0
    """New tokens."""
    ended: bool = False
    begun: float | None = None
    """When its first token was read."""
    first: float | None = None
    """When its first new token was known."""
    _decoder: "TextStream" = field(init=False)
    _stops: Stops = field(init=False)
    _tokens: list[Token] = field(init=False, default_factory=list)
    _prompt: list[Token] = field(init=False, default_factory=list)
    _scored: int = 0
    """Tokens of the prompt that were handed on or wait for it."""

    def __post_init__(self) -> None:
        request = self.request
        tokens = list(map(int, request.tokens))
        most = min(len(tokens) + request.max_tokens, self.context)
        self.text = Text(
            number=self.number,
            tokens=tokens,
            prompt=len(tokens),
            most=most,
            shares=not request.prompt_logprobs,
        )
        given = request.sampling.seed
        self.seed = random.getrandbits(32) if given is None else given & 0xFFFFFFFF
        self.submitted, self.submitted_ns = time.monotonic(), time.time_ns()
        self._decoder, self._stops = self.tokenizer.stream(tokens), Stops(tuple(request.stop))
        if request.prompt_logprobs:
            self._prompt.append(Token(id=tokens[0]))
            self._scored = 1

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds at which it ends."""
        given = self.request.deadline_seconds
        return None if given is None else self.submitted + given

    @property
    def queried_tokens(self) -> int:
        """Tokens of its prompt that were looked up among the kept pages."""
        return self.text.prompt if self.text.shares and self.begun is not None else 0

    @property
    def queue_seconds(self) -> float:
        """Until its first token was read."""
        return (self.begun or time.monotonic()) - self.submitted

    @property
    def first_token_seconds(self) -> float | None:
        """Until its first new token was known."""
        return None if self.first is None else self.first - self.submitted

    @property
    def looks_back(self) -> bool:
        """Whether a choice needs all tokens before it, the last one included."""
        c = self.request.sampling
        penalties = (c.presence_penalty, c.frequency_penalty, c.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def by_all(self) -> bool:
        """Whether its choice needs more than a temperature."""
        c = self.request.sampling
        plain = (c.top_k, c.top_p, c.min_p) == (0, 1.0, 0.0) and not c.logit_bias
        return not plain or self.looks_back or bool(self.request.logprobs)

    def push(self, made: Made) -> Finish | None:
        """Takes a token, or scores of the prompt; why the text ends with it, if it does."""
        if math.isnan(made.logprob):
            raise RunError("the model's logits for this text are not finite")
        # A text that lost its pages is read, and scored, again.
        fresh = made.prompt[max(self._scored - made.first, 0) :]
        self._prompt += fresh
        self._scored += len(fresh)
        if not made.chosen:
            return None
        tokens = self.text.tokens
        tokens[tokens.index(PENDING, self.text.prompt)] = made.token
        if self.first is None:
            self.first = time.monotonic()
        self.made += 1
        wanted = self.request.logprobs
        if wanted is None:
            self._tokens.append(Token(id=made.token))
        else:
            top = made.top[:wanted]
            self._tokens.append(Token(id=made.token, logprob=made.logprob, top=top))
        if made.token in self.ends or made.token in self.request.stop_tokens:
            return Finish.stop
        text = self._stops.push(self._decoder.push(made.token))
        if self._stops.met:
            self._put(text)
            return Finish.stop
        if self.text.prompt + self.made >= self.text.most:
            self._put(text)
            return Finish.length
        if text:
            self._put(text)
        return None

    def end(self, finish: Finish, message: str = "") -> None:
        """Ends the text; what was held back belongs to it unless a stop string was met."""
        self.ended = True
        rest = ""
        try:
            if not self._stops.met:
                rest = self._stops.push(self._decoder.flush())
                if not self._stops.met:
                    rest += self._stops.flush()
        except Exception as error:  # Whatever a tokenizer raises: whoever reads must see the end.
            finish, message = Finish.error, message or reason(error)
        usage = Usage(
            prompt_tokens=self.text.prompt,
            completion_tokens=self.made,
            cached_tokens=self.text.reused,
        )
        times = TextTimes(
            submitted_ns=self.submitted_ns,
            queue_seconds=self.queue_seconds,
            first_token_seconds=self.first_token_seconds,
            seconds=time.monotonic() - self.submitted,
        )
        self._put(rest, finish=finish, usage=usage, times=times, message=message)

    def _put(self, text: str, **last: Any) -> None:
        """Hands on a text with the tokens that were kept for it, and what the last piece says."""
        tokens, self._tokens = tuple(self._tokens), []
        prompt, self._prompt = tuple(self._prompt), []
        self.stream.put(TextPiece(text=text, tokens=tokens, prompt=prompt, **last))
