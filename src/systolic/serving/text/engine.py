"""The loop that serves a language model: takes requests, runs steps, hands out text."""

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from systolic.core.errors import RunError
from systolic.forecasting.serving_memory import ServingMemory
from systolic.serving.compiles import COUNT, count_compiles
from systolic.serving.errors import RefusedError
from systolic.serving.text.facts import EngineWatcher, RequestFacts, StepFacts
from systolic.serving.text.memory import memory_of
from systolic.serving.text.request import Finish, Stream, TextRequest
from systolic.serving.text.runner import BIASES, StepInFlight, StepRunner
from systolic.serving.text.scheduler import Scheduler, StepWork
from systolic.serving.text.sequence import Answer, Made, reason

if TYPE_CHECKING:
    from systolic.data.text.tokenizer import Tokenizer

IDLE_SECONDS = 0.2
"""Between turns of the loop where there is nothing to do: its heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What an engine takes."""

    context: int
    """Tokens of a text."""
    queued: int = 1024
    """Requests that may wait."""
    queued_tokens: int = 1 << 20
    """Prompt tokens that may wait."""
    strict: bool = False
    """Whether a compile after the start ends the engine."""


class Engine:
    """Implements :class:`systolic.serving.text.request.TextEngine`.

    One thread owns the scheduler and the device; other threads leave requests and cancels in a queue.

    Args:
        runner: Its compiled programs and pages.
        scheduler: Over the same pages.
        tokenizer: Of the texts.
        ends: Ids that end a text.
        bounds: What it takes.
        watcher: Told about steps and requests.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        tokenizer: "Tokenizer",
        ends: Collection[int],
        bounds: Bounds,
        watcher: EngineWatcher | None = None,
    ) -> None:
        self.runner, self.scheduler, self.bounds = runner, scheduler, bounds
        self.tokenizer, self.ends, self.watcher = tokenizer, frozenset(ends), watcher
        self._changed = threading.Condition()
        self._arrived: deque[Answer] = deque()
        self._cancelled: deque[Answer] = deque()
        self._live: dict[int, Answer] = {}
        self._by_stream: dict[Stream, Answer] = {}
        self._number = 0
        self._closing = False
        self._stopped = threading.Event()
        self._failed: str | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="systolic-engine", daemon=True)

    # From any thread

    @property
    def context(self) -> int:
        """See :class:`systolic.serving.text.request.TextEngine`."""
        return self.bounds.context

    @property
    def memory(self) -> ServingMemory:
        """Of its device."""
        programs = self.runner.programs
        return memory_of(programs, programs.pages)

    @property
    def heartbeat_seconds(self) -> float:
        """Since the loop last turned."""
        return time.monotonic() - self._beat

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing and self._failed is None

    @property
    def live(self) -> int:
        """Requests that wait or run."""
        return len(self._by_stream)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of its requests that it has not read or made yet."""
        with self._changed:
            answers = list(self._by_stream.values())
        return sum(answer.text.most - answer.text.read for answer in answers)

    def start(self) -> None:
        """Starts the loop."""
        self._thread.start()

    def submit(self, request: TextRequest) -> Stream:
        """See :class:`systolic.serving.text.request.TextEngine`."""
        self._check(request)
        with self._changed:
            self._admit(request)
            self._number += 1
            stream = Stream(self._cancel)
            answer = Answer(
                number=self._number,
                request=request,
                stream=stream,
                tokenizer=self.tokenizer,
                ends=frozenset() if request.ignore_ends else self.ends,
                context=self.context,
            )
            self._by_stream[stream] = answer
            self._arrived.append(answer)
            self._changed.notify()
        return stream

    def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits for those it has; whether all ended in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        return self._stopped.wait(seconds)

    def stop(self) -> None:
        """Ends every request at once, and the loop."""
        with self._changed:
            self._closing = True
            self._cancelled.extend(self._by_stream.values())
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _check(self, request: TextRequest) -> None:
        size, vocab = len(request.tokens), self.runner.vocab
        if not size:
            raise RefusedError("the prompt has no tokens; give at least one", parameter="prompt")
        if size >= self.context:
            raise RefusedError(
                f"the prompt has {size} tokens and a text here has at most {self.context} with its answer; give a shorter prompt",
                parameter="prompt",
            )
        if wrong := next((one for one in request.tokens if not 0 <= one < vocab), None):
            raise RefusedError(
                f"{wrong} is no token of this model, which has {vocab}", parameter="prompt"
            )
        bias = request.sampling.logit_bias
        if len(bias) > BIASES:
            raise RefusedError(
                f"logit_bias has {len(bias)} tokens and at most {BIASES} are taken; leave some out",
                parameter="logit_bias",
            )
        if not self.scheduler.fits(min(size + request.max_tokens, self.context)):
            raise RefusedError(
                f"a text of {size} and up to {request.max_tokens} tokens needs more pages than the {self.scheduler.pool.total} there are; ask for fewer tokens",
                parameter="max_tokens",
            )

    def _admit(self, request: TextRequest) -> None:
        """Raises where the queue is full; under the lock."""
        if self._failed is not None:
            raise RefusedError(f"the engine has stopped: {self._failed}", retry_seconds=5)
        if self._closing:
            raise RefusedError("the server is shutting down", retry_seconds=5)
        # The scheduler's own queue belongs to the engine's thread.
        waiting = [one for one in self._by_stream.values() if one.begun is None]
        if len(waiting) >= self.bounds.queued:
            raise RefusedError(
                f"{len(waiting)} requests wait, which is the most; come back", retry_seconds=1
            )
        tokens = sum(len(one.request.tokens) for one in waiting)
        if waiting and tokens + len(request.tokens) > self.bounds.queued_tokens:
            raise RefusedError(
                f"requests with {tokens} prompt tokens wait, and {self.bounds.queued_tokens} may; come back",
                retry_seconds=1,
            )

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            answer = self._by_stream.get(stream)
            if answer is not None:
                self._cancelled.append(answer)
                self._changed.notify()

    # In the engine's thread

    def _run(self) -> None:
        try:
            flight: StepInFlight | None = None
            count_compiles()
            while True:
                self._beat = time.monotonic()
                if not self._take(waits=flight is None):
                    break
                begin, collected = time.perf_counter(), 0.0
                if flight is not None and any(one.looks_back for one in self._live.values()):
                    chosen = self.runner.collect(flight)
                    collected = time.perf_counter() - begin
                    self._hand_out(chosen)
                    flight = None
                work = self.scheduler.next()
                compiles = COUNT.compiled
                following = self._dispatch(work) if work else None
                dispatched = time.perf_counter()
                if flight is not None:
                    chosen = self.runner.collect(flight)
                    waited = time.perf_counter()
                    self._hand_out(chosen)
                    collected = waited - dispatched
                compiled = COUNT.compiled > compiles
                if compiled and self.bounds.strict:
                    raise RunError("a program was compiled after the engine was ready")
                if following is not None and self.watcher is not None:
                    self._tell(following, time.perf_counter() - begin, collected, compiled)
                flight = following
        except BaseException as error:
            self._fail(error)
        finally:
            self._stopped.set()

    def _take(self, waits: bool) -> bool:
        """Takes what was left in the queues; False where the loop shall end."""
        now = time.monotonic()
        with self._changed:
            busy = self.scheduler.running or self.scheduler.waiting
            if waits and not (busy or self._arrived or self._cancelled or self._closing):
                self._changed.wait(IDLE_SECONDS)
            arrived, self._arrived = self._arrived, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            closing = self._closing
        for answer in arrived:
            self._live[answer.number] = answer
            self.scheduler.add(answer.text)
        for answer in cancelled:
            self._end(answer, Finish.cancelled)
        for answer in list(self._live.values()):
            if answer.deadline is not None and now >= answer.deadline:
                self._end(answer, Finish.deadline)
        return bool(not closing or self._live or not waits)

    def _dispatch(self, work: StepWork) -> StepInFlight:
        """Starts a step; texts whose settings it cannot take end, and no others."""
        flight = self.runner.dispatch(work, self._live)
        for call in flight.calls:
            for answer, error in call.broken:
                self._end(answer, Finish.error, reason(error))
        return flight

    def _hand_out(self, chosen: list[tuple[Answer, Made]]) -> None:
        for answer, token in chosen:
            if answer.ended:
                continue
            try:
                finish = answer.push(token)
            except Exception as error:  # A text's own fault, such as its decoder's, ends no other.
                self._end(answer, Finish.error, reason(error))
                continue
            self.scheduler.publish(answer.text, token.read)
            if finish is not None:
                self._end(answer, finish)

    def _end(self, answer: Answer, finish: Finish, message: str = "") -> None:
        if answer.ended:
            return
        self.scheduler.remove(answer.text)
        self._live.pop(answer.number, None)
        answer.end(finish, message)
        with self._changed:
            self._by_stream.pop(answer.stream, None)
        if self.watcher is not None:
            self.watcher.ended(
                RequestFacts(
                    prompt_tokens=answer.text.prompt,
                    completion_tokens=answer.made,
                    cached_tokens=answer.text.reused,
                    queried_tokens=answer.queried_tokens,
                    finish=finish,
                    queue_seconds=answer.queue_seconds,
                    first_token_seconds=answer.first_token_seconds,
                    seconds=time.monotonic() - answer.submitted,
                    begun=answer.begun is not None,
                    running=len(self.scheduler.running),
                    waiting=len(self.scheduler.waiting),
                    pages_in_use=self.scheduler.pool.in_use,
                )
            )

    def _tell(self, flight: StepInFlight, seconds: float, waited: float, compiled: bool) -> None:
        assert self.watcher is not None
        pool = self.scheduler.pool
        for call in flight.calls:
            self.watcher.stepped(
                StepFacts(
                    decode_rows=call.rows,
                    prefill_tokens=call.prompt,
                    bucket=str(call.shape),
                    padded_tokens=call.shape.tokens - call.rows - call.prompt,
                    pages_in_use=pool.in_use,
                    pages_total=pool.total,
                    running=len(self.scheduler.running),
                    waiting=len(self.scheduler.waiting),
                    preempted=flight.preempted if call is flight.calls[0] else 0,
                    host_seconds=max(0.0, seconds - waited) / len(flight.calls),
                    seconds=seconds / len(flight.calls),
                    compiled=compiled and call is flight.calls[0],
                )
            )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed = reason(error)
            left = list(self._by_stream.values())
        message = f"the engine stopped: {self._failed}"
        for answer in left:
            try:
                self._end(answer, Finish.error, message)
            except Exception:  # The scheduler itself may be what failed; every reader sees an end.
                if not answer.ended:
                    answer.end(Finish.error, message)
