"""Continuous batching in steady state, and the memory of a server, against sums made by hand."""

from dataclasses import replace

import pytest

from systolic.chips import slice
from systolic.core.errors import OptionError
from systolic.core.units import Origin
from systolic.forecasting.cost import bill_of
from systolic.forecasting.serving.forecast import (
    Load,
    ServingPoint,
    StepTimes,
    burst_seconds,
    steady,
)
from systolic.job.serving_memory import ServingMemory

LOAD = Load(prompt_tokens=1000, output_tokens=101, chunk=512)


def test_counts_of_a_load() -> None:
    assert (LOAD.tokens, LOAD.chunks, LOAD.mean_context) == (1101, 2, 1051)
    with pytest.raises(OptionError, match=r"output-tokens is 0"):
        Load(output_tokens=0)


def test_seconds_between_compiled_sizes_and_beyond() -> None:
    times = StepTimes(decode={1: 0.010, 16: 0.040, 64: 0.136}, chunk=0.1)
    assert times.decode_seconds(1) == 0.010
    assert times.decode_seconds(8.5) == pytest.approx(0.025)  # halfway from 1 to 16
    assert times.decode_seconds(64) == 0.136
    assert times.decode_seconds(80) == pytest.approx(0.136 + 16 * 0.096 / 48)
    assert times.decode_seconds(0.5) == 0.005  # half of the steps have no row


def test_one_request_alone() -> None:
    """Two chunks of 0.1 s, then 100 steps of 0.01 s: 1.2 s a request."""
    state = steady(LOAD, StepTimes(decode={1: 0.01}, chunk=0.1), 1)
    assert state.first_token_seconds == pytest.approx(0.2)
    assert state.token_seconds == pytest.approx(0.01)
    assert state.requests_per_second == pytest.approx(1 / 1.2)
    assert state.decode_rows == pytest.approx(1.0 / 1.2)
    assert not state.saturated


def test_many_requests_with_steps_of_one_length() -> None:
    """Of 11 requests a token waits for the chunks of 10 others: rows R solve R = 11 x 100 t / (2 (0.01 + 0.1) + 100 t), t = 0.01 + R 0.02 10/11 0.1."""
    state = steady(LOAD, StepTimes(decode={1: 0.01, 99: 0.01}, chunk=0.1), 11)
    rows = state.decode_rows
    token = 0.01 + rows * 0.02 * (10 / 11) * 0.1
    assert state.token_seconds == pytest.approx(token)
    assert state.first_token_seconds == pytest.approx(0.22)
    assert rows == pytest.approx(11 * 100 * token / (0.22 + 100 * token))
    assert state.requests_per_second * (0.22 + 100 * token) == pytest.approx(11)  # Little's law
    assert state.chunk_share == pytest.approx(rows * 2 / 100)


def test_prompts_in_every_step() -> None:
    """A request needs 2 steps of 0.11 s with a chunk, so that no more than 1 / 0.22 end a second, and the others queue."""
    state = steady(LOAD, StepTimes(decode={1: 0.01, 99: 0.01}, chunk=0.1), 80)
    assert state.saturated
    assert state.decode_rows == 50
    assert state.token_seconds == pytest.approx(0.11)
    assert state.requests_per_second == pytest.approx(1 / 0.22)
    assert state.first_token_seconds == pytest.approx(80 * 0.22 - 100 * 0.11)


def test_answers_of_one_token() -> None:
    load = Load(prompt_tokens=1024, output_tokens=1, chunk=512)
    state = steady(load, StepTimes(decode={1: 0.01}, chunk=0.1), 4)
    assert state.requests_per_second == pytest.approx(1 / 0.2)
    assert state.first_token_seconds == pytest.approx(4 * 0.2)
    assert state.token_seconds == 0.0


