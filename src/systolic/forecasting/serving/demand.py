"""Engines for a demand: requests that come by chance, their latency at a load, and the most that an engine takes.

Assumptions, of which none is measured:

- Requests come by chance (Poisson) and are shared evenly by the engines, so that one which comes sees the mean of the
  others (Wolff 1982).
- Prompts are read one after the other, so that they wait for each other as in a queue with one server and equal times,
  M/D/1 (Pollaczek and Khinchine for the mean, Erlang 1909 for the tail).
- The number of requests under way spreads as a Poisson number does; an engine has room for what it is in 99 % of the time.

These formulas bound an engine from the good side: texts are spread evenly over time, and their steps read no more chunks than
they must. Requests cluster: those that wait for a prompt begin to generate one after the other, so that many rows and much
reading fall into the same time. With long prompts the mean token takes a quarter more, and twice as many are under way. An
engine's figures are therefore those of a simulation of its steps under random requests (``simulated_state``), with two
standard errors on top.
"""

import functools
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from systolic.core.ranges import POSITIVE, check
from systolic.forecasting.serving.forecast import LatencyLimits, Load, StepTimes

ASSUMED = "requests come by chance (Poisson), engines share them evenly; prompts wait for each other (M/D/1), and 99 % of them have their first token within the time shown; room for the requests under way in 99 % of the time; simulated step by step, two standard errors on top"
LATE = 0.01
"""Share of the requests that may exceed the time to the first token, and of the time in which room may be short."""
SPREAD = 2.326
"""Standard deviations of a normal number above which a share of LATE lies."""
TURNS = 2000
"""Iterations of a step's seconds, which depend on the rows that they themselves make."""
LONGEST = 3600.0
"""Seconds of a token from which an engine counts as one that does not keep up."""
HALVINGS = 50
SIMULATED = 16_000
"""Requests that are simulated, at least."""
SIMULATED_MOST = 40_000
TURNOVERS = 12
"""Times that all requests under way are replaced in a simulation."""
BATCHES = 8
"""Parts of a simulation whose differences give its standard error; the first, in which it fills up, counts for nothing."""
STEPS = 8
"""Halvings of the rate of a simulated engine, the last of 0.4 % of the formulas' rate."""
GROWN = 2.0
"""Every wait at the end over the mean one at the beginning above which the queue grows without end."""
ERRORS = 2.0
"""Standard errors that are added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requests a second, and the latency that they are to have.

    Raises:
        OptionError: a rate that is not positive.
    """

    requests_per_second: Annotated[float, POSITIVE]
    load: Load
    limits: LatencyLimits = field(default_factory=LatencyLimits)
    """Limits of the time to the first token of 99 % of the requests, and of the mean time of each further token."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens and new ones."""
        return self.requests_per_second * self.load.tokens

    @property
    def output_tokens_per_second(self) -> float:
        """New tokens."""
        return self.requests_per_second * self.load.output_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """An engine at a rate of requests, in the mean over time."""

    requests_per_second: float
    decode_rows: float
    """Texts that generate."""
    requests: float
    """Requests under way, those that wait for their prompt included: rate times latency (Little 1961)."""
    most_requests: float
    """Requests under way that are exceeded in 1 % of the time."""
    prompt_share: float
    """Share of the time in which a prompt is read."""
    first_token_seconds: float
    """Mean from the request to its first token."""
    late_first_token_seconds: float
    """The time that 1 % of the requests exceed at most; never below the mean, which rare waits lift above all others where an engine is idle."""
    token_seconds: float
    """Between the tokens of a text; 0 where there is only one."""

    def kept(self, limits: LatencyLimits) -> bool:
        """Whether it keeps a demand's limits."""
        first, token = limits.first_token_seconds, limits.token_seconds
        return (first is None or self.late_first_token_seconds <= first) and (
            token is None or self.token_seconds <= token
        )

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def engine_state(load: Load, times: StepTimes, rate: float) -> EngineState | None:
    """An engine at ``rate`` requests a second, no worse than it may be; None where it does not keep up.

    A step reads a token of each text and, in the share of steps in which a prompt is under way, a chunk.
    """
    chunks, following = load.chunks, load.output_tokens - 1
    if rate * chunks * times.chunk >= 1:
        return None
    token, share = 0.0, 0.0
    if following:
        settled = _token_seconds(load, times, rate)
        if settled is None:
            return None
        token, share = settled
    # Rows in the mean step that reads a chunk: by chance some have none, but texts begin at least a prompt's chunks apart.
    beside = following * share / chunks
    some = max(-math.expm1(-beside), beside / math.ceil(following / chunks)) if following else 0.0
    more = some * times.decode_seconds(beside / some) if some else 0.0
    reading = chunks * (times.chunk + more)
    busy = rate * reading
    if busy >= 1:
        return None
    waiting = reading / (2 * (1 - busy))
    first = reading + busy * waiting
    requests = rate * (first + following * token)
    return EngineState(
        requests_per_second=rate,
        decode_rows=rate * following * token,
        requests=requests,
        most_requests=requests + SPREAD * math.sqrt(requests),
        prompt_share=busy,
        first_token_seconds=first,
        late_first_token_seconds=max(reading + _late_wait(busy, reading), first),
        token_seconds=token,
    )


