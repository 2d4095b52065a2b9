"""A client that leaves at the moment a worker takes its rows: its future is cancelled, and the queue has not heard of it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from systolic.predicting.readers import Example
from systolic.predicting.rows import Row
from systolic.serving.batch.asked import Asked
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.batch.ending import Endings
from systolic.serving.batch.facts import Ended
from systolic.serving.batch.lanes import Lanes
from systolic.serving.batch.queue import BatchQueue
from tests.serving.batch.stub import Told


def opened(rows: Sequence[int] = (8,)) -> BatchQueue:
    grid = BucketGrid(rows=rows, lengths=[None], padding_share=0.0)
    queue = BatchQueue(Lanes(grid), most=100, most_bytes=1000, delay_seconds=0.0, name="numbers")
    queue.open()
    return queue


def asked(queue: BatchQueue, count: int) -> Asked:
    """A request of some rows, read and queued; nobody listens to its future yet."""
    now = time.monotonic()
    made = Asked(future=Future(), count=count, bytes=1, submitted=now, deadline=now)
    queue.admit(made)
    queue.put(made, [Example(rows=[Row(arrays={"x": np.zeros(1)})]) for _ in range(count)])
    return made


def test_a_request_that_is_cancelled_while_it_is_taken_holds_up_nobody() -> None:
    queue, told = opened(rows=(2,)), Told()
    intake: Any = SimpleNamespace(answer_of=lambda examples, outputs: {"y": np.zeros(1)})
    endings = Endings("numbers", queue, intake, told)
    gone, stranger = asked(queue, 5), asked(queue, 1)
    assert gone.future.cancel()
    # Two rows of it were in the first call, two in the next, and one beside the stranger's.
    call = queue.take()
    assert call is not None
    assert [one.asked for one in call.rows] == [stranger]
    gone.future.add_done_callback(lambda _: endings.cancel(gone))
    assert queue.waiting == 0
    assert queue.done(call.rows[0], {}, 0.1)
    endings.answer(stranger)
    assert stranger.future.result(0) == {"y": np.zeros(1)}
    assert queue.empty(0)
    assert [facts.ended for facts in told.answers] == [Ended.cancelled, Ended.answered]


def test_a_deadline_that_passes_meanwhile_ends_it_once() -> None:
    queue, told = opened(), Told()
    intake: Any = SimpleNamespace()
    endings = Endings("numbers", queue, intake, told)
    gone, stranger = asked(queue, 1), asked(queue, 1)
    gone.future.cancel()
    call = queue.take()
    assert call is not None
    assert [one.asked for one in call.rows] == [stranger]
    assert queue.expired(endings.expire)
    gone.future.add_done_callback(lambda _: endings.cancel(gone))
    assert [facts.ended for facts in told.answers] == [Ended.cancelled, Ended.expired]
    assert queue.waiting == 0
    assert queue.empty(0)