def test_tokens_and_dollars_of_two_replicas() -> None:
    on = slice("v6e-8")
    state = steady(LOAD, StepTimes(decode={1: 0.01}, chunk=0.1), 1)
    point = ServingPoint(
        concurrency=2,
        state=state,
        replicas=2,
        floor=steady(LOAD, StepTimes(decode={1: 0.005}, chunk=0.1), 1),
        load=LOAD,
        usd_per_hour=36.0,
    )
    rate = 2 / 1.2
    assert point.requests_per_second == pytest.approx(rate)
    assert point.output_tokens_per_second == pytest.approx(rate * 101)
    assert point.tokens_per_second == pytest.approx(rate * 1101)
    assert point.floor_output_tokens_per_second == pytest.approx(2 / 0.7 * 101)
    # $36 an hour is a cent a second.
    assert point.usd_per_million_tokens == pytest.approx(0.01 / (rate * 1101) * 1e6)
    assert point.usd_per_million_output_tokens == pytest.approx(0.01 / (rate * 101) * 1e6)
    assert point.to_json()["floor"]["time_per_output_token_seconds"] == pytest.approx(0.005)
    assert bill_of(on).usd_per_hour


def test_the_table_of_memory_sums_to_the_device() -> None:
    memory = ServingMemory(
        capacity_bytes=1000,
        weights_bytes=300,
        temporary_bytes=50,
        page_bytes=40,
        page_size=16,
        replicas=2,
        origin=Origin.compiled,
    )
    assert memory.num_pages == 16  # of the 650 bytes that are free
    assert (memory.pages_bytes, memory.left_bytes) == (640, 10)
    assert sum(row.bytes for row in memory.rows()) == memory.capacity_bytes
    assert memory.pages_of(33) == 3
    assert memory.concurrency(33) == 10  # 5 texts of 3 pages in each replica
    assert memory.concurrency(64) == 6  # 3 texts of 4 pages: one of the 16 takes padding
    assert memory.num_positions == 2 * 15 * 16
    assert memory.to_json()["pages"] == 16


def test_no_room_for_a_page() -> None:
    memory = ServingMemory(
        capacity_bytes=100, weights_bytes=90, temporary_bytes=50, page_bytes=40, page_size=16
    )
    assert (memory.num_pages, memory.concurrency(1), memory.left_bytes) == (0, 0, -40)


@pytest.mark.parametrize(
    ("name", "seconds"), [("v6e-8", 1.2e-3), ("tpu7x-8", 1.2e-3), ("h100", 2e-4)]
)
def test_the_host_s_work_is_what_was_measured_unless_it_is_given(name: str, seconds: float) -> None:
    assert LOAD.on(slice(name)).host_seconds == seconds
    given = replace(LOAD, host_seconds=0.0)
    assert given.on(slice(name)) is given


def test_the_host_beside_a_step_and_after_it() -> None:
    """Steps of 10 ms hide 4 ms of the host and show 2 of 12; after the step all of it counts."""
    short = StepTimes(decode={1: 0.010}, chunk=0.1, host=0.004)
    long = StepTimes(decode={1: 0.010}, chunk=0.1, host=0.012)
    assert steady(LOAD, short, 1).token_seconds == pytest.approx(0.010)
    assert steady(LOAD, long, 1).token_seconds == pytest.approx(0.012)
    after = StepTimes(decode={1: 0.010}, chunk=0.1, host=0.012, host_after=True)
    assert steady(LOAD, after, 1).token_seconds == pytest.approx(0.022)
    assert steady(LOAD, after, 1).first_token_seconds == pytest.approx(0.2)


def test_prompts_that_come_at_once() -> None:
    """Prompts of 2 chunks of 0.11 s one after the other: 0.22, 0.44 ... 1.76 s, on average 0.99 s."""
    times = StepTimes(decode={1: 0.01, 99: 0.01}, chunk=0.1)
    state = steady(LOAD, times, 8)
    assert burst_seconds(LOAD, times, state, 8) == pytest.approx(0.22 * 4.5)
    # 800 more than the engine holds wait for others to end: half of them at the mean, at its rate.
    many = burst_seconds(LOAD, times, state, 808)
    assert many == pytest.approx(400 / state.requests_per_second, rel=0.05)


def test_more_rows_more_tokens_and_longer_steps() -> None:
    times = StepTimes(decode={1: 0.01, 16: 0.012, 64: 0.02}, chunk=0.02)
    states = [steady(LOAD, times, count) for count in (1, 4, 16, 64)]
    rates = [state.requests_per_second for state in states]
    assert rates == sorted(rates)
    assert [s.token_seconds for s in states] == sorted(s.token_seconds for s in states)
