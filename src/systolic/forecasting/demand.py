"""Engines for a demand: requests that come by chance, their latency at a load, and the most that an engine takes.

Assumptions, of which none is measured:

- Requests come by chance (Poisson) and are shared evenly by the engines, so that one which comes sees the mean of the
  others (Wolff 1982).
- Prompts are read one after the other, so that they wait for each other as in a queue with one server and equal times,
  M/D/1 (Pollaczek and Khinchine). The tail of the wait is exponential with the mean of those that wait (Kingman 1962).
- The number of requests under way spreads as a Poisson number does; an engine has room for what it is in 99 % of the time.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from systolic.core.ranges import POSITIVE, check
from systolic.forecasting.serving import LatencyLimits, Load, StepTimes

ASSUMED = "requests come by chance (Poisson), engines share them evenly; prompts wait for each other (M/D/1), and 99 % of them have their first token within the time shown; room for the requests under way in 99 % of the time"
LATE = 0.01
"""Share of the requests that may exceed the time to the first token, and of the time in which room may be short."""
SPREAD = 2.326
"""Standard deviations of a normal number above which a share of LATE lies."""
TURNS = 2000
"""Iterations of a step's seconds, which depend on the rows that they themselves make."""
LONGEST = 3600.0
"""Seconds of a token from which an engine counts as one that does not keep up."""
HALVINGS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requests a second, and the latency that they are to have.

    Raises:
        OptionError: a rate that is not positive.
    """

    requests_per_second: Annotated[float, POSITIVE]
    load: Load
    limits: LatencyLimits = field(default_factory=LatencyLimits)
    """Of the time to the first token of 99 % of the requests, and of the mean time of each further token."""

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
    """The time that 1 % of the requests exceed."""
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
    """An engine at ``rate`` requests a second; None where it does not keep up.

    A step reads a token of each text and, in the share of steps in which a prompt is under way, a chunk.
    """
    chunks, following = load.chunks, load.output_tokens - 1
    token = 0.0
    if following:
        found = _token_seconds(load, times, rate)
        if found is None:
            return None
        token = found
    rows = rate * following * token
    beside = times.decode_seconds(rows) if following else 0.0
    reading = chunks * (beside + times.chunk)
    busy = rate * reading
    if busy >= 1:
        return None
    # The mean of those that wait, which is the share busy of all.
    waiting = reading / (2 * (1 - busy))
    late = waiting * math.log(busy / LATE) if busy > LATE else 0.0
    first = reading + busy * waiting
    requests = rate * (first + following * token)
    return EngineState(
        requests_per_second=rate,
        decode_rows=rows,
        requests=requests,
        most_requests=requests + SPREAD * math.sqrt(requests),
        prompt_share=busy,
        first_token_seconds=first,
        late_first_token_seconds=reading + max(late, 0.0),
        token_seconds=token,
    )


def _token_seconds(load: Load, times: StepTimes, rate: float) -> float | None:
    """Least seconds t of a step at which a text sees the rows and the chunks that the rate makes: t = decode(1 + rate following t) + rate chunks t chunk."""
    following, chunks = load.output_tokens - 1, load.chunks
    token = times.decode_seconds(1)
    for _ in range(TURNS):
        rows = 1 + rate * following * token
        made = times.decode_seconds(rows) + min(rate * chunks * token, 1.0) * times.chunk
        if made > LONGEST:
            return None
        if made - token < 1e-9 * token:
            return made
        token = made
    return None


def most_rate(
    demand: Demand, times: StepTimes, room: int
) -> tuple[float, EngineState] | tuple[float, None]:
    """The most requests a second of an engine that keeps the limits and has room for so many, and its state; 0 where none is kept."""
    load, limits = demand.load, demand.limits

    def taken(rate: float) -> EngineState | None:
        state = engine_state(load, times, rate)
        fits = state is not None and state.kept(limits) and state.most_requests <= room
        return state if fits else None

    return _largest(taken, 1 / (load.chunks * times.chunk))


def _largest(
    taken: Callable[[float], EngineState | None], most: float
) -> tuple[float, EngineState] | tuple[float, None]:
    low, high, found = 0.0, most, None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        state = taken(middle)
        if state is None:
            high = middle
        else:
            low, found = middle, state
    return (low, found) if found is not None else (0.0, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Replicas of a slice that take a demand together."""

    demand: Demand
    engines: int
    """Of a replica."""
    replicas: int
    most_rate: float
    """Requests a second that one engine takes within the limits."""
    state: EngineState
    """Of each engine at the demand."""
    usd_per_hour: float | None
    """Of all replicas."""

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
    demand: Demand, times: StepTimes, *, room: int, engines: int, usd_per_hour: float | None
) -> Fleet | None:
    """The fewest replicas that take a demand; None where one request alone breaks the limits.

    Args:
        demand: Requests and limits.
        times: Of an engine's steps.
        room: Requests that an engine holds at their full length.
        engines: Of a replica.
        usd_per_hour: Of a replica.
    """
    rate, at_most = most_rate(demand, times, room)
    if at_most is None:
        return None
    replicas = math.ceil(demand.requests_per_second / (rate * engines) * (1 - 1e-9))
    each = demand.requests_per_second / (replicas * engines)
    state = engine_state(demand.load, times, min(each, rate)) or at_most
    return Fleet(
        demand=demand,
        engines=engines,
        replicas=replicas,
        most_rate=rate,
        state=state,
        usd_per_hour=None if usd_per_hour is None else usd_per_hour * replicas,
    )
