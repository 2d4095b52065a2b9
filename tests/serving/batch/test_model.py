"""The queue and its threads: bounds, deadlines, cancels, failures, deaths and the end."""

import gc
import io
import json
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import jax
import numpy as np
import pytest

from systolic.compiling.program_store import ReadyProgram
from systolic.core.errors import DataError, OptionError, RunError
from systolic.inference.rows import Bucket
from systolic.serving.batch.buckets import Shapes, Traffic
from systolic.serving.batch.model import DynamicBatches
from systolic.serving.facts import AnswerFacts, Ended
from systolic.serving.http.metrics import BatchLoadMetrics, BatchMetrics, Metrics
from systolic.serving.http.telemetry import EventLog
from systolic.serving.registry import ServedBatch
from systolic.serving.request import ExpiredError, RefusedError
from tests.serving.batch.stub import Told, Twice, model, numbers

WAIT = 10


@pytest.fixture
def twice() -> Twice:
    return Twice()


@pytest.fixture
def made(twice: Twice) -> Iterator[Any]:
    """Makes models, and closes them."""
    models: list[DynamicBatches] = []

    def make(told: Told | None = None, **options: Any) -> DynamicBatches:
        models.append(model(twice, told, **options))
        return models[-1]

    yield make
    twice.going.set()
    for one in models:
        one.close()


def hold(twice: Twice, of: DynamicBatches) -> Any:
    """A request that keeps the only worker until ``twice.going`` is set."""
    twice.going.clear()
    first = of.submit(numbers(1))
    until(lambda: bool(twice.calls))
    return first


def until(true: Any) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def in_turn(of: Any, *values: Any) -> list[Any]:
    """Submits one after another: each is in the queue before the next, as inputs are read by several threads."""
    made = []
    for value in values:
        before = len(of._queue.lanes)
        made.append(of.submit(numbers(value)))
        until(lambda before=before: len(of._queue.lanes) > before)
    return made


def test_requests_share_batches_and_get_their_own_answers(twice: Twice, made: Any) -> None:
    told = Told()
    of = made(told, shapes=Shapes(largest=8, programs=8), delay_ms=0)
    assert [facts.bucket for facts in told.compiles] == ["1", "2", "3", "4", "5", "6", "7", "8"]
    first = hold(twice, of)
    others = [of.submit(numbers(n, n + 100)) for n in (2, 3, 4, 5, 6)]
    assert of.waiting == 10
    until(lambda: len(of._queue.lanes) == 10)  # All have been read.
    twice.going.set()
    assert [one.result(WAIT)["twice"].tolist() for one in [first, *others]] == [
        [2],
        *([2 * n, 2 * n + 200] for n in (2, 3, 4, 5, 6)),
    ]
    # A full batch, and the rest: the request of 6 lies in the second.
    assert [bucket for bucket, _ in twice.calls] == ["1", "8", "2"]
    until(lambda: len(told.batches) == 3)
    batch = told.batches[1]
    assert (batch.examples, batch.rows, batch.requests, batch.padding_share) == (8, 8, 4, 0)
    assert of.traffic.examples == {1: 1.0, 10: 1.0, 2: 1.0}
    assert {facts.ended for facts in told.answers} == {Ended.answered}
    assert [facts.examples for facts in told.answers] == [1, 2, 2, 2, 2, 2]
    assert of.waiting == 0


def test_a_row_waits_for_others_no_longer_than_the_delay(twice: Twice, made: Any) -> None:
    of = made(shapes=Shapes(largest=2), delay_ms=60_000, workers=2)
    # Alone it waits for nobody.
    assert of.submit(numbers(1)).result(WAIT)["twice"].tolist() == [2]
    twice.calls.clear()
    first = hold(twice, of)
    # One worker is free, and another request may yet come.
    early = of.submit(numbers(2))
    until(lambda: len(of._queue.lanes) == 1)
    of.submit(numbers(3))  # The batch is full.
    twice.going.set()
    assert early.result(WAIT)["twice"].tolist() == [4]
    assert first.result(WAIT)["twice"].tolist() == [2]
    assert [bucket for bucket, _ in twice.calls] == ["1", "2"]
    soon = made(shapes=Shapes(largest=2), delay_ms=1)
    assert soon.submit(numbers(4)).result(WAIT)["twice"].tolist() == [8]


