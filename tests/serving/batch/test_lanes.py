"""Which rows make a call."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.batch_queue import BatchRequest, Lanes, QueuedRow
from systolic.serving.batch.buckets import BucketGrid
from systolic.serving.batch.model import ascending

FOUR = BucketGrid(rows=[1, 4, 8], lengths=[None], padding_share=0)


def new_request() -> BatchRequest:
    return BatchRequest(future=Future(), count=1, bytes=1, submitted=0.0, deadline=None)


def waiting(
    request: BatchRequest | None = None, since: float = 0.0, shared: bytes = b""
) -> QueuedRow:
    row = Row(arrays={}, shared=shared)
    return QueuedRow(row=row, request=request or new_request(), example=0, part=0, since=since)


def calls(lanes: Lanes, count: int) -> list[tuple[int, int]]:
    """Rows held and rows of the program, call by call, of ``count`` rows that wait."""
    for _ in range(count):
        lanes.add(waiting())
    made = []
    while len(lanes):
        call = lanes.take(time.monotonic(), 0.0)
        made.append((len(call.rows), call.bucket.rows))
    return made


def test_without_times_the_smallest_that_holds_them() -> None:
    assert calls(Lanes(FOUR), 5) == [(5, 8)]
    assert calls(Lanes(FOUR), 20) == [(8, 8), (8, 8), (4, 4)]
    assert calls(Lanes(FOUR), 2) == [(2, 4)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # As long as it has rows, as on a CPU: 4 + 1 are 5, 8 are 8.
        ({1: 1.0, 4: 4.0, 8: 8.0}, {5: [(4, 4), (1, 1)], 7: [(4, 4), (1, 1), (1, 1), (1, 1)]}),
        # As long whatever it has, as on an accelerator.
        ({1: 1.0, 4: 1.0, 8: 1.0}, {5: [(5, 8)], 7: [(7, 8)], 2: [(2, 4)]}),
        # In between: 1 + 1 are faster than 4, and 8 than 4 + 1 + 1.
        (
            {1: 2.0, 4: 5.0, 8: 8.0},
            {16: [(8, 8), (8, 8)], 2: [(1, 1), (1, 1)], 3: [(3, 4)], 6: [(6, 8)]},
        ),
        # A batch is slower than its rows one by one, as for large pictures on a CPU.
        ({1: 1.0, 4: 5.0, 8: 11.0}, {9: [(1, 1)] * 9}),
    ],
)
def test_with_times_the_calls_that_end_soonest(
    times: dict[int, float], expected: dict[int, list[tuple[int, int]]]
) -> None:
    for count, wanted in expected.items():
        lanes = Lanes(FOUR)
        lanes.seconds = {Bucket(rows=rows): seconds for rows, seconds in times.items()}
        assert calls(lanes, count) == wanted


GRID = BucketGrid(rows=[1, 4], lengths=[10, 20], padding_share=0)


def of_lengths(*lengths: int) -> Lanes:
    lanes = Lanes(GRID)
    for length in lengths:
        row = Row(arrays={}, length=length)
        lanes.add(QueuedRow(row=row, request=new_request(), example=0, part=0, since=0.0))
    return lanes


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        # By positions, as on a CPU: a short text among long ones costs as much as a long one.
        (lambda rows, length: rows * length, [("1 x 20", 1), ("1 x 10", 1), ("1 x 10", 1)]),
        # As long whatever it has, as on an accelerator: all share a call.
        (lambda rows, length: 1.0, [("4 x 20", 3)]),
    ],
)
def test_texts_of_other_lengths_share_a_call_where_that_is_faster(
    each: Callable[[int, int], float], expected: list[tuple[str, int]]
) -> None:
    lanes = of_lengths(15, 5, 6)
    lanes.seconds = {one: each(one.rows, one.length or 0) for one in GRID.all}
    found = []
    while len(lanes):
        call = lanes.take(0.0, 0.0)
        found.append((str(call.bucket), len(call.rows)))
    assert found == expected


def test_a_row_waits_no_longer_than_a_shared_call_would_save() -> None:
    for seconds, until in (({1: 1.0, 4: 1.5, 8: 2.0}, 0.5), ({1: 1.0, 4: 4.0, 8: 8.0}, 0.0)):
        lanes = Lanes(FOUR)
        lanes.seconds = {Bucket(rows=rows): time for rows, time in seconds.items()}
        lanes.add(waiting())
        assert lanes.due(9.0) == until
        assert lanes.due(0.25) == min(until, 0.25)


def test_noise_does_not_make_a_small_call_slow() -> None:
    measured = {Bucket(rows=1): 9.0, Bucket(rows=4): 2.0, Bucket(rows=8): 3.0}
    assert list(ascending(measured).values()) == [2.0, 2.0, 3.0]
    texts = {Bucket(rows=1, length=10): 5.0, Bucket(rows=1, length=20): 2.0}
    assert list(ascending(texts).values()) == [2.0, 2.0]


def test_rows_with_other_shared_arrays_have_calls_of_their_own() -> None:
    lanes = Lanes(FOUR)
    for number in range(6):
        lanes.add(waiting(since=float(number), shared=b"ab"[number % 2 :][:1]))
    found = [lanes.take(9.0, 0.0) for _ in range(2)]
    assert [{one.row.shared for one in call.rows} for call in found] == [{b"a"}, {b"b"}]


def test_alone_a_request_is_a_call() -> None:
    lanes = Lanes(BucketGrid(rows=[3], lengths=[None], padding_share=0), alone=True)
    requests = [new_request(), new_request()]
    for request in requests:
        for _ in range(3):
            lanes.add(waiting(request))
    assert lanes.due(60.0) == 0.0
    found = [lanes.take(0.0, 60.0) for _ in range(2)]
    assert [{one.request for one in call.rows} for call in found] == [{one} for one in requests]


def test_a_full_lane_goes_before_an_older_row_that_may_wait() -> None:
    lanes = Lanes(FOUR)
    lanes.add(waiting(since=0.0, shared=b"old"))
    assert lanes.due(5.0) == 5.0
    for _ in range(8):
        lanes.add(waiting(since=1.0))
    assert lanes.due(5.0) == 0.0
    assert len(lanes.take(1.0, 5.0).rows) == 8
    assert lanes.due(5.0) == 5.0
    assert [one.row.shared for one in lanes.take(5.0, 5.0).rows] == [b"old"]


def test_rows_of_requests_that_ended_are_dropped() -> None:
    lanes = Lanes(FOUR)
    gone, kept = new_request(), new_request()
    lanes.add(waiting(gone))
    lanes.add(waiting(kept))
    gone.ended = True
    lanes.purge()
    assert [one.request for one in lanes.take(0.0, 0.0).rows] == [kept]
    assert lanes.due(0.0) is None
