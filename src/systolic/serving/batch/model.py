"""A model that answers whole requests in batches: its threads, which are replaced when one dies, and the end of each request, once, by whoever is first."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakMethod, ref

import numpy as np

from systolic.chips.host import num_cpus
from systolic.compiling.program_store import ProgramStore
from systolic.core.errors import DataError, OptionError, RunError, SystolicError
from systolic.data.audio import Recordings
from systolic.data.text.text_data import Sentences
from systolic.inference.predictor import Example, FixedForm, Predictor, SpeechReader, TextReader
from systolic.inference.rows import Bucket
from systolic.job.data import Data
from systolic.models.encoder.config import Encoder
from systolic.serving.batch.batch_queue import BatchCall, BatchQueue, BatchRequest, Lanes, QueuedRow
from systolic.serving.batch.buckets import (
    BatchOptions,
    BucketGrid,
    InputLimits,
    Recorder,
    Traffic,
    choose,
)
from systolic.serving.batch.intake import (
    ArrayIntake,
    ImageIntake,
    Inputs,
    Intake,
    SpeechIntake,
    TextIntake,
    size_of,
    used_inputs,
)
from systolic.serving.facts import (
    COUNT,
    BatchFacts,
    BatchWatcher,
    CompileFacts,
    Ended,
    count_compiles,
)
from systolic.serving.request import ArraySpec, ExpiredError, ModelKind
from systolic.steps.step_functions import StepFunctions

RECENT = 0.1
"""Weight of a batch in the recent time of a row."""
ROUNDS, MEASURED_SECONDS = 5, 2.0
"""Calls of each program, of which the fastest is its time; two where more would take longer in all."""
CORE_POSITIONS = 256
"""Positions of a call for each core of a CPU: a larger call takes no less time for each of them. A text of 128 tokens takes 36 CPU ms of
MiniLM alone, 31 in a call of 8 and 35 in one of 32."""
COMPILERS = min(os.cpu_count() or 1, 8)
"""Programs that are compiled at once."""


class Completions:
    """Answers and failures of a model's requests."""

    def __init__(
        self, name: str, queue: BatchQueue, intake: Intake, watcher: BatchWatcher | None
    ) -> None:
        self._name, self._queue, self._intake, self._watcher = name, queue, intake, watcher

    def answer(self, request: BatchRequest) -> None:
        """Ends a request whose outputs are all there; one that is late has expired."""
        if request.deadline is not None and time.monotonic() >= request.deadline:
            self.expire(request)
            return
        try:
            answer = self._intake.answer_of(request.examples, request.outputs)
        except Exception as error:
            self.fail(
                request, Ended.failed, RunError(f"{self._name} made no answer ({line(error)})")
            )
            return
        if self._queue.end(request):
            request.future.set_result(answer)
            self._tell(request, Ended.answered)

    def fail(self, request: BatchRequest, ended: Ended, error: SystolicError) -> None:
        """Ends a request with an error, unless it has ended."""
        if not self._queue.end(request):
            return
        if request.begin():
            request.future.set_exception(error)
        else:
            ended = Ended.cancelled
        self._tell(request, ended)

    def refuse(self, request: BatchRequest, error: BaseException) -> None:
        """Ends a request whose input can't be read."""
        known = (
            error
            if isinstance(error, SystolicError)
            else DataError(f"the input can't be read ({line(error)}); check the file")
        )
        self.fail(request, Ended.refused, known)

    def expire(self, request: BatchRequest) -> None:
        """Ends a request whose deadline has passed."""
        assert request.deadline is not None
        seconds = request.deadline - request.submitted
        self.fail(
            request,
            Ended.expired,
            ExpiredError(
                f"{self._name} had no answer within {seconds:g} s; allow more, or try again"
            ),
        )

    def cancel(self, request: BatchRequest) -> None:
        """Ends a request whose future was cancelled."""
        if request.future.cancelled() and self._queue.end(request):
            self._tell(request, Ended.cancelled)

    def canceller(self, request: BatchRequest) -> Callable[[object], None]:
        """Callback of a request's future, which keeps its callbacks: this one keeps neither the request nor, by it, the model."""
        known = ref(request)

        def cancel(future: object) -> None:
            if (request := known()) is not None:
                self.cancel(request)

        return cancel

    def _tell(self, request: BatchRequest, ended: Ended) -> None:
        try:
            if self._watcher is not None:
                self._watcher.answered(request.facts(ended))
        finally:
            request.examples, request.outputs = [], []
            self._queue.forget(request)


