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
        self._chosen: dict[tuple[int, int | None], int] = {}

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
        """When a batch is to be taken: at once where one is full, else ``delay_seconds`` after its oldest row came; None without rows."""
        times = [
            0.0 if self._full(lane) else rows[0].since + delay_seconds
            for lane, rows in self._lanes.items()
        ]
        return min(times, default=None)

    def _full(self, lane: Lane) -> bool:
        return self._alone or len(self._lanes[lane]) >= self.buckets.sizes(lane[0] or None)[-1]

    def take(self, now: float, delay_seconds: float) -> BatchCall:
        """The rows of the next call: of the lanes that are due, the one with the oldest row."""
        due = [
            lane
            for lane, rows in self._lanes.items()
            if self._full(lane) or rows[0].since + delay_seconds <= now
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
            bucket = self.buckets.at(self._size(waited, length), length)
            taken = [rows.popleft() for _ in range(min(waited, bucket.rows))]
            if len(taken) < bucket.rows:
                taken += self._shorter(lane, bucket.rows - len(taken))
        if not rows:
            del self._lanes[lane]
        return BatchCall(rows=taken, bucket=bucket, waited=waited)

    def _size(self, count: int, length: int | None) -> int:
        """Rows of the next call where ``count`` rows wait: those of the calls that answer all of them soonest.

        Without times, the smallest that holds them.
        """
        sizes = self.buckets.sizes(length)
        times = {size: self.seconds.get(self.buckets.at(size, length)) for size in sizes}
        if any(seconds is None for seconds in times.values()):
            return self._up(count, length)
        count = min(count, AHEAD * sizes[-1])
        if (count, length) in self._chosen:
            return self._chosen[count, length]
        best: list[tuple[float, int]] = [(0.0, 0)]
        for waiting in range(1, count + 1):
            best.append(
                min(
                    (float(times[size] or 0.0) + best[max(waiting - size, 0)][0], -size)
                    for size in sizes
                    if size <= waiting or size == self._up(waiting, length)
                )
            )
        self._chosen[count, length] = -best[-1][1]
        return self._chosen[count, length]

    def _up(self, count: int, length: int | None) -> int:
        sizes = self.buckets.sizes(length)
        return next((size for size in sizes if size >= count), sizes[-1])

    def _shorter(self, lane: Lane, room: int) -> list[Waiting]:
        """Rows of shorter lanes, the longest first, in place of padding."""
        taken: list[Waiting] = []
        for other in sorted(self._lanes, reverse=True):
            if other[1] != lane[1] or other[0] >= lane[0]:
                continue
            rows = self._lanes[other]
            while rows and len(taken) < room:
                taken.append(rows.popleft())
            if not rows:
                del self._lanes[other]
        return taken
