"""Rows that wait, and the batches that are made of them. Called under the queue's lock."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from systolic.predicting.rows import Bucket
from systolic.serving.batch.asked import Waiting
from systolic.serving.batch.buckets import BucketGrid

Lane = tuple[int, bytes]
"""Length of the bucket (0: all rows have one shape), and what rows of a call share."""
AHEAD = 2
"""Largest batches that a choice of the next call looks ahead."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchCall:
    """Rows of one call."""

    rows: list[Waiting]
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
        self._lanes: dict[Lane, deque[Waiting]] = {}
        self.seconds: Mapping[Bucket, float] = {}
        """Measured time of each program, where known; set before rows come."""
        self._times: dict[int | None, list[float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def add(self, waiting: Waiting) -> None:
        """Puts a row at the end of its lane."""
        length = self.buckets.length_for(waiting.row.length) or 0
        self._lanes.setdefault((length, waiting.row.shared), deque()).append(waiting)

    def purge(self) -> None:
        """Drops rows of requests that ended."""
        for lane in list(self._lanes):
            kept = deque(one for one in self._lanes[lane] if not one.asked.ended)
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
        one, two = (self.seconds.get(self.buckets.at(self._up(n, length), length)) for n in (1, 2))
        if one is None or two is None:
            return delay_seconds
        return min(delay_seconds, max(2 * one - two, 0.0))

    def _full(self, lane: Lane) -> bool:
        return self._alone or len(self._lanes[lane]) >= self.buckets.sizes(lane[0] or None)[-1]

    def take(self, now: float, delay_seconds: float) -> BatchCall:
        """The rows of the next call: of the lanes that are due, the one with the oldest row."""
        due = [
            lane
            for lane, rows in self._lanes.items()
            if self._full(lane) or rows[0].since + self._patience(lane, delay_seconds) <= now
        ]
        lane = min(due or self._lanes, key=lambda one: self._lanes[one][0].since)
        length = lane[0] or None
        rows = self._lanes[lane]
        waited = len(rows)
        if self._alone:
            first = rows[0].asked
            taken = [rows.popleft() for _ in range(sum(1 for one in rows if one.asked is first))]
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

    def _shorter(self, lane: Lane, room: int) -> list[Waiting]:
        """Rows of shorter lanes, the longest first, in place of padding."""
        taken: list[Waiting] = []
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
