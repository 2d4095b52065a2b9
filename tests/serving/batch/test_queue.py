"""A client that leaves at the moment a worker takes its rows: its future is cancelled, and the queue has not heard of it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from systolic.inference.predictor import Example
from systolic.inference.rows import Row
from systolic.serving.batch.batch_queue import BatchQueue, BatchRequest, Lanes
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.batch.model import Completions
from systolic.serving.facts import Ended
from systolic.serving.request import ExpiredError
from tests.serving.batch.stub import Told


def opened(rows: Sequence[int] = (8,), delay_seconds: float = 0.0) -> BatchQueue:
    grid = BucketGrid(rows=rows, lengths=[None], padding_share=0.0)
    queue = BatchQueue(
        Lanes(grid), most=100, most_bytes=1000, delay_seconds=delay_seconds, name="numbers"
    )
    queue.open()
    return queue


def admitted(queue: BatchQueue, count: int, seconds: float | None = None) -> BatchRequest:
    """A request of some rows, read and queued; nobody listens to its future yet."""
    now = time.monotonic()
    deadline = None if seconds is None else now + seconds
    made = BatchRequest(future=Future(), count=count, bytes=1, submitted=now, deadline=deadline)
    queue.admit(made)
    queue.put(made, [Example(rows=[Row(arrays={"x": np.zeros(1)})]) for _ in range(count)])
    return made


def test_a_request_that_is_cancelled_while_it_is_taken_holds_up_nobody() -> None:
    queue, told = opened(rows=(2,)), Told()
    intake: Any = SimpleNamespace(answer_of=lambda examples, outputs: {"y": np.zeros(1)})
    completions = Completions("numbers", queue, intake, told)
    gone, stranger = admitted(queue, 5), admitted(queue, 1)
    assert gone.future.cancel()
    # Two rows of it were in the first call, two in the next, and one beside the stranger's.
    call = queue.take()
    assert call is not None
    assert [one.request for one in call.rows] == [stranger]
    gone.future.add_done_callback(lambda _: completions.cancel(gone))
    assert queue.waiting == 0
    assert queue.done(call.rows[0], {}, 0.1)
    completions.answer(stranger)
    assert stranger.future.result(0) == {"y": np.zeros(1)}
    assert queue.empty(0)
    assert [facts.ended for facts in told.answers] == [Ended.cancelled, Ended.answered]


def test_a_deadline_that_passes_meanwhile_ends_it_once() -> None:
    queue, told = opened(), Told()
    intake: Any = SimpleNamespace()
    completions = Completions("numbers", queue, intake, told)
    gone, stranger = admitted(queue, 1, 0.0), admitted(queue, 1, 0.0)
    gone.future.cancel()
    call = queue.take()
    assert call is not None
    assert [one.request for one in call.rows] == [stranger]
    assert queue.expired(completions.expire)
    gone.future.add_done_callback(lambda _: completions.cancel(gone))
    assert [facts.ended for facts in told.answers] == [Ended.cancelled, Ended.expired]
    assert queue.waiting == 0
    assert queue.empty(0)


def test_rows_of_one_request_wait_for_no_others() -> None:
    """The rest of a request whose first rows are computed; before, it waited for itself."""
    queue = opened(rows=(2,), delay_seconds=60.0)
    admitted(queue, 3)
    taken = [queue.take() for _ in range(2)]
    assert [len(call.rows) for call in taken if call is not None] == [2, 1]


def test_an_answer_after_the_deadline_is_none() -> None:
    queue, told = opened(), Told()
    intake: Any = SimpleNamespace(answer_of=lambda examples, outputs: {"y": np.zeros(1)})
    completions = Completions("numbers", queue, intake, told)
    late = admitted(queue, 1, 0.0)
    call = queue.take()
    assert call is not None
    assert queue.done(call.rows[0], {}, 0.1)
    completions.answer(late)
    with pytest.raises(ExpiredError):
        late.future.result(0)
    assert [facts.ended for facts in told.answers] == [Ended.expired]
