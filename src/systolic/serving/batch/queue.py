"""The queue of a batch model: bounded, with deadlines and cancels; workers take batches from it."""

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from systolic.predicting.readers import Example, Output
from systolic.serving.batch.asked import Asked, Waiting
from systolic.serving.batch.lanes import BatchCall, Lanes
from systolic.serving.refused import RefusedError

POLL_SECONDS = 1.0
"""Interval at which a thread without work looks whether the program has ended."""
KEPT = 64
"""Deadlines of ended requests that are kept beyond as many as there are open ones."""


class BatchQueue:
    """Requests that were taken, and the rows of those that were read.

    Args:
        lanes: Of the model's buckets.
        most: Examples of all requests.
        most_bytes: Bytes of their inputs.
        delay_seconds: Longest wait of a row for others.
        name: Of the model, for messages.
    """

    def __init__(
        self, lanes: Lanes, *, most: int, most_bytes: int, delay_seconds: float, name: str
    ) -> None:
        self.lanes, self._name = lanes, name
        self._most, self._most_bytes, self._delay = most, most_bytes, delay_seconds
        self._changed = threading.Condition()
        self._open: set[Asked] = set()
        self._deadlines: list[tuple[float, int, Asked]] = []
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

    def admit(self, asked: Asked) -> None:
        """Takes a request.

        Raises:
            RefusedError: the queue is full or closed.
        """
        with self._changed:
            if self._closed is not None:
                raise RefusedError(f"{self._name} {self._closed}; try again", retry_seconds=1.0)
            never = asked.count > self._most or asked.bytes > self._most_bytes
            if never:
                raise RefusedError(
                    f"the request has {asked.count} examples and {asked.bytes} bytes, and {self._name} holds {self._most} and {self._most_bytes}; send fewer at once"
                )
            if (
                self._rows + asked.count > self._most
                or self._bytes + asked.bytes > self._most_bytes
            ):
                raise RefusedError(
                    f"the queue of {self._name} is full ({self._rows} of {self._most} examples wait); try again",
                    retry_seconds=max(1.0, self._rows * self.seconds_per_row),
                )
            asked.rows = asked.count
            self._rows += asked.count
            self._bytes += asked.bytes
            self._open.add(asked)
            if asked.deadline is not None:
                heapq.heappush(self._deadlines, (asked.deadline, id(asked), asked))
                self._changed.notify_all()

    def put(self, asked: Asked, examples: Sequence[Example]) -> None:
        """Queues the rows of a request that was read."""
        with self._changed:
            if asked.ended:
                return
            now = time.monotonic()
            asked.take(examples, now)
            self._rows += asked.missing - asked.rows
            asked.rows = asked.missing
            for index, example in enumerate(examples):
                for part, row in enumerate(example.rows):
                    self.lanes.add(
                        Waiting(row=row, asked=asked, example=index, part=part, since=now)
                    )
            self._changed.notify_all()

    def end(self, asked: Asked) -> bool:
        """Marks a request as ended; False where it had ended before."""
        with self._changed:
            if asked.ended:
                return False
            asked.ended = True
            self._rows -= asked.rows
            self._bytes -= asked.bytes
            if len(self._deadlines) > 2 * len(self._open) + KEPT:
                self._deadlines = [entry for entry in self._deadlines if not entry[2].ended]
                heapq.heapify(self._deadlines)
            return True

    def forget(self, asked: Asked) -> None:
        """Lets go of a request that has ended and whose answer was handed out: a drain waits until then."""
        with self._changed:
            self._open.discard(asked)
            self._changed.notify_all()

    # Batches

    def take(self) -> BatchCall | None:
        """Waits for the next batch; None when the worker is to end."""
        with self._changed:
            while True:
                self.lanes.purge()
                now = time.monotonic()
                due = self.lanes.due(0.0 if self._closed else self._delay)
                if due is not None and due <= now:
                    call = self.lanes.take(now, self._delay)
                    if kept := self._begun(call, now):
                        return kept
                    continue
                if self._ending or not threading.main_thread().is_alive():
                    return None
                self._changed.wait(POLL_SECONDS if due is None else min(due - now, POLL_SECONDS))

    def _begun(self, call: BatchCall, now: float) -> BatchCall | None:
        """The rows whose requests were not cancelled; those can't be from now on."""
        kept = []
        for waiting in call.rows:
            asked = waiting.asked
            if not asked.begin():
                continue  # its callback ends it
            asked.taken = now
            asked.rows -= 1
            self._rows -= 1
            kept.append(waiting)
        return replace(call, rows=kept) if kept else None

    def done(self, waiting: Waiting, output: Output, seconds: float) -> bool:
        """Keeps a row's output; True where it was the last of its request."""
        with self._changed:
            asked = waiting.asked
            if asked.ended:
                return False
            asked.outputs[waiting.example][waiting.part] = output
            asked.missing -= 1
            asked.compute_seconds = max(asked.compute_seconds, seconds)
            return asked.missing == 0

    # The end, and deadlines

    def expired(self, expire: Callable[[Asked], None]) -> bool:
        """Waits until deadlines have passed and expires their requests; False when there is nothing to wait for any more."""
        with self._changed:
            now = time.monotonic()
            late = []
            while self._deadlines and self._deadlines[0][0] <= now:
                late.append(heapq.heappop(self._deadlines)[2])
            late = [asked for asked in late if not asked.ended]
            if not late:
                if self._ending or not threading.main_thread().is_alive():
                    return False
                wait = self._deadlines[0][0] - now if self._deadlines else POLL_SECONDS
                self._changed.wait(min(wait, POLL_SECONDS))
        for asked in late:
            expire(asked)
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

    def stop(self) -> list[Asked]:
        """Ends the workers; requests that are left."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            return list(self._open)
