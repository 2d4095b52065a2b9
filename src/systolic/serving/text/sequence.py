"""A request in an engine: its tokens, its pages, its text so far, and when it ends."""

import math
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from systolic.core.errors import RunError
from systolic.inference.grammar import Matcher
from systolic.inference.results import Finish, Stops
from systolic.serving.text.request import Logprob, Stream, TextOutput, TextRequest, TopLogprobs

if TYPE_CHECKING:
    from systolic.data.text.tokenizer import TextStream, Tokenizer


PENDING = -1
"""A token that a step in flight chooses."""
START = b""
"""Key of the empty text."""

GRAMS = (4, 3, 2)
"""Tokens at the end of a text that are looked up in it, the most first."""
LONGEST_PAUSE = 31
"""Steps without proposals after several that were of no use."""

PromptScores = tuple[int, list[int], list[Logprob]]
"""Position of the first scored token of a prompt, the tokens and their log-probabilities."""


def reason(error: BaseException) -> str:
    """One line of what was raised."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__}: {first}"


class Lookup:
    """Places of a text's n-grams, the last of each."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0
        """Tokens whose n-grams are known; a text that grows is read once."""

    def following(self, tokens: list[int], most: int) -> list[int]:
        """Tokens after the last place where the text was as it ends now, at most so many; a text that repeats itself goes on so."""
        length = len(tokens)
        for end in range(max(self._known, 1), length):
            for size in GRAMS:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, length)
        for size in GRAMS:
            place = self._after.get(tuple(tokens[length - size :])) if size <= length else None
            if place is not None:
                text = tokens[place : place + most]
                while len(text) < most:
                    text.append(text[place - length])
                return text
        return []


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """Tokens of a request and how far the cache holds them.

    The scheduler gives it pages, the runner moves it on, and its stream gets what becomes known.
    """

    number: int
    """In order of arrival."""
    request: TextRequest
    stream: Stream
    tokenizer: "Tokenizer"
    ends: Collection[int]
    """Ids that end it."""
    context: int
    """Tokens that prompt and answer may have together."""
    tokens: list[int] = field(init=False)
    """Prompt and answer; :data:`PENDING` where the device has not told it yet."""
    prompt_tokens: int = field(init=False)
    max_length: int = field(init=False)
    """Tokens that it may have in the end, prompt included."""
    read: int = 0
    """Tokens whose keys and values are in pages."""
    pages: list[int] = field(default_factory=list)
    key: bytes = START
    """Key of its full, published pages."""
    published: int = 0
    """Pages that others can begin with."""
    cached_tokens: int = 0
    """Tokens that were found in the cache when it was first admitted."""
    preempted: int = 0
    """Times that it lost its pages."""
    slot: int = -1
    """Place of its last token on the device, while it runs."""
    seed: int = field(init=False)
    matcher: Matcher | None = field(init=False)
    """Position in its grammar, if it follows one."""
    looks_back: bool = field(init=False)
    """Whether its next token depends on all before it, the last one included."""
    cut: bool = field(init=False)
    """Whether its tokens are chosen by more than a temperature, or the likeliest are told."""
    deadline: float | None = field(init=False)
    """Monotonic seconds at which it ends."""
    submitted: float = field(init=False)
    """Monotonic seconds."""
    submitted_ns: int = field(init=False)
    """Unix nanoseconds."""
    started: float | None = None
    """Monotonic seconds when its first token was read."""
    answered: float | None = None
    """Monotonic seconds when its first new token was known."""
    completion_tokens: int = 0
    """New tokens that are known."""
    ended: bool = False
    drafts: int = 0
    """Steps that verified proposals for it."""
    drafted_tokens: int = 0
    """Tokens that were proposed."""
    accepted_tokens: int = 0
    pause: int = 0
    """Steps before it proposes again."""
    _misses: int = 0
    """Proposals since one was accepted."""
    _lookup: "Lookup" = field(init=False)
    _decoder: "TextStream" = field(init=False)
    _stops: Stops = field(init=False)
    _ids: list[int] = field(init=False, default_factory=list)
    """New tokens since the last output."""
    _logprobs: list[Logprob] = field(init=False, default_factory=list)
    _prompt_ids: list[int] = field(init=False, default_factory=list)
    """Scored tokens of the prompt since the last output."""
    _prompt_logprobs: list[Logprob] = field(init=False, default_factory=list)
    _scored: int = 0
    """Tokens of the prompt that were handed on or are held."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens, self.key = list(map(int, request.tokens)), request.root
        self.prompt_tokens = len(self.tokens)
        self.max_length = min(self.prompt_tokens + request.max_tokens, self.context)
        seed = request.sampling.seed
        self.seed = random.getrandbits(32) if seed is None else seed & 0xFFFFFFFF
        self.matcher = request.grammar and request.grammar.copy()
        self.looks_back = request.sampling.penalizes or self.matcher is not None
        self.cut = request.sampling.cuts or bool(request.logprobs or request.min_tokens)
        self.submitted, self.submitted_ns = time.monotonic(), time.time_ns()
        after = request.deadline_seconds
        self._lookup = Lookup()
        self.deadline = None if after is None else self.submitted + after
        self._decoder, self._stops = self.tokenizer.stream(self.tokens), Stops(tuple(request.stop))
        if request.prompt_logprobs:
            self._prompt_ids.append(self.tokens[0])
            self._prompt_logprobs.append((None, ()))
            self._scored = 1

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all texts: the least runs first."""
        return self.request.priority, self.number

    def biases(self, length: int) -> Mapping[int, float]:
        """Numbers that are added to the logits of the token after so many: none of those that end it, before it has its least tokens."""
        biases = self.request.sampling.logit_bias
        if length - self.prompt_tokens >= self.request.min_tokens:
            return biases
        return {**biases, **dict.fromkeys((*self.ends, *self.request.stop_tokens), -math.inf)}

    @property
    def pending(self) -> bool:
        """Whether its last token is not known yet."""
        return self.tokens[-1] == PENDING

    @property
    def known(self) -> int:
        """Tokens before the first that is not known yet."""
        count = len(self.tokens)
        while self.tokens[count - 1] == PENDING:
            count -= 1
        return count

    @property
    def full(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return len(self.tokens) >= self.max_length

    @property
    def left(self) -> int:
        """Tokens still to read."""
        return len(self.tokens) - self.read

    @property
    def shares(self) -> bool:
        """Whether it begins with pages of others: not if the logits of its whole prompt are needed."""
        return not self.request.prompt_logprobs

    def push(
        self,
        token: int,
        logprob: float,
        top: TopLogprobs = (),
        scores: PromptScores | None = None,
    ) -> Finish | None:
        """Takes what a step chose and scored; why the text ends with it, if it does.

        Args:
            token: The token; :data:`PENDING` after a part of the prompt that is not the last.
            logprob: Its log-probability.
            top: The likeliest tokens with theirs.
            scores: Of tokens of the prompt.

        Raises:
            RunError: the logits are not finite, or the text's grammar is too complex.
        """
        if math.isnan(logprob):
            raise RunError("the model's logits for this text are not finite")
        if scores is not None:
            self._score(*scores)
        if token == PENDING:
            return None
        place = self.prompt_tokens + self.completion_tokens
        if place == len(
            self.tokens
        ):  # After a proposal that was accepted, which lies in the pages.
            self.tokens.append(PENDING)
            self.read += 1
        self.tokens[place] = token
        if self.answered is None:
            self.answered = time.monotonic()
        self.completion_tokens += 1
        request = self.request
        self._ids.append(token)
        if request.logprobs is not None:
            self._logprobs.append((logprob, top[: request.logprobs]))
        if self.matcher is not None:
            self.matcher.accept(token)
        if token in self.ends or token in request.stop_tokens:
            return Finish.stop
        text = self._decoder.push(token)
        if self.completion_tokens > request.min_tokens:
            text = self._stops.push(text)
        finish = None
        if self._stops.met or (self.matcher is not None and self.matcher.complete):
            finish = Finish.stop
        elif self.prompt_tokens + self.completion_tokens >= self.max_length:
            finish = Finish.length
        if text or finish is not None:
            self._put(text)
        return finish

    def propose(self, most: int) -> list[int]:
        """Tokens that may follow, at most so many: those that followed when the text was last as it ends now."""
        tokens = self._lookup.following(self.tokens, most)
        return tokens if self.matcher is None else self.matcher.allowed(tokens)

    def drafted(self, proposed: int, accepted: int) -> None:
        """Counts proposals that were verified; after some of which none was accepted there are none for some steps, for more each time."""
        if not proposed:
            return
        self.drafts += 1
        self.drafted_tokens += proposed
        self.accepted_tokens += accepted
        self._misses = 0 if accepted else self._misses + 1
        self.pause = min(2**self._misses - 1, LONGEST_PAUSE)

    def end(self, finish: Finish, message: str = "") -> TextOutput:
        """Ends the text; what was held back belongs to it unless a stop string was met. Returns the last output."""
        self.ended = True
        rest = ""
        try:
            if not self._stops.met:
                rest = self._stops.push(self._decoder.flush())
                if not self._stops.met:
                    rest += self._stops.flush()
        except Exception as error:  # Whatever a tokenizer raises: whoever reads must see the end.
            finish, message = Finish.error, message or reason(error)
        now = time.monotonic()
        return self._put(
            rest,
            finish=finish,
            message=message,
            adapter_name=self.request.adapter_name,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            queried_tokens=self.prompt_tokens if self.shares and self.started is not None else 0,
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            started=self.started is not None,
            submitted_ns=self.submitted_ns,
            queue_seconds=(self.started or now) - self.submitted,
            first_token_seconds=None if self.answered is None else self.answered - self.submitted,
            seconds=now - self.submitted,
        )

    def _score(self, first: int, ids: list[int], logprobs: list[Logprob]) -> None:
        # A text that lost its pages is read, and scored, again.
        known = max(self._scored - first, 0)
        self._prompt_ids += ids[known:]
        self._prompt_logprobs += logprobs[known:]
        self._scored += len(ids[known:])

    def _put(self, text: str, **last: Any) -> TextOutput:
        """Hands on a text with the tokens that were held for it."""
        output = TextOutput(text=text, token_ids=self._ids, **last)
        self._ids = []
        if self._logprobs:
            output.logprobs, self._logprobs = self._logprobs, []
        if self._prompt_ids:
            output.prompt_ids, self._prompt_ids = self._prompt_ids, []
            output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        self.stream.put(output)
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One step of the engine."""

    decode_rows: int
    """Texts that read one token."""
    prefill_tokens: int
    """Prompt tokens that were read."""
    bucket: str
    """The program that ran, such as ``decode 16 rows x 64 pages``."""
    padded_tokens: int
    """Positions of the program that held no token."""
    pages_in_use: int
    pages_total: int
    running: int
    waiting: int
    preempted: int
    """Texts that lost their pages to this step."""
    host_seconds: float
    """Scheduling, arguments of programs, detokenising and handing out: the loop's time without waiting for the device, which runs meanwhile."""
    seconds: float
    """Wall time from step to step."""
    compiled: bool = False
    """Whether the program had to be compiled, which never happens after the engine is ready."""


class EngineLoad(NamedTuple):
    """Texts and pages that an engine holds."""

    running: int
    """Texts in the step."""
    waiting: int
    pages_in_use: int
    pages_total: int


class EngineWatcher(Protocol):
    """Whoever is told; its methods return at once, and are called from the engine's thread."""

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        ...

    def ended(self, output: TextOutput, load: EngineLoad) -> None:
        """After each request, with its last output and the load without it."""
        ...