def test_a_short_row_takes_the_place_of_padding(twice: Twice, made: Any) -> None:
    told = Told()
    pairs = Shapes(largest=2, programs=8, traffic=Traffic(examples={2: 1.0}))
    of = made(told, longest=8, shapes=pairs, delay_ms=0)
    first = hold(twice, of)
    others = in_turn(of, 8, 8, 8, 3, 4)
    until(lambda: of.waiting == 5)
    twice.going.set()
    answers = [one.result(WAIT)["twice"].tolist() for one in [first, *others]]
    assert answers == [[2], [16], [16], [16], [6], [8]]
    # The longest of the shorter rows rides along.
    assert twice.calls[1:] == [("2 x 8", [8, 8]), ("2 x 8", [8, 4]), ("2 x 3", [3])]
    until(lambda: len(told.batches) == 4)
    assert [facts.padding_share for facts in told.batches] == [0.5, 0.0, 0.25, 0.5]


def test_a_request_that_can_not_be_read_fails_alone(twice: Twice, made: Any) -> None:
    told = Told()
    of = made(told, delay_ms=20)
    futures = [of.submit(numbers(value)) for value in (1, "bad", "3", "seven", 5)]
    assert [futures[i].result(WAIT)["twice"].tolist() for i in (0, 2, 4)] == [[2], [6], [10]]
    with pytest.raises(DataError, match="the number is bad; send a good one"):
        futures[1].result(WAIT)
    with pytest.raises(DataError, match="the input can't be read \\(ValueError: invalid literal"):
        futures[3].result(WAIT)
    assert sum(facts.ended is Ended.refused for facts in told.answers) == 2
    assert of.waiting == 0


def test_wrong_arrays_are_refused_at_the_door(made: Any) -> None:
    of = made()
    for given, says in (
        ({"numbers": np.zeros(1)}, "there is no input 'numbers'; did you mean number?"),
        ({}, "the input number is missing; give bytes"),
        ({"number": np.empty((0,), object)}, "one dim of one or more"),
        ({"number": np.empty((1, 1), object)}, "one dim of one or more"),
    ):
        with pytest.raises(OptionError) as caught:
            of.submit(given)
        assert says in str(caught.value)
    with pytest.raises(RefusedError, match="has 257 examples, and at most 256") as refused:
        of.submit(numbers(*range(257)))
    assert refused.value.retry_seconds is None


def test_a_full_queue_refuses(twice: Twice, made: Any) -> None:
    of = made(waiting=3, waiting_bytes=100)
    first = hold(twice, of)
    others = [of.submit(numbers(2)), of.submit(numbers(3, 4))]
    with pytest.raises(RefusedError, match="3 of 3 examples wait") as refused:
        of.submit(numbers(5))
    assert refused.value.retry_seconds == 1.0
    with pytest.raises(RefusedError, match="send fewer at once") as never:
        of.submit(numbers(1, 2, 3, 4))
    assert never.value.retry_seconds is None
    others[0].cancel()  # It makes room.
    others.append(of.submit(numbers(6)))
    twice.going.set()
    assert [f.result(WAIT)["twice"].tolist() for f in (first, *others[1:])] == [[2], [6, 8], [12]]
    with pytest.raises(RefusedError, match="101 bytes"):
        of.submit(numbers("0" * 101))


def test_deadlines_pass_in_the_queue_and_on_the_device(twice: Twice, made: Any) -> None:
    told = Told()
    of = made(told)
    twice.going.clear()
    running = of.submit(numbers(1), deadline_seconds=0.05)
    until(lambda: bool(twice.calls))
    waiting = of.submit(numbers(2), deadline_seconds=0.05)
    for late in (running, waiting):
        with pytest.raises(ExpiredError, match=r"no answer within 0\.05 s"):
            late.result(WAIT)
    slow = of.submit(numbers("slow"), deadline_seconds=0.05)
    with pytest.raises(ExpiredError):
        slow.result(WAIT)
    twice.going.set()
    assert of.submit(numbers(3), deadline_seconds=60).result(WAIT)["twice"].tolist() == [6]
    assert [held for _, held in twice.calls] == [[1], [3]]
    assert [f.ended for f in told.answers] == [*[Ended.expired] * 3, Ended.answered]
    assert of.waiting == 0