def _token_seconds(load: Load, times: StepTimes, rate: float) -> tuple[float, float] | None:
    """Seconds of a text's mean step, and the share of its steps that read a chunk; None where texts pile up.

    A text sees the mean rows: more only where texts cluster. Its first steps read a chunk as often as a request waits, in
    at least the share of the time that chunks alone take; the many steps of a long text as many chunks as come meanwhile.
    """
    following, chunks_per_second = load.output_tokens - 1, rate * load.chunks
    busy = chunks_per_second * times.chunk
    token = times.decode_seconds(1)
    for _ in range(TURNS):
        decode = times.decode_seconds(max(1.0, rate * following * token))
        share = min(busy, chunks_per_second * decode / (1 - busy), 1.0)
        updated = decode + share * times.chunk
        if updated > LONGEST:
            return None
        if updated - token < 1e-9 * token:
            return updated, share
        token = updated
    return None


def _late_wait(busy: float, reading: float) -> float:
    """The wait that a share LATE exceeds, of prompts that each take ``reading`` and come by chance (M/D/1; Erlang 1909).

    Up to one reading no wait exceeds t in a share (1 - busy) exp(busy t / reading); the tail beyond falls as
    exp(-decay t / reading) where busy (exp(decay) - 1) = decay.
    """
    if busy <= LATE:
        return 0.0
    short = math.log((1 - LATE) / (1 - busy)) / busy
    if short <= 1:
        return short * reading
    low, high = 0.0, -2 * math.log(busy)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if busy * math.expm1(middle) < middle else (low, middle)
    of_all = (1 - busy) / (busy + high - 1)
    return reading / high * math.log(of_all / LATE)


def simulated_state(load: Load, times: StepTimes, rate: float) -> EngineState | None:
    """An engine at ``rate`` requests a second as a simulation of its steps has it; None where it does not keep up.

    The same requests come at every call, fewer than rare waits take to settle: nothing is better than ``engine_state``'s bounds.
    """
    mean = engine_state(load, times, rate)
    if mean is None:
        return None
    number = int(min(max(SIMULATED, TURNOVERS * mean.requests), SIMULATED_MOST))
    batches = _simulated(load, times, rate, number)
    if min(batches[-1].firsts) > GROWN * statistics.fmean(batches[0].firsts):
        return None
    following = load.output_tokens - 1
    token = max(_upper([statistics.fmean(b.tokens) for b in batches]), mean.token_seconds)
    first = max(_upper([statistics.fmean(b.firsts) for b in batches]), mean.first_token_seconds)
    firsts = sorted(seconds for b in batches for seconds in b.firsts)
    late = firsts[int((1 - LATE) * len(firsts))]
    late += _error([sorted(b.firsts)[int((1 - LATE) * len(b.firsts))] for b in batches])
    held: dict[int, float] = {}
    for batch in batches:
        for requests, seconds in batch.held.items():
            held[requests] = held.get(requests, 0.0) + seconds
    most = math.ceil(_exceeded(held) + _error([_exceeded(b.held) for b in batches]))
    return replace(
        mean,
        decode_rows=rate * following * token,
        requests=rate * (first + following * token),
        most_requests=most,
        prompt_share=max(mean.prompt_share, _upper([b.reading for b in batches])),
        first_token_seconds=first,
        late_first_token_seconds=max(late, first, mean.late_first_token_seconds),
        token_seconds=token if following else 0.0,
    )