def line(error: BaseException) -> str:
    """An error of a library as one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class Workers:
    """Threads between a queue and a predictor.

    Args:
        name: Of the model, for messages.
        queue: Where batches come from.
        predictor: The programs.
        completions: Where answers go.
        watcher: Told of batches.
        strict: Called with the reason after a compile, to end the model; None lets it go on. Its object, which
            holds the workers, is not held by them: a model that was closed gives its weights back at once.
        recorder: Of traffic; by default one of its own.

    Attributes:
        recorder: Traffic so far.
        compiles: Compiles that should not have happened.
        replaced: Threads that died and were replaced.
    """

    def __init__(
        self,
        name: str,
        queue: BatchQueue,
        predictor: Predictor,
        completions: Completions,
        watcher: BatchWatcher | None,
        *,
        strict: Callable[[str], None] | None,
        recorder: Recorder | None = None,
    ) -> None:
        self._name, self._queue, self._predictor = name, queue, predictor
        self._completions, self._watcher = completions, watcher
        self._strict = None if strict is None else WeakMethod(strict)
        self._busy: dict[int, float] = {}
        self.recorder = recorder or Recorder()
        self.compiles = self.replaced = 0

    def hire(self, number: int) -> None:
        """Starts a thread."""
        threading.Thread(target=self._work, args=(number,), name=f"systolic-batch-{number}").start()

    def busy_seconds(self) -> float:
        """Time of the longest call that is running."""
        since = min(list(self._busy.values()), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def _work(self, number: int) -> None:
        call: BatchCall | None = None
        try:
            while (call := self._queue.take()) is not None:
                self._busy[number] = time.monotonic()
                self._run(call.rows, call)
                self._busy.pop(number, None)
                call = None
        except BaseException as error:  # whatever ends a thread, its requests get an answer
            self._busy.pop(number, None)
            if self._watcher is not None:
                self._watcher.died(line(error))
            if call is not None:
                reason = RunError(
                    f"the worker of {self._name} that held the request died ({line(error)}); send it again"
                )
                for waiting in call.rows:
                    self._completions.fail(waiting.request, Ended.failed, reason)
            self.replaced += 1
            self.hire(number)

    def _run(self, rows: Sequence[QueuedRow], call: BatchCall) -> None:
        """A call, and its answers; where it fails, its requests are tried one by one."""
        compiled, start = COUNT.compiled, time.perf_counter()
        try:
            outputs = self._predictor([waiting.row for waiting in rows], call.bucket)
        except Exception as error:
            self._failed(rows, call, error)
            return
        if COUNT.compiled > compiled:
            self._compiled(call.bucket, time.perf_counter() - start)
            if self._strict is not None:
                if (end := self._strict()) is not None:
                    end(f"the program of {call.bucket} was compiled after {self._name} was ready")
                return
        seconds = time.perf_counter() - start
        each = seconds / len(rows)
        recent = self._queue.seconds_per_row
        self._queue.seconds_per_row = recent + RECENT * (each - recent) if recent else each
        ready = [
            waiting.request
            for waiting, output in zip(rows, outputs, strict=True)
            if self._queue.done(waiting, output, seconds)
        ]
        for request in ready:
            self._completions.answer(request)
        self._tell(rows, call, start, seconds)

    def _failed(self, rows: Sequence[QueuedRow], call: BatchCall, error: Exception) -> None:
        requests = {waiting.request: None for waiting in rows}
        if len(requests) == 1:
            (request,) = requests
            reason = RunError(
                f"{self._name} could not compute the request ({line(error)}); send it again"
            )
            self._completions.fail(request, Ended.failed, reason)
            return
        for request in requests:
            self._run([waiting for waiting in rows if waiting.request is request], call)

    def _compiled(self, bucket: Bucket, seconds: float) -> None:
        """A broken promise."""
        self.compiles += 1
        if self._watcher is not None:
            facts = CompileFacts(
                bucket=str(bucket), seconds=seconds, cached=False, after_ready=True
            )
            self._watcher.compiled(facts)

    def _tell(
        self, rows: Sequence[QueuedRow], call: BatchCall, start: float, seconds: float
    ) -> None:
        lengths = [waiting.row.length for waiting in rows]
        self.recorder.record(call.waited, lengths)
        if self._watcher is None:
            return
        held = sum(lengths) if call.bucket.length else len(rows)
        oldest = min(waiting.since for waiting in rows)
        self._watcher.ran(
            BatchFacts(
                bucket=str(call.bucket),
                examples=len(rows),
                rows=call.bucket.rows,
                useful_positions=held,
                padded_positions=call.bucket.positions - held,
                padding_share=1 - held / call.bucket.positions,
                requests=len({waiting.request for waiting in rows}),
                waiting=self._queue.waiting,
                queue_seconds=max(min(w.request.taken or oldest for w in rows) - oldest, 0.0),
                compute_seconds=seconds,
            )
        )


class DynamicBatches:
    """A model over a predictor that answers requests of one or more examples each.

    Inputs and outputs by kind; every array has one entry per example, [n] or [n, ...]:

    ============== ====================================================== ===================================
    kind           inputs                                                 outputs
    ============== ====================================================== ===================================
    image          ``image``: bytes[n], files (JPEG, PNG, ...) that get   ``label`` int32[n, k], ``probability``
                   the model's own preparation; or                        float32[n, k], best first, and
                   uint8[n, side, side, channels] as they are             ``name`` bytes[n, k] of the labels
    embedding      ``text``: bytes[n]; an element may be an int array of  ``embedding`` float32[n, d_model],
                   token ids instead                                      ``tokens`` int32[n]
    transcription  ``audio``: bytes[n], files (WAV, FLAC, ...); or        ``text`` and ``language`` bytes[n],
                   float32[n, samples] of 16 kHz; ``language``: bytes[n]  ``seconds`` float32[n], ``segments``
                   of codes or names, which may be left out               bytes[n]: JSON [{"start", "end", "text"}]
    tensors        the program's inputs                                   the program's outputs
    ============== ====================================================== ===================================

    Args:
        name: For messages.
        intake: What requests hold.
        predictor: The programs.
        options: Batches, queue and limits.
        watcher: Told of compiles, batches and answers.
        recorder: Of traffic; by default one of its own.

    Attributes:
        buckets: The buckets, with the expected padding; known before :meth:`start`.
    """

    def __init__(
        self,
        name: str,
        intake: Intake,
        predictor: Predictor,
        options: BatchOptions | None = None,
        watcher: BatchWatcher | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._name, self._intake, self._predictor = name, intake, predictor
        self._options, self._watcher = options or BatchOptions(), watcher
        self.buckets = buckets_of(intake, self._options)
        self._outputs = intake.outputs(predictor.outputs(self.buckets.all[0]))
        self._queue = BatchQueue(
            Lanes(self.buckets, intake.alone is not None),
            most=self._options.waiting,
            most_bytes=self._options.waiting_bytes,
            delay_seconds=self._options.delay_ms / 1e3,
            name=name,
        )
        self._completions = Completions(name, self._queue, intake, watcher)
        self._workers = Workers(
            name,
            self._queue,
            predictor,
            self._completions,
            watcher,
            strict=self._fail if self._options.strict else None,
            recorder=recorder,
        )
        self._readers = ThreadPoolExecutor(self._options.readers, "systolic-read")
        self._started = self._ended = False
        self._failed: float | None = None
        if watcher is not None:
            queue = self._queue  # A closed model is kept by nobody who asks how many wait.
            watcher.opened(lambda: queue.waiting)

    # What it is

    @property
    def name(self) -> str:
        """For messages."""
        return self._name

    @property
    def kind(self) -> ModelKind:
        """Its task."""
        return self._intake.kind

    @property
    def inputs(self) -> Sequence[ArraySpec]:
        """Arrays of a request; an encoded input has one dim and the dtype BYTES."""
        return self._intake.inputs

    @property
    def outputs(self) -> Sequence[ArraySpec]:
        """Arrays of an answer."""
        return self._outputs

    @property
    def labels(self) -> Sequence[str]:
        """Names of classes in label order; () where there are none."""
        return self._intake.labels

    @property
    def reader(self) -> TextReader | None:
        """Its tokenizer's side; None for a model that reads no texts."""
        return self._intake.reader

    @property
    def traffic(self) -> Traffic:
        """Traffic so far, for the choice of buckets at the next start."""
        return self._workers.recorder.traffic

    @property
    def waiting(self) -> int:
        """Examples that no batch holds yet."""
        return self._queue.waiting

    @property
    def compiles_after_ready(self) -> int:
        """Batches that compiled something after the model was ready."""
        return self._workers.compiles

    @property
    def replaced(self) -> int:
        """Workers that died and were replaced."""
        return self._workers.replaced

    # Its life

    def start(self) -> None:
        """Compiles and measures every program, then starts the workers; returns when it is ready."""
        count_compiles()
        self._compile()
        if self._intake.form.steady:
            self._queue.lanes.seconds = ascending(self._measured())
        else:
            for bucket in self.buckets.all:
                self._predictor([], bucket)
        for number in range(self._options.workers):
            self._workers.hire(number)
        threading.Thread(target=self._watch_deadlines, name="systolic-deadlines").start()
        self._started = True
        self._queue.open()

    def _compile(self) -> None:
        """Makes all programs, several at once: the first one also prepares weights that all share."""

        buckets = self.buckets.all

        def make(number: int) -> CompileFacts:
            program = self._predictor.compile(buckets[number])
            return CompileFacts(
                bucket=str(buckets[number]),
                seconds=0.0 if program is None else program.total_seconds,
                cached=program is not None and program.cached,
                phases={} if program is None else program.seconds,
                shared=program is None,
                done=number + 1,
                programs=len(buckets),
            )

        first = [make(0)]
        with ThreadPoolExecutor(COMPILERS, "systolic-compile") as threads:
            for facts in itertools.chain(first, threads.map(make, range(1, len(buckets)))):
                if self._watcher is not None:
                    self._watcher.compiled(facts)

    def _measured(self) -> dict[Bucket, float]:
        """Seconds of each program on padding alone; the first calls also load the programs.

        Every round calls every program, so that a busy moment of the machine slows no program in all its calls.
        """
        best: dict[Bucket, float] = dict.fromkeys(self.buckets.all, float("inf"))
        begin = time.perf_counter()
        for turn in range(ROUNDS):
            for bucket, known in best.items():
                if turn > 1 and time.perf_counter() - begin > MEASURED_SECONDS:
                    return best
                start = time.perf_counter()
                self._predictor([], bucket)
                best[bucket] = min(known, time.perf_counter() - start)
        return best

    def _watch_deadlines(self) -> None:
        while self._queue.expired(self._completions.expire):
            pass

    @property
    def ready(self) -> bool:
        """Whether every program is compiled, requests are taken and no worker is stuck."""
        stuck = self._workers.busy_seconds() > self._options.stalled_seconds
        return self._started and not self._ended and not stuck

    @property
    def heartbeat_seconds(self) -> float:
        """Since it failed, or a worker was found stuck; 0 while all is well."""
        if self._failed is not None:
            return time.monotonic() - self._failed
        return max(self._workers.busy_seconds() - self._options.stalled_seconds, 0.0)

    def drain(self, seconds: float) -> bool:
        """Refuses new requests, and waits until those that were taken are answered, or fail with RunError; False where time ran out."""
        self._queue.close("ends")
        self._ended = True
        finished = self._queue.empty(seconds)
        self.close()
        return finished

    def close(self) -> None:
        """Ends at once; requests that are left fail with RunError."""
        self._ended = True
        self._queue.close("has ended")
        for request in self._queue.stop():
            self._end(request)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _fail(self, reason: str) -> None:
        """Ends for a reason that whoever waits is told."""
        self._ended, self._failed = True, time.monotonic()
        self._queue.close(f"has failed ({reason})")
        for request in self._queue.stop():
            self._completions.fail(request, Ended.failed, RunError(reason))

    def _end(self, request: BatchRequest) -> None:
        reason = RunError(f"{self._name} ended before the answer was known; ask again")
        self._completions.fail(request, Ended.failed, reason)

    # Requests

    def submit(
        self, inputs: Inputs, *, deadline_seconds: float | None = None
    ) -> "Future[Mapping[str, np.ndarray]]":
        """Queues a request; returns at once, from any thread.

        ``Future.cancel`` drops a request that no batch holds yet; ``asyncio.wrap_future`` awaits it. The
        future fails with :class:`~systolic.core.errors.DataError` for an input that can't be read (a damaged
        picture), with :class:`~systolic.serving.request.ExpiredError` after the deadline, and with
        :class:`~systolic.core.errors.RunError` where the device or the worker failed.

        Args:
            inputs: Name to array; checked against ``inputs`` before it is queued.
            deadline_seconds: Fails the request so long after now.

        Raises:
            RefusedError: the queue is full, the model ends or is not ready, or the request can never be
                taken (more examples, pixels, seconds or bytes than the limits).
            OptionError: an input is missing, unknown, or of another dtype or shape.
        """
        now = time.monotonic()
        request = BatchRequest(
            future=Future(),
            count=self._intake.check(inputs),
            bytes=size_of(inputs),
            submitted=now,
            deadline=None if deadline_seconds is None else now + deadline_seconds,
        )
        self._queue.admit(request)
        request.future.add_done_callback(self._completions.canceller(request))
        try:
            parts = self._intake.parts(inputs)
        except Exception as error:  # else it would count for ever
            self._completions.refuse(request, error)
            return request.future
        try:
            self._read(request, parts)
        except RuntimeError:  # the readers were shut down meanwhile
            self._end(request)
        return request.future

    def _read(
        self, request: BatchRequest, parts: Sequence[Callable[[], Sequence[Example]]]
    ) -> None:
        """Reads a request's examples, each part in a thread; the last one queues the rows."""
        examples: list[Sequence[Example]] = [()] * len(parts)
        lock, left = threading.Lock(), [len(parts)]

        def read(index: int) -> None:
            if request.ended:
                return
            try:
                examples[index] = parts[index]()
            except BaseException as error:  # of a library, on a stranger's bytes
                self._completions.refuse(request, error)
                return
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._queue.put(request, [example for part in examples for example in part])

        for index in range(len(parts)):
            if self._intake.reads:
                self._readers.submit(read, index)
            else:
                read(index)