def test_a_cancelled_request_is_not_computed(twice: Twice, made: Any) -> None:
    told = Told()
    of = made(told)
    first = hold(twice, of)
    gone, kept = of.submit(numbers(2)), of.submit(numbers(3))
    until(lambda: of.waiting == 2)
    assert gone.cancel()
    assert of.waiting == 1
    assert not first.cancel()  # The device has it.
    twice.going.set()
    assert kept.result(WAIT)["twice"].tolist() == [6]
    with pytest.raises(CancelledError):
        gone.result(WAIT)
    assert [held for _, held in twice.calls] == [[1], [3]]
    until(lambda: len(told.answers) == 3)
    assert told.answers[0].ended is Ended.cancelled


def test_a_request_that_breaks_a_batch_fails_alone(twice: Twice, made: Any) -> None:
    def fail(held: list[int]) -> None:
        if 13 in held:
            raise ValueError("unlucky\nmore lines")

    of = made()
    first = hold(twice, of)
    futures = [of.submit(numbers(n)) for n in (2, 13, 4)]
    until(lambda: of.waiting == 3)
    twice.does = fail
    twice.going.set()
    assert [f.result(WAIT)["twice"].tolist() for f in (first, futures[0], futures[2])] == [
        [2],
        [4],
        [8],
    ]
    with pytest.raises(RunError) as caught:
        futures[1].result(WAIT)
    assert (
        str(caught.value)
        == "numbers could not compute the request (ValueError: unlucky); send it again"
    )
    assert of.replaced == 0


def test_a_worker_that_dies_is_replaced(twice: Twice, made: Any) -> None:
    def die(held: list[int]) -> None:
        if 13 in held:
            raise SystemExit(3)

    metrics, log = Metrics(), io.StringIO()
    of = made(BatchLoadMetrics("m", BatchMetrics(metrics).of("m"), EventLog(log)))  # ty: ignore[invalid-argument-type]
    first = hold(twice, of)
    futures = [of.submit(numbers(n)) for n in (2, 13)]
    until(lambda: of.waiting == 2)
    twice.does = die
    twice.going.set()
    assert first.result(WAIT)["twice"].tolist() == [2]
    for one in futures:
        with pytest.raises(RunError) as caught:
            one.result(WAIT)
        assert (
            str(caught.value)
            == "the worker of numbers that held the request died (SystemExit: 3); send it again"
        )
    assert of.submit(numbers(5)).result(WAIT)["twice"].tolist() == [10]
    assert (of.replaced, of.ready, of.waiting) == (1, True, 0)
    assert counted(metrics, "batch_workers_died_total") == 1
    told = [json.loads(line) for line in log.getvalue().splitlines()]
    (death,) = [line for line in told if line["event"] == "worker_died"]
    assert (death["model"], death["error"]) == ("m", "SystemExit: 3")


def counted(metrics: Metrics, name: str) -> float:
    at = {"model_name": "m", "version": "1", "engine": "0"}
    found = metrics.registry.get_sample_value(f"systolic:{name}", at)
    assert found is not None, name
    return found


def test_metrics_say_what_waits_and_which_positions_are_padding(twice: Twice, made: Any) -> None:
    metrics = Metrics()
    pairs = Shapes(largest=2, programs=8, traffic=Traffic(examples={2: 1.0}))
    of = made(BatchMetrics(metrics).of("m"), longest=8, shapes=pairs, delay_ms=0)  # ty: ignore[invalid-argument-type]
    assert counted(metrics, "batch_examples_waiting") == 0
    first = hold(twice, of)
    others = in_turn(of, 8, 8, 8, 3, 4)
    assert counted(metrics, "batch_examples_waiting") == 5
    gone = of.submit(numbers(1, 2))
    assert counted(metrics, "batch_examples_waiting") == 7
    assert gone.cancel()
    assert counted(metrics, "batch_examples_waiting") == 5
    until(lambda: len(of._queue.lanes) >= 5)
    twice.going.set()
    for one in (first, *others):
        one.result(WAIT)
    assert of.drain(WAIT)
    # 2 x 1 with 1, 2 x 8 with 8 and 8, 2 x 8 with 8 and 4, 2 x 3 with 3.
    assert counted(metrics, "useful_tokens_total") == 1 + 16 + 12 + 3
    assert counted(metrics, "padding_tokens_total") == 1 + 0 + 4 + 3
    assert counted(metrics, "batch_examples_waiting") == 0


