"""The loop that serves a language model: takes requests, runs steps, hands out text."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from systolic.core.errors import RunError
from systolic.inference.grammar import Grammars
from systolic.job.serving_memory import ServingMemory
from systolic.serving.facts import COUNT, count_compiles
from systolic.serving.request import RefusedError
from systolic.serving.text.converting import memory_of
from systolic.serving.text.request import Finish, Stream, TextRequest
from systolic.serving.text.runner import BIASES, StepInFlight, StepRunner
from systolic.serving.text.scheduler import Scheduler, StepWork
from systolic.serving.text.sequence import EngineLoad, EngineWatcher, Sequence, StepFacts, reason

if TYPE_CHECKING:
    import numpy as np

    from systolic.data.text.tokenizer import Tokenizer

IDLE_SECONDS = 0.2
"""Between turns of the loop where there is nothing to do: its heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of an engine."""

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
        self.grammars = Grammars(tokenizer, runner.vocab, self.ends)
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._cancelled: deque[Sequence] = deque()
        self._orders: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._live: dict[int, Sequence] = {}
        self._by_stream: dict[Stream, Sequence] = {}
        self._number = 0
        self._closing = False
        self._stopped = threading.Event()
        self._failed: str | None = None
        self._flight: StepInFlight | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="systolic-engine", daemon=True)

    # From any thread

    @property
    def context(self) -> int:
        """See :class:`systolic.serving.text.request.TextEngine`."""
        return self.bounds.context

    @property
    def memory(self) -> ServingMemory:
        """Memory of its device."""
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
            sequences = list(self._by_stream.values())
        return sum(sequence.max_length - sequence.read for sequence in sequences)

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
            sequence = Sequence(
                number=self._number,
                request=request,
                stream=stream,
                tokenizer=self.tokenizer,
                ends=frozenset() if request.ignore_ends and not request.grammar else self.ends,
                context=self.context,
            )
            self._by_stream[stream] = sequence
            self._arrived.append(sequence)
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

    def num_texts(self, root: bytes) -> tuple[int, int]:
        """Texts that run, and that wait for their first step, under a key of the empty text: those of one version of an adapter."""
        with self._changed:
            sequences = [own for own in self._by_stream.values() if own.request.root == root]
        waiting = sum(own.started is None for own in sequences)
        return len(sequences) - waiting, waiting

    def place_adapter(self, number: int, matrices: Mapping[str, "np.ndarray"]) -> None:
        """Puts an adapter in the place of a number between two steps, where no text has that number; returns when it is done.

        Raises:
            RunError: the engine has ended.
        """
        self._order(lambda: self.runner.place(number, matrices))

    def end_texts(self, root: bytes, message: str) -> None:
        """Ends the texts under a key of the empty text, with a message; returns when none is left."""

        def end() -> None:
            for sequence in list(self._live.values()):
                if sequence.request.root == root:
                    self._end(sequence, Finish.cancelled, message)

        self._order(end)

    def _order(self, work: Callable[[], None]) -> None:
        """Does work in the thread that owns the device, or at once where it has not begun."""
        done: Future[None] = Future()
        with self._changed:
            if self._stopped.is_set():
                raise self._ended()
            began = self._thread.ident is not None
            if began:
                self._orders.append((work, done))
                self._changed.notify()
        if began:
            done.result()
        else:
            work()

    def _ended(self) -> RunError:
        return RunError(f"the engine has ended: {self._failed or 'it was told to'}")

    def _check(self, request: TextRequest) -> None:
        size, vocab = len(request.tokens), self.runner.vocab
        if not size:
            raise RefusedError("the prompt has no tokens; give at least one", parameter="prompt")
        if size >= self.context:
            raise RefusedError(
                f"the prompt has {size} tokens and a text here has at most {self.context} with its answer; give a shorter prompt",
                parameter="prompt",
            )
        if wrong := next((token for token in request.tokens if not 0 <= token < vocab), None):
            raise RefusedError(
                f"{wrong} is no token of this model, which has {vocab}", parameter="prompt"
            )
        biased = {*request.sampling.logit_bias}
        if request.min_tokens:
            biased |= {*request.stop_tokens, *(() if request.ignore_ends else self.ends)}
        if len(biased) > BIASES:
            what = "logit_bias" if len(request.sampling.logit_bias) > BIASES else "stop_token_ids"
            ends = "" if what == "logit_bias" else ", with the tokens that min_tokens holds back,"
            raise RefusedError(
                f"logit_bias{ends} has {len(biased)} tokens and at most {BIASES} are taken; leave some out",
                parameter=what,
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
        waiting = [s for s in self._by_stream.values() if s.started is None]
        if len(waiting) >= self.bounds.queued:
            raise RefusedError(
                f"{len(waiting)} requests wait, which is the most; come back", retry_seconds=1
            )
        tokens = sum(sequence.prompt_tokens for sequence in waiting)
        if waiting and tokens + len(request.tokens) > self.bounds.queued_tokens:
            raise RefusedError(
                f"requests with {tokens} prompt tokens wait, and {self.bounds.queued_tokens} may; come back",
                retry_seconds=1,
            )

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            sequence = self._by_stream.get(stream)
            if sequence is not None:
                self._cancelled.append(sequence)
                self._changed.notify()

    # In the engine's thread

    def step(self) -> bool:
        """Schedules a step, runs it, and collects the one before; False where the loop shall end.

        The device computes a step while the host hands out the tokens of the one before, which are pending until then.
        Where a choice depends on them, by penalties or a grammar, the device computes its logits meanwhile; proposals are made and
        verified when they are known.
        """
        flight, self._flight = self._flight, None
        compiles = COUNT.compiled
        if not self._take(waits=flight is None):
            return False
        begin, waited = time.perf_counter(), 0.0
        if flight is not None and (flight.verifies or self.scheduler.proposes):
            waited, flight = self._collect(flight), None

        def settle() -> None:
            nonlocal flight, waited
            if flight is not None:
                flight, before = None, flight
                waited = self._collect(before)

        work = self.scheduler.schedule()
        if work:
            self._flight = self._run(work, settle)
        settle()
        self._report(time.perf_counter() - begin, waited, COUNT.compiled > compiles)
        return True

    def _loop(self) -> None:
        try:
            count_compiles()
            self._beat = time.monotonic()
            while self.step():
                self._beat = time.monotonic()
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._stopped.set()
            for _, done in self._orders:
                done.set_exception(self._ended())

    def _take(self, waits: bool) -> bool:
        """Takes what was left in the queues; False where the loop shall end."""
        now = time.monotonic()
        with self._changed:
            busy = self.scheduler.running or self.scheduler.waiting
            left = self._arrived or self._cancelled or self._orders
            if waits and not (busy or left or self._closing):
                self._changed.wait(IDLE_SECONDS)
            arrived, self._arrived = self._arrived, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            closing = self._closing
        for sequence in arrived:
            self._live[sequence.number] = sequence
            self.scheduler.add(sequence)
        for sequence in cancelled:
            self._end(sequence, Finish.cancelled)
        while self._orders:
            work, done = self._orders.popleft()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
        for sequence in list(self._live.values()):
            if sequence.deadline is not None and now >= sequence.deadline:
                self._end(sequence, Finish.deadline)
        return bool(not closing or self._live or not waits)

    def _run(self, work: StepWork, settle: Callable[[], None]) -> StepInFlight:
        """Starts a step; sequences whose settings it cannot take end, and no others."""
        flight = self.runner.run(work, settle)
        for call in flight.calls:
            for sequence, error in call.broken:
                self._end(sequence, Finish.error, reason(error))
        return flight

    def _collect(self, flight: StepInFlight) -> float:
        """Hands out what a step chose; seconds of waiting for the device."""
        begin = time.perf_counter()
        results = self.runner.collect(flight)
        waited = time.perf_counter() - begin
        for sequence, token, logprob, top, scores, read in results:
            if sequence.ended:
                continue
            try:
                finish = sequence.push(token, logprob, top, scores)
            except Exception as error:  # A text's own fault, such as its decoder's, ends no other.
                self._end(sequence, Finish.error, reason(error))
                continue
            self.scheduler.publish(sequence, read)
            if finish is not None:
                self._end(sequence, finish)
        return waited

    def _end(self, sequence: Sequence, finish: Finish, message: str = "") -> None:
        if sequence.ended:
            return
        self.scheduler.remove(sequence)
        self._live.pop(sequence.number, None)
        output = sequence.end(finish, message)
        with self._changed:
            self._by_stream.pop(sequence.stream, None)
        if self.watcher is not None:
            self.watcher.ended(output, self._load())

    def _load(self) -> EngineLoad:
        scheduler, pool = self.scheduler, self.scheduler.pool
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return EngineLoad(running, waiting, pool.in_use, pool.total)

    def _report(self, seconds: float, waited: float, compiled: bool) -> None:
        """Tells of the step that was started.

        Raises:
            RunError: it had to be compiled, and that shall end the engine.
        """
        if compiled and self.bounds.strict:
            raise RunError("a program was compiled after the engine was ready")
        if self._flight is None or self.watcher is None:
            return
        calls, load = self._flight.calls, self._load()
        for number, call in enumerate(calls):
            self.watcher.stepped(
                StepFacts(
                    decode_rows=call.rows,
                    prefill_tokens=call.prompt,
                    bucket=call.bucket,
                    padded_tokens=call.padded_tokens,
                    pages_in_use=load.pages_in_use,
                    pages_total=load.pages_total,
                    running=load.running,
                    waiting=load.waiting,
                    preempted=0 if number else self._flight.preempted,
                    host_seconds=max(0.0, seconds - waited) / len(calls),
                    seconds=seconds / len(calls),
                    compiled=compiled and not number,
                )
            )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed = reason(error)
            left = list(self._by_stream.values())
        message = f"the engine stopped: {self._failed}"
        for sequence in left:
            try:
                self._end(sequence, Finish.error, message)
            except Exception:  # The scheduler itself may be what failed; every reader sees an end.
                if not sequence.ended:
                    sequence.end(Finish.error, message)
