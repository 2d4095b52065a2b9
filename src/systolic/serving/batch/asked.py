"""A request on its way: its examples, the outputs that are there, and how it ends, once."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from systolic.predicting.readers import Example, Output
from systolic.predicting.rows import Row
from systolic.serving.batch.facts import AnswerFacts, Ended


@dataclass(kw_only=True, slots=True, eq=False)
class Asked:
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
    """Of each row of each example."""
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
        """Where its time went."""
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
class Waiting:
    """A row of a request in the queue."""

    row: Row
    asked: Asked
    example: int
    part: int
    """Its place among the example's rows."""
    since: float