def test_an_intake_that_fails_leaves_no_request_behind(made: Any) -> None:
    of = made(waiting=1)
    parts = of._intake.parts

    def broken(inputs: Any) -> Any:
        raise MemoryError("no room")

    of._intake.parts = broken
    with pytest.raises(DataError, match="can't be read \\(MemoryError: no room"):
        of.submit(numbers(1)).result(WAIT)
    of._intake.parts = parts
    assert of.waiting == 0
    assert of.submit(numbers(2)).result(WAIT)["twice"].tolist() == [4]
    assert of.drain(WAIT)


class Shared(Twice):
    """A predictor whose largest size is computed by the program of another, as on the cores of a CPU."""

    def compile(self, bucket: Bucket) -> ReadyProgram | None:
        return None if bucket.rows == 4 else super().compile(bucket)


def test_the_log_has_each_size_and_metrics_have_each_program() -> None:
    log, metrics = io.StringIO(), Metrics()
    watcher = BatchLoadMetrics("m", BatchMetrics(metrics).of("m"), EventLog(log))
    of = model(Shared(), watcher, shapes=Shapes(largest=4))  # ty: ignore[invalid-argument-type]
    watcher.sized(of.buckets)
    of.close()
    *compiled, sizes = map(json.loads, log.getvalue().splitlines())
    assert [(event["program"], event["done"]) for event in compiled] == [
        (str(size), size) for size in range(1, sizes["programs"] + 1)
    ]
    assert [event.get("shared", False) for event in compiled] == [False, False, False, True]
    assert counted(metrics, "compile_cache_misses_total") == 3


@pytest.mark.parametrize("strict", [False, True])
def test_a_compile_after_ready_is_counted_and_can_be_an_error(
    twice: Twice, made: Any, strict: bool
) -> None:
    told = Told()
    of = made(told, strict=strict)
    before = len(told.compiles)
    assert of.submit(numbers(1)).result(WAIT)["twice"].tolist() == [2]
    assert of.compiles_after_ready == 0
    seed = np.random.default_rng().integers(2**30)
    twice.does = lambda held: jax.block_until_ready(jax.jit(lambda x: x + seed)(np.zeros(3)))
    late = of.submit(numbers(2))
    if strict:
        with pytest.raises(RunError, match="the program of 1 was compiled after numbers was ready"):
            late.result(WAIT)
    else:
        assert late.result(WAIT)["twice"].tolist() == [4]
    assert of.compiles_after_ready == 1
    assert of.ready is not strict
    assert [facts.after_ready for facts in told.compiles[before:]] == [True]


@pytest.mark.parametrize("strict", [False, True])
def test_weights_of_a_model_that_was_closed_are_freed_at_once(twice: Twice, strict: bool) -> None:
    """Nothing waits for the collector, which runs seldom in a server that has many objects."""
    gc.disable()
    try:
        of = model(twice, strict=strict)
        assert of.submit(numbers(1)).result(WAIT)["twice"].tolist() == [2]
        with pytest.raises(ExpiredError):
            of.submit(numbers(2), deadline_seconds=0.0).result(WAIT)
        assert of.drain(WAIT)
        held = [weakref.ref(part) for part in (of, of._workers, of._intake)]
        del of
        until(lambda: not any(part() for part in held))
    finally:
        gc.enable()


def test_a_compile_in_a_shared_batch_ends_a_strict_model(twice: Twice, made: Any) -> None:
    of = made(strict=True)
    first = hold(twice, of)
    shared = in_turn(of, 2, 3)
    until(lambda: of.waiting == 2)
    seed = np.random.default_rng().integers(2**30)

    def compile_once(held: list[int]) -> None:
        if len(held) == 2:
            jax.block_until_ready(jax.jit(lambda x: x + seed)(np.zeros(3)))

    twice.does = compile_once
    twice.going.set()
    assert first.result(WAIT)["twice"].tolist() == [2]
    for one in shared:
        with pytest.raises(RunError, match="was compiled after numbers was ready"):
            one.result(WAIT)
    assert [held for _, held in twice.calls] == [[1], [2, 3]]
    assert (of.compiles_after_ready, of.ready, of.waiting) == (1, False, 0)
    with pytest.raises(RefusedError, match="numbers has failed"):
        of.submit(numbers(4))
    assert of.heartbeat_seconds > 0
    assert of.drain(WAIT)