@dataclass
class _EventBatch:
    """Events in a part of a simulation; times in seconds."""

    firsts: list[float] = field(default_factory=list)
    """From requests to their first tokens."""
    tokens: list[float] = field(default_factory=list)
    """Seconds of a token, the mean of each text."""
    held: dict[int, float] = field(default_factory=dict)
    """Requests under way to the time in which there were as many."""
    read: float = 0.0

    @property
    def reading(self) -> float:
        """Share of the time in which a prompt was read."""
        return self.read / sum(self.held.values())


def _error(values: Sequence[float]) -> float:
    return ERRORS * statistics.stdev(values) / math.sqrt(len(values))


def _upper(values: Sequence[float]) -> float:
    return statistics.fmean(values) + _error(values)


def _exceeded(held: dict[int, float]) -> int:
    """Requests that are exceeded in a share LATE of the time."""
    left = LATE * sum(held.values())
    for requests in sorted(held, reverse=True):
        left -= held[requests]
        if left < 0:
            return requests
    return 0


@functools.lru_cache(maxsize=4)
def _gaps(number: int) -> tuple[float, ...]:
    """Exponential gaps between requests, whose mean is 1."""
    draw = random.Random(0)
    gaps = [draw.expovariate(1) for _ in range(number)]
    mean = statistics.fmean(gaps)
    return tuple(gap / mean for gap in gaps)


def _simulated(load: Load, times: StepTimes, rate: float, number: int) -> list[_EventBatch]:
    """The steps of an engine while ``number`` requests come by chance.

    Steps between which no text ends, no prompt is read to its end and none comes to an idle queue are equal, and taken at once.
    """
    gaps, following = itertools.cycle(_gaps(number)), load.output_tokens - 1
    known: dict[int, float] = {0: 0.0}
    now, step, coming, left = 0.0, 0, next(gaps) / rate, load.chunks
    waiting: deque[float] = deque()
    ends: deque[tuple[int, float]] = deque()
    """Step of a text's last token, and the time of its first."""
    batches = [_EventBatch()]
    done, each = 0, number // BATCHES
    while done < number:
        if not waiting and not ends:
            batches[-1].held[0] = batches[-1].held.get(0, 0.0) + coming - now
            now = coming
            waiting.append(coming)
            coming += next(gaps) / rate
        rows, batch = len(ends), batches[-1]
        if rows not in known:
            known[rows] = times.decode_seconds(rows)
        seconds = known[rows] + (times.chunk if waiting else 0.0)
        steps = left if waiting else max(math.ceil((coming - now) / seconds), 1)
        steps = min(steps, ends[0][0] - step) if ends else steps
        until, here = now + steps * seconds, rows + len(waiting)
        batch.read += steps * seconds if waiting else 0.0
        left -= steps if waiting else 0
        reads = not left
        while coming <= until:
            batch.held[here] = batch.held.get(here, 0.0) + coming - now
            now, here = coming, here + 1
            waiting.append(coming)
            coming += next(gaps) / rate
        batch.held[here] = batch.held.get(here, 0.0) + until - now
        now, step = until, step + steps
        while ends and ends[0][0] == step:
            batch.tokens.append((now - ends.popleft()[1]) / following)
        if reads:
            left = load.chunks
            batch.firsts.append(now - waiting.popleft())
            done += 1
            if following:
                ends.append((step + following, now))
            if done % each == 0 and len(batches) < BATCHES:
                batches.append(_EventBatch())
    for batch in batches:
        batch.tokens = batch.tokens or [0.0]
    return batches[1:]


