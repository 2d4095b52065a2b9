"""Threads that run batches; one that dies is replaced."""

import threading
import time
from collections.abc import Callable, Sequence

from systolic.core.errors import RunError
from systolic.inference.predictor import Predictor
from systolic.inference.rows import Bucket
from systolic.serving.batch.batch_queue import BatchCall, BatchQueue, QueuedRow
from systolic.serving.batch.buckets import Recorder
from systolic.serving.batch.completion import Completions, line
from systolic.serving.batch.facts import BatchFacts, BatchWatcher, Ended
from systolic.serving.compiles import COUNT, CompileFacts

RECENT = 0.1
"""Weight of a batch in the recent time of a row."""


class Workers:
    """Threads between a queue and a predictor.

    Args:
        name: Of the model, for messages.
        queue: Where batches come from.
        predictor: The programs.
        completions: Where answers go.
        watcher: Told of batches.
        strict: Called with the reason after a compile, to end the model; None lets it go on.
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
        self._completions, self._watcher, self._strict = completions, watcher, strict
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
                self._strict(
                    f"the program of {call.bucket} was compiled after {self._name} was ready"
                )
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