def test_a_stuck_worker_makes_it_not_ready(twice: Twice, made: Any) -> None:
    of = made(stalled_seconds=0.05)
    assert of.ready
    first = hold(twice, of)
    until(lambda: not of.ready)
    served = ServedBatch(name="numbers", model=of)
    until(
        lambda: served.heartbeat_seconds > 0.01
    )  # The server is alive while this is below a minute.
    twice.going.set()
    first.result(WAIT)
    until(lambda: of.ready)
    assert served.heartbeat_seconds == 0


def test_drain_answers_what_was_taken(twice: Twice, made: Any) -> None:
    of = made()
    first = hold(twice, of)
    others = [of.submit(numbers(n)) for n in range(20)]
    twice.does = lambda held: time.sleep(0.01)
    twice.going.set()
    assert of.drain(WAIT)
    assert [f.result(0)["twice"].tolist() for f in (first, *others)] == [
        [2],
        *([2 * n] for n in range(20)),
    ]
    assert not of.ready
    with pytest.raises(RefusedError, match="numbers has ended"):
        of.submit(numbers(1))


def test_drain_waits_until_every_answer_was_told(twice: Twice, made: Any) -> None:
    class Slow(Told):
        def answered(self, facts: AnswerFacts) -> None:
            time.sleep(0.05)
            super().answered(facts)

    told = Slow()
    of = made(told, workers=2)
    asked = [of.submit(numbers(n)) for n in range(4)]
    assert of.drain(WAIT)
    assert len(told.answers) == 4
    assert all(future.done() for future in asked)


def test_what_drain_can_not_wait_for_fails(twice: Twice, made: Any) -> None:
    of = made()
    first = hold(twice, of)
    second = of.submit(numbers(2))
    until(lambda: of.waiting == 1)
    assert not of.drain(0.05)
    for one in (first, second):
        with pytest.raises(RunError, match="ended before the answer"):
            one.result(0)


def test_nothing_is_taken_before_it_is_ready(twice: Twice) -> None:
    from tests.serving.batch.stub import Numbers

    of = DynamicBatches("numbers", Numbers(), twice)  # ty: ignore[invalid-argument-type]
    assert not of.ready
    with pytest.raises(RefusedError, match="numbers is not ready") as refused:
        of.submit(numbers(1))
    assert refused.value.retry_seconds == 1.0
    of.close()


def test_a_storm_of_cancels_and_deadlines_leaves_nothing_behind(twice: Twice, made: Any) -> None:
    told = Told()
    of = made(told, waiting=64, workers=3, longest=40, shapes=Shapes(largest=8))
    draw = np.random.default_rng(0)
    taken, refused = [], 0
    for _ in range(3000):
        values = draw.integers(1, 40, draw.integers(1, 4)).tolist()
        if draw.random() < 0.05:
            values = ["bad"]
        try:
            late = float(draw.choice([0.0, 0.001, 60.0]))
            future = of.submit(numbers(*values), deadline_seconds=late)
        except RefusedError:
            refused += 1
            time.sleep(0.001)
            continue
        if draw.random() < 0.2:
            future.cancel()
        taken.append((values, future))
    assert of.drain(60)
    ended = dict.fromkeys(Ended, 0)
    for values, future in taken:
        if future.cancelled():
            ended[Ended.cancelled] += 1
        elif (error := future.exception(0)) is not None:
            ended[Ended.expired if isinstance(error, ExpiredError) else Ended.refused] += 1
        else:
            ended[Ended.answered] += 1
            assert future.result()["twice"].tolist() == [2 * value for value in values]
    assert len(taken) + refused == 3000
    assert of.replaced == 0
    assert min(ended[kind] for kind in Ended if kind is not Ended.failed) > 0
    assert {kind: sum(f.ended is kind for f in told.answers) for kind in Ended} == ended
    assert of.waiting == 0
    assert of.replaced == 0
