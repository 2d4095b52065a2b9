"""The queue of a batch model: requests and their rows, the batches that are made of them, deadlines and cancels."""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from systolic.inference.predictor import Example, Output
from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.facts import AnswerFacts, Ended
from systolic.serving.request import RefusedError

Lane = tuple[int, bytes]
"""Length of the bucket (0: all rows have one shape), and what rows of a call share."""
AHEAD = 2
"""Largest batches that a choice of the next call looks ahead."""
POLL_SECONDS = 1.0
"""Interval at which a thread without work looks whether the program has ended."""
KEPT = 64
"""Deadlines of ended requests that are kept beyond as many as there are open ones."""


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class BatchRequest:
    """A request. Its fields are changed under the queue's lock; its future is ended outside of it."""

    future: "Future[Mapping[str, np.ndarray]]"
    count: int
    """Examples by the request's arrays."""
    bytes: int
    submitted: float
    """By ``time.monotonic``, as all times here."""
    deadline: float | None
    examples: list[Example] = field(default_factory=list)
    outputs: list[list[Output | None]] = field(default_factory=list)
    """Outputs of each row of each example."""
    missing: int = 0
    """Rows without outputs."""
    rows: int = 0
    """Rows that count in the queue: its examples until they are read."""
    read: float | None = None
    """When its files were read."""
    taken: float | None = None
    """When a batch took its last row."""
    compute_seconds: float = 0.0
    begun: bool | None = None
    """Whether it was begun rather than cancelled; None until that is decided."""
    ended: bool = False

    def begin(self) -> bool:
        """Whether it is computed; from the first call on it can't be cancelled any more.

        A future that was cancelled may be seen here before its callback has ended the request.
        """
        if self.begun is None:
            self.begun = self.future.set_running_or_notify_cancel()
        return self.begun

    def take(self, examples: Sequence[Example], now: float) -> None:
        """Keeps what was read."""
        self.examples, self.read = list(examples), now
        self.outputs = [[None] * len(example.rows) for example in examples]
        self.missing = sum(map(len, self.outputs))

    def facts(self, ended: Ended) -> AnswerFacts:
        """Its times, by phase."""
        now = time.monotonic()
        read = now if self.read is None else self.read
        taken = now if self.taken is None else self.taken
        return AnswerFacts(
            examples=self.count,
            ended=ended,
            decode_seconds=read - self.submitted,
            queue_seconds=max(taken - read, 0.0),
            compute_seconds=self.compute_seconds,
            seconds=now - self.submitted,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueuedRow:
    """A row of a request in the queue."""

    row: Row
    request: BatchRequest
    example: int
    part: int
    """Its place among the example's rows."""
    since: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchCall:
    """Rows of one call."""

    rows: list[QueuedRow]
    bucket: Bucket
    waited: int
    """Rows that could have been in it."""


class Lanes:
    """Rows by the program that holds them.

    Args:
        buckets: The buckets.
        alone: Whether rows of two requests never share a call.
    """

    def __init__(self, buckets: BucketGrid, alone: bool = False) -> None:
        self.buckets, self._alone = buckets, alone
        self._lanes: dict[Lane, deque[QueuedRow]] = {}
        self.seconds: Mapping[Bucket, float] = {}
        """Measured time of each program, where known; set before rows come."""
        self._times: dict[int | None, list[float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def add(self, waiting: QueuedRow) -> None:
        """Puts a row at the end of its lane."""
        length = self.buckets.length_for(waiting.row.length) or 0
        self._lanes.setdefault((length, waiting.row.shared), deque()).append(waiting)

    def purge(self) -> None:
        """Drops rows of requests that ended."""
        for lane in list(self._lanes):
            kept = deque(row for row in self._lanes[lane] if not row.request.ended)
            if kept:
                self._lanes[lane] = kept
            else:
                del self._lanes[lane]

    def due(self, delay_seconds: float) -> float | None:
        """When a batch is to be taken: at once where one is full, else when its oldest row has waited; None without rows.

        A row waits for others ``delay_seconds``, but no longer than a shared call would save.
        """
        times = [
            0.0 if self._full(lane) else rows[0].since + self._patience(lane, delay_seconds)
            for lane, rows in self._lanes.items()
        ]
        return min(times, default=None)

    def _patience(self, lane: Lane, delay_seconds: float) -> float:
        length = lane[0] or None
        single_seconds, pair_seconds = (
            self.seconds.get(self.buckets.at(self._up(n, length), length)) for n in (1, 2)
        )
        if single_seconds is None or pair_seconds is None:
            return delay_seconds
        return min(delay_seconds, max(2 * single_seconds - pair_seconds, 0.0))

    def _full(self, lane: Lane) -> bool:
        return self._alone or len(self._lanes[lane]) >= self.buckets.sizes(lane[0] or None)[-1]

    def take(self, now: float, delay_seconds: float) -> BatchCall:
        """The rows of the next call: of the lanes that are due, the one with the oldest row."""
        due = [
            lane
            for lane, rows in self._lanes.items()
            if self._full(lane) or rows[0].since + self._patience(lane, delay_seconds) <= now
        ]
        lane = min(due or self._lanes, key=lambda key: self._lanes[key][0].since)
        length = lane[0] or None
        rows = self._lanes[lane]
        waited = len(rows)
        if self._alone:
            first = rows[0].request
            taken = [rows.popleft() for _ in range(sum(1 for row in rows if row.request is first))]
            bucket = self.buckets.at(self._up(len(taken), length), length)
        else:
            bucket = self.buckets.at(self._size(lane), length)
            taken = [rows.popleft() for _ in range(min(waited, bucket.rows))]
            if len(taken) < bucket.rows:
                taken += self._shorter(lane, bucket.rows - len(taken))
        if not rows:
            del self._lanes[lane]
        return BatchCall(rows=taken, bucket=bucket, waited=waited)

    def _size(self, lane: Lane) -> int:
        """Rows of a lane's next call: those after which all rows that could share it are answered soonest.

        Rows of shorter lanes take the room that the lane's own leave. Without times, the smallest that holds its own.
        """
        length, waited = lane[0] or None, len(self._lanes[lane])
        if not self.seconds:
            return self._up(waited, length)
        shorter = self._below(lane)

        def left(size: int) -> float:
            """Time of the call and of what it leaves."""
            total = self._seconds(size, length)
            total += self._fastest(max(waited - size, 0), length)
            room = max(size - waited, 0)
            for other in shorter:
                rows = len(self._lanes[other])
                total += self._fastest(max(rows - room, 0), other[0] or None)
                room = max(room - rows, 0)
            return total

        most = self._up(waited + sum(len(self._lanes[other]) for other in shorter), length)
        sizes = [size for size in self.buckets.sizes(length) if size <= most]
        return min(sizes, key=lambda size: (left(size), -size))

    def _fastest(self, count: int, length: int | None) -> float:
        """Least time of calls that hold ``count`` rows of a length."""
        sizes = self.buckets.sizes(length)
        most = AHEAD * sizes[-1]
        if count > most:  # The largest calls, of which one less is left.
            return self._fastest(count - sizes[-1], length) + self._seconds(sizes[-1], length)
        known = self._times.setdefault(length, [0.0])
        for waiting in range(len(known), count + 1):
            known.append(
                min(self._seconds(size, length) + known[max(waiting - size, 0)] for size in sizes)
            )
        return known[count]

    def _seconds(self, size: int, length: int | None) -> float:
        return self.seconds[self.buckets.at(size, length)]

    def _up(self, count: int, length: int | None) -> int:
        sizes = self.buckets.sizes(length)
        return next((size for size in sizes if size >= count), sizes[-1])

    def _shorter(self, lane: Lane, room: int) -> list[QueuedRow]:
        """Rows of shorter lanes, the longest first, in place of padding."""
        taken: list[QueuedRow] = []
        for other in self._below(lane):
            rows = self._lanes[other]
            while rows and len(taken) < room:
                taken.append(rows.popleft())
            if not rows:
                del self._lanes[other]
        return taken

    def _below(self, lane: Lane) -> list[Lane]:
        """Lanes whose rows fit a call of this one, the longest first."""
        return sorted(
            (other for other in self._lanes if other[1] == lane[1] and other[0] < lane[0]),
            reverse=True,
        )


class BatchQueue:
    """Requests that were taken, and the rows of those that were read.

    Args:
        lanes: Of the model's buckets.
        most: Examples of all requests.
        most_bytes: Bytes of their inputs.
        delay_seconds: Longest wait of a row for others, while there are other requests than those that wait.
        name: Of the model, for messages.
    """

    def __init__(
        self, lanes: Lanes, *, most: int, most_bytes: int, delay_seconds: float, name: str
    ) -> None:
        self.lanes, self._name = lanes, name
        self._most, self._most_bytes, self._delay = most, most_bytes, delay_seconds
        self._changed = threading.Condition()
        self._open: set[BatchRequest] = set()
        self._deadlines: list[tuple[float, int, BatchRequest]] = []
        self._bytes = 0
        self._rows = 0
        self._closed: str | None = "is not ready"
        self._ending = False
        self.seconds_per_row = 0.0
        """Recent time of a row, for ``retry_seconds``."""

    # Requests

    def open(self) -> None:
        """Takes requests from now on."""
        with self._changed:
            self._closed = None

    def admit(self, request: BatchRequest) -> None:
        """Takes a request.

        Raises:
            RefusedError: the queue is full or closed.
        """
        with self._changed:
            if self._closed is not None:
                raise RefusedError(f"{self._name} {self._closed}; try again", retry_seconds=1.0)
            never = request.count > self._most or request.bytes > self._most_bytes
            if never:
                raise RefusedError(
                    f"the request has {request.count} examples and {request.bytes} bytes, and {self._name} holds {self._most} and {self._most_bytes}; send fewer at once"
                )
            if (
                self._rows + request.count > self._most
                or self._bytes + request.bytes > self._most_bytes
            ):
                raise RefusedError(
                    f"the queue of {self._name} is full ({self._rows} of {self._most} examples wait); try again",
                    retry_seconds=max(1.0, self._rows * self.seconds_per_row),
                )
            request.rows = request.count
            self._rows += request.count
            self._bytes += request.bytes
            self._open.add(request)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, id(request), request))
                self._changed.notify_all()

    def put(self, request: BatchRequest, examples: Sequence[Example]) -> None:
        """Queues the rows of a request that was read."""
        with self._changed:
            if request.ended:
                return
            now = time.monotonic()
            request.take(examples, now)
            self._rows += request.missing - request.rows
            request.rows = request.missing
            for index, example in enumerate(examples):
                for part, row in enumerate(example.rows):
                    self.lanes.add(
                        QueuedRow(row=row, request=request, example=index, part=part, since=now)
                    )
            self._changed.notify_all()

    def end(self, request: BatchRequest) -> bool:
        """Marks a request as ended; False where it had ended before."""
        with self._changed:
            if request.ended:
                return False
            request.ended = True
            self._rows -= request.rows
            self._bytes -= request.bytes
            if len(self._deadlines) > 2 * len(self._open) + KEPT:
                self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
                heapq.heapify(self._deadlines)
            return True

    def forget(self, request: BatchRequest) -> None:
        """Lets go of a request that has ended and whose answer was handed out: a drain waits until then."""
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    # Batches

    def take(self) -> BatchCall | None:
        """Waits for the next batch; None when the worker is to end."""
        with self._changed:
            while True:
                self.lanes.purge()
                now = time.monotonic()
                delay = 0.0 if self._closed or not self._comes() else self._delay
                due = self.lanes.due(delay)
                if due is not None and due <= now:
                    call = self.lanes.take(now, delay)
                    if kept := self._begun(call, now):
                        return kept
                    continue
                if self._ending or not threading.main_thread().is_alive():
                    return None
                self._changed.wait(POLL_SECONDS if due is None else min(due - now, POLL_SECONDS))

    def _comes(self) -> bool:
        """Whether a request is read or computed beside those that wait: without any, a wait for others is one for nothing."""
        return any(
            request.read is None or (request.taken and not request.rows) for request in self._open
        )

    def _begun(self, call: BatchCall, now: float) -> BatchCall | None:
        """The rows whose requests were not cancelled; those can't be from now on."""
        kept = []
        for waiting in call.rows:
            request = waiting.request
            if not request.begin():
                continue  # its callback ends it
            request.taken = now
            request.rows -= 1
            self._rows -= 1
            kept.append(waiting)
        return replace(call, rows=kept) if kept else None

    def done(self, waiting: QueuedRow, output: Output, seconds: float) -> bool:
        """Keeps a row's output; True where it was the last of its request."""
        with self._changed:
            request = waiting.request
            if request.ended:
                return False
            request.outputs[waiting.example][waiting.part] = output
            request.missing -= 1
            request.compute_seconds = max(request.compute_seconds, seconds)
            return request.missing == 0

    # The end, and deadlines

    def expired(self, expire: Callable[[BatchRequest], None]) -> bool:
        """Waits until deadlines have passed and expires their requests; False when there is nothing to wait for any more."""
        with self._changed:
            now = time.monotonic()
            late = []
            while self._deadlines and self._deadlines[0][0] <= now:
                late.append(heapq.heappop(self._deadlines)[2])
            late = [request for request in late if not request.ended]
            if not late:
                if self._ending or not threading.main_thread().is_alive():
                    return False
                wait = self._deadlines[0][0] - now if self._deadlines else POLL_SECONDS
                self._changed.wait(min(wait, POLL_SECONDS))
        for request in late:
            expire(request)
        return True

    @property
    def waiting(self) -> int:
        """Examples or rows that no batch holds yet."""
        with self._changed:
            return self._rows

    def close(self, reason: str) -> None:
        """Refuses further requests; what waits goes without delay."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def empty(self, seconds: float) -> bool:
        """Waits until all requests have ended; False where time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, max(seconds, 0.0))

    def stop(self) -> list[BatchRequest]:
        """Ends the workers; requests that are left."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            return list(self._open)