def ascending(seconds: Mapping[Bucket, float]) -> dict[Bucket, float]:
    """Times without noise that says a call takes longer than one that is no smaller in rows or length."""
    return {
        bucket: min(
            time
            for other, time in seconds.items()
            if other.rows >= bucket.rows and (other.length or 0) >= (bucket.length or 0)
        )
        for bucket in seconds
    }


def buckets_of(intake: Intake, options: BatchOptions) -> BucketGrid:
    """The buckets of a model."""
    form = intake.form
    if intake.alone is not None:
        rows = -(-intake.alone // form.ways) * form.ways
        return BucketGrid(rows=[rows], lengths=[None], padding_share=1 - intake.alone / rows)
    shapes = options.shapes
    if form.linear and shapes.positions is None:
        shapes = replace(shapes, positions=CORE_POSITIONS * num_cpus())
    return choose(shapes, longest=form.longest, ways=form.ways, linear=form.linear)


def batch_model(
    name: str,
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    options: BatchOptions | None = None,
    watcher: BatchWatcher | None = None,
    store: ProgramStore | None = None,
    recorder: Recorder | None = None,
) -> DynamicBatches:
    """The model of a job with its weights on the job's mesh; nothing is compiled before its ``start``.

    Args:
        name: For messages.
        steps: Programs of the job.
        params: Weights.
        model_state: Other variables.
        options: Batches, queue and limits.
        watcher: Told of compiles, batches and answers.
        store: Where programs are kept; None compiles all.
        recorder: Of traffic; by default one of its own.

    Raises:
        OptionError: the job's program takes nothing that a request could hold.
    """
    options = options or BatchOptions()
    intake = intake_of(steps, params, model_state, options.limits, store)
    run = Predictor(intake.form, params, model_state, store)
    return DynamicBatches(name, intake, run, options, watcher, recorder)


def intake_of(
    steps: StepFunctions,
    params: Any,
    model_state: Any,
    limits: InputLimits,
    store: ProgramStore | None = None,
) -> Intake:
    """Intake of requests for a job's model.

    Raises:
        OptionError: its program takes nothing.
    """
    data, model = steps.job.data, steps.job.model
    if isinstance(data, Sentences) and isinstance(model, Encoder):
        return TextIntake(TextReader(steps), model.vocab, limits)
    if isinstance(data, Recordings):
        return SpeechIntake(SpeechReader(steps), limits)
    form = FixedForm(steps)
    used = used_inputs(form, params, model_state, store)
    if used == ["image"] and type(data).read is not Data.read:
        return ImageIntake(form, limits)
    if not used:
        raise OptionError(f"{steps.job.name} predicts without inputs; there is nothing to ask it")
    return ArrayIntake(form, used, limits)