def most_rate(
    demand: Demand, times: StepTimes, room: int, *, floor: bool = False
) -> tuple[float, EngineState] | tuple[float, None]:
    """The most requests a second of an engine that keeps the limits and has room for so many, and its state; 0 where none is kept.

    Args:
        demand: Limits and the load.
        times: Of the engine's steps.
        room: Requests that it holds.
        floor: Whether the formulas are enough, which no simulation is better than.
    """
    load, limits = demand.load, demand.limits

    def taken(rate: float, by: Callable = engine_state) -> EngineState | None:
        state = by(load, times, rate)
        fits = state is not None and state.kept(limits) and state.most_requests <= room
        return state if fits else None

    most, state = _largest(taken, 1 / (load.chunks * times.chunk), HALVINGS)
    if floor or state is None:
        return (most, state) if state is not None else (0.0, None)
    at_most = taken(most, simulated_state)
    if at_most is not None:
        return most, at_most
    return _largest(lambda rate: taken(rate, simulated_state), most, STEPS)


def _largest(
    taken: Callable[[float], EngineState | None], most: float, halvings: int
) -> tuple[float, EngineState] | tuple[float, None]:
    low, high, largest = 0.0, most, None
    for _ in range(halvings):
        middle = (low + high) / 2
        state = taken(middle)
        if state is None:
            high = middle
        else:
            low, largest = middle, state
    return (low, largest) if largest is not None else (0.0, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Replicas of a slice that take a demand together."""

    demand: Demand
    engines: int
    """Engines of a replica."""
    replicas: int
    most_rate: float
    """Requests a second that one engine takes within the limits."""
    state: EngineState
    """State of each engine at the demand."""
    at_most: EngineState
    """State of an engine at the most that it takes."""
    usd_per_hour: float | None
    """Price of all replicas."""

    @property
    def capacity(self) -> float:
        """Requests a second of all replicas within the limits."""
        return self.replicas * self.engines * self.most_rate

    @property
    def headroom(self) -> float:
        """Share of the demand that could come on top."""
        return self.capacity / self.demand.requests_per_second - 1

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Dollars for a million tokens of the demand, prompts and answers in its mix."""
        return self._usd(self.demand.tokens_per_second)

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """Dollars for a million new tokens, their prompts included."""
        return self._usd(self.demand.output_tokens_per_second)

    def _usd(self, tokens_per_second: float) -> float | None:
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour / 3600 / tokens_per_second * 1e6

    def to_json(self) -> dict[str, Any]:
        """Figures with their units in the names."""
        return {
            "engines_per_replica": self.engines,
            "replicas": self.replicas,
            "engine": self.state.to_json(),
            "most_requests_per_second_per_engine": self.most_rate,
            "most_requests_per_second": self.capacity,
            "headroom": self.headroom,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
        }


def fleet(
    demand: Demand,
    times: StepTimes,
    *,
    room: int,
    engines: int,
    usd_per_hour: float | None,
    floor: bool = False,
) -> Fleet | None:
    """The fewest replicas that take a demand; None where one request alone breaks the limits.

    Args:
        demand: Requests and limits.
        times: Of an engine's steps.
        room: Requests that an engine holds at their full length.
        engines: Of a replica.
        usd_per_hour: Of a replica.
        floor: Whether the formulas are enough, without a simulation: a bound.
    """
    rate, at_most = most_rate(demand, times, room, floor=floor)
    if at_most is None:
        return None
    fewest = math.ceil(demand.requests_per_second / (rate * engines) * (1 - 1e-9))
    state_at = engine_state if floor else simulated_state
    # A simulated engine may keep a rate and, by its errors, just miss the limits at a slightly lower one.
    replicas, state = fewest, None
    while state is None or not state.kept(demand.limits) or state.most_requests > room:
        each = demand.requests_per_second / (replicas * engines)
        state = at_most if each >= rate else state_at(demand.load, times, each)
        replicas += 1
    replicas -= 1
    return Fleet(
        demand=demand,
        engines=engines,
        replicas=replicas,
        most_rate=rate,
        state=state,
        at_most=at_most,
        usd_per_hour=None if usd_per_hour is None else usd_per_hour * replicas,
    )
