"""Engines for a demand, against sums made by hand and a simulation of the queue."""

import math
import random
from dataclasses import replace

import pytest

from systolic.core.errors import OptionError
from systolic.forecasting.demand import Demand, engine_state, fleet, most_rate
from systolic.forecasting.serving import LatencyLimits, Load, StepTimes

LOAD = Load(prompt_tokens=1000, output_tokens=101, chunk=512)
TIMES = StepTimes(decode={1: 0.010, 100: 0.010}, chunk=0.02)
DEMAND = Demand(requests_per_second=100, load=LOAD)


def test_a_rate_that_is_none() -> None:
    with pytest.raises(OptionError, match=r"requests-per-second is 0"):
        Demand(requests_per_second=0, load=LOAD)


def test_an_engine_at_a_rate_by_hand() -> None:
    """10 requests a second of 2 chunks: t = 0.01 + 10 x 2 t x 0.02 = 0.01 / 0.6; a prompt takes 2 x 0.03 s and is read in 60 % of the time."""
    state = engine_state(LOAD, TIMES, 10)
    assert state is not None
    token = 0.01 / 0.6
    assert state.token_seconds == pytest.approx(token)
    assert state.decode_rows == pytest.approx(10 * 100 * token)
    assert state.prompt_share == pytest.approx(0.6)
    assert state.first_token_seconds == pytest.approx(0.06 + 0.6 * 0.06 / (2 * 0.4))
    late = 0.06 + 0.06 / (2 * 0.4) * math.log(0.6 / 0.01)
    assert state.late_first_token_seconds == pytest.approx(late)
    # Little's law: rate times latency.
    assert state.requests == pytest.approx(10 * (state.first_token_seconds + 100 * token))
    assert state.most_requests == pytest.approx(state.requests + 2.326 * state.requests**0.5)


def test_an_engine_that_does_not_keep_up() -> None:
    assert engine_state(LOAD, TIMES, 1 / 0.06) is None
    assert engine_state(LOAD, TIMES, 1000) is None
    # Each text makes the steps longer that it waits for.
    assert engine_state(LOAD, StepTimes(decode={1: 0.01, 2: 0.02}, chunk=1e-6), 1.1) is None


def test_answers_of_one_token() -> None:
    state = engine_state(replace(LOAD, output_tokens=1), TIMES, 10)
    assert state is not None
    assert (state.token_seconds, state.decode_rows) == (0.0, 0.0)
    assert state.prompt_share == pytest.approx(10 * 2 * 0.02)


def test_the_wait_is_that_of_a_simulated_queue() -> None:
    """Prompts of 0.06 s that come by chance, one after the other."""
    state = engine_state(LOAD, TIMES, 10)
    assert state is not None
    draw, free, now, waits = random.Random(0), 0.0, 0.0, []
    for _ in range(200_000):
        now += draw.expovariate(10)
        free = max(free, now) + 0.06
        waits.append(free - now)
    waits.sort()
    assert state.first_token_seconds == pytest.approx(sum(waits) / len(waits), rel=0.02)
    late = waits[int(0.99 * len(waits))]
    assert late < state.late_first_token_seconds < 1.2 * late


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        (LatencyLimits(), 1_000_000),
        (LatencyLimits(), 12),
        (LatencyLimits(token_seconds=0.015), 1_000_000),
        (LatencyLimits(first_token_seconds=0.2), 1_000_000),
    ],
    ids=["prompts", "room", "token", "first"],
)
def test_the_most_that_an_engine_takes_is_at_its_limit(limits: LatencyLimits, room: int) -> None:
    demand = replace(DEMAND, limits=limits)
    rate, state = most_rate(demand, TIMES, room)
    assert state is not None
    assert state.kept(limits)
    assert state.most_requests <= room
    more = engine_state(LOAD, TIMES, rate * 1.001)
    assert more is None or not more.kept(limits) or more.most_requests > room
    if limits.token_seconds:  # 0.015 = 0.01 / (1 - 0.04 rate)
        assert rate == pytest.approx((1 - 0.01 / 0.015) / 0.04)


def test_replicas_take_the_demand_and_no_fewer_do() -> None:
    demand = replace(DEMAND, limits=LatencyLimits(token_seconds=0.016))
    made = fleet(demand, TIMES, room=1000, engines=2, usd_per_hour=3.6)
    assert made is not None
    rate = (1 - 0.01 / 0.016) / 0.04
    assert made.replicas == math.ceil(100 / (2 * rate)) == 6
    assert made.replicas * made.engines * made.most_rate >= 100 > 5 * 2 * made.most_rate
    assert made.headroom == pytest.approx(12 * rate / 100 - 1)
    assert made.state.requests_per_second == pytest.approx(100 / 12)
    assert made.state.token_seconds < 0.016
    # $21.60 an hour is 0.6 cents a second, for 110,100 tokens of which 10,100 are new.
    assert made.usd_per_hour == pytest.approx(21.6)
    assert made.usd_per_million_tokens == pytest.approx(0.006 / 110_100 * 1e6)
    assert made.usd_per_million_output_tokens == pytest.approx(0.006 / 10_100 * 1e6)
    # Throughput of all engines is the demand, by Little's law of each.
    state = made.state
    latency = state.first_token_seconds + 100 * state.token_seconds
    assert 12 * state.requests / latency == pytest.approx(100)


def test_a_demand_that_no_engine_keeps() -> None:
    demand = replace(DEMAND, limits=LatencyLimits(token_seconds=0.009))
    assert fleet(demand, TIMES, room=1000, engines=2, usd_per_hour=1.0) is None
    assert fleet(DEMAND, TIMES, room=0, engines=2, usd_per_hour=1.0) is None
