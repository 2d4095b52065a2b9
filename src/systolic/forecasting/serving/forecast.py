"""Continuous batching in steady state: throughput and latency of a server from the seconds of its steps.

A closed load: a number of requests is always under way, each with the same prompt and answer. A step of
the engine reads one token of each text that generates and beside them one chunk of one prompt. Requests
come as the mean, not by chance, so that waiting for another's prompt counts only where prompts take
every step.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, check
from systolic.core.units import Origin, duration
from systolic.forecasting.cost import Bill, ForecastCommand, ForecastCompile
from systolic.job.serving_memory import ServingMemory
from systolic.sim.calibration import Calibration, factors_json

EQUAL = 0.999
"""Share of the most tokens a second from which loads count as equal."""
HOST_SECONDS = {"tpu": 1.2e-3, "gpu": 2e-4}
"""Work of the host for a step by platform, measured: two serving profiles of TPU7x have 0.57 and 0.63 ms to start a program and 0.37 to place its arguments
(vllm-project/tpu-inference @93aca414a, profiles/plugins/profile), and the engine takes 0.19 ms itself beside a GPU. The cores of a CPU do it and the step."""
HALVINGS = 60
"""Halvings of the interval in which the mean number of rows lies."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests of a server.

    Raises:
        OptionError: a count below 1.
    """

    prompt_tokens: Annotated[int, COUNT] = 1024
    """Tokens of each prompt."""
    output_tokens: Annotated[int, COUNT] = 256
    """New tokens of each request."""
    chunk: Annotated[int, COUNT] = 512
    """Prompt tokens that a step reads."""
    host_seconds: Annotated[float | None, NOT_NEGATIVE] = None
    """Work of the host for each step, behind the step on the device at best, after it at worst; None for what was measured of its kind."""

    def __post_init__(self) -> None:
        check(self)

    def on(self, place: Slice) -> "Load":
        """The load with the host's seconds beside a slice's devices."""
        if self.host_seconds is not None:
            return self
        return replace(self, host_seconds=HOST_SECONDS.get(place.platform, 0.0))

    @property
    def tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def chunks(self) -> int:
        """Steps that read a prompt; the last one makes the first new token."""
        return -(-self.prompt_tokens // self.chunk)

    @property
    def mean_context(self) -> int:
        """Positions that a generated token attends to, on average."""
        return self.prompt_tokens + -(-self.output_tokens // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of an engine's steps."""

    decode: Mapping[int, float]
    """Rows to the seconds of a step that reads one token of each."""
    chunk: float
    """Seconds that a chunk of a prompt adds to a step."""
    host: float = 0.0
    """Seconds of the host's work for a step."""
    host_after: bool = False
    """Whether the host begins when the device has ended; else it works beside it, and the longer one counts."""

    def decode_seconds(self, rows: float) -> float:
        """Seconds of a decode step with the host's work.

        Steps beside chunks hide more of the host's work than is counted here.
        """
        device, share = self._device_seconds(rows), min(rows, 1.0)
        return device + share * self.host if self.host_after else max(device, share * self.host)

    def _device_seconds(self, rows: float) -> float:
        """Linear between the sizes that were compiled, along the last two beyond them.

        Below the smallest size it is that size's, in the share of steps that have a row at all.
        """
        sizes = sorted(self.decode)
        if rows <= sizes[0]:
            return self.decode[sizes[0]] * min(rows, 1.0)
        at = min(bisect_left(sizes, rows), len(sizes) - 1)
        if at == 0:
            return self.decode[sizes[0]]
        low, high = sizes[at - 1], sizes[at]
        slope = (self.decode[high] - self.decode[low]) / (high - low)
        return self.decode[low] + slope * (rows - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """Steady state of one engine at a number of requests."""

    requests: float
    decode_rows: float
    """Texts that generate, on average."""
    chunk_share: float
    """Share of the steps that read a chunk of a prompt."""
    requests_per_second: float
    first_token_seconds: float
    """From the request to its first token, time in the queue included."""
    token_seconds: float
    """Between the tokens of a text; 0 where there is only one."""

    @property
    def saturated(self) -> bool:
        """Whether prompts take every step, so that requests wait for theirs."""
        return self.chunk_share >= 1.0


def steady(load: Load, times: StepTimes, requests: float) -> Steady:
    """The steady state with so many requests under way.

    A request sees the others as they are on average without it (the arrival theorem of closed queueing
    networks; Reiser and Lavenberg 1980).
    """
    chunks, others = load.chunks, (requests - 1) / requests
    following = load.output_tokens - 1
    if not following:
        return Steady(
            requests=requests,
            decode_rows=0.0,
            chunk_share=1.0,
            requests_per_second=1 / (chunks * times.chunk),
            first_token_seconds=requests * chunks * times.chunk,
            token_seconds=0.0,
        )

    def latencies(rows: float) -> tuple[float, float]:
        first = chunks * (times.decode_seconds(rows * others) + times.chunk)
        beside = rows * chunks / following * others
        return first, times.decode_seconds(1 + rows * others) + beside * times.chunk

    def implied(rows: float) -> float:
        first, token = latencies(rows)
        return requests * following * token / (first + following * token)

    low, high = 0.0, float(requests)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if implied(middle) > middle else (low, middle)
    rows = (low + high) / 2
    share = rows * chunks / following
    if share < 1.0:
        first, token = latencies(rows)
        rate = requests / (first + following * token)
        return Steady(
            requests=requests,
            decode_rows=rows,
            chunk_share=share,
            requests_per_second=rate,
            first_token_seconds=first,
            token_seconds=token,
        )
    rows = following / chunks
    token = times.decode_seconds(rows) + times.chunk
    rate = 1 / (chunks * token)
    return Steady(
        requests=requests,
        decode_rows=rows,
        chunk_share=1.0,
        requests_per_second=rate,
        first_token_seconds=requests / rate - following * token,
        token_seconds=token,
    )


def burst_seconds(load: Load, times: StepTimes, state: Steady, count: int) -> float:
    """Mean seconds to the first token of ``count`` requests that come at once to an idle engine.

    Prompts of those that it holds are read one after the other; each further one waits until another ends.
    """
    held = min(float(count), state.requests)
    prompt = load.chunks * (times.chunk + times.decode_seconds(held / 2))
    inside, beyond = prompt * (held + 1) / 2, count - held
    if not beyond:
        return inside
    # In the steady state they begin at the rate at which others end.
    later = state.first_token_seconds + load.output_tokens * state.token_seconds
    waits = later + (beyond / 2) / state.requests_per_second
    return (held * inside + beyond * waits) / count


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """A step that was forecast: of an engine's decode, or of a prompt."""

    rows: int
    """Texts of the step, all devices."""
    tokens: int
    """Tokens that it reads of each."""
    context: int
    """Positions of each text's cache."""
    seconds: float
    floor_seconds: float | None
    """The least that the bytes, or the FLOPs, take at the chip's peak rates; None where these are unknown."""

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPoint:
    """A server at a number of concurrent requests."""

    concurrency: int
    state: Steady
    """State of one replica; its rate is that of one, too."""
    replicas: int
    """Replicas that have requests."""
    floor: Steady | None
    """The same at the least seconds of each step; None where these are unknown."""
    host_after: Steady | None = None
    """The same with the host's work after each step; None where the load has none."""
    load: Load
    usd_per_hour: float | None

    def _usd(self, tokens_per_second: float) -> float | None:
        if self.usd_per_hour is None:
            return None
        return self.usd_per_hour / 3600 / tokens_per_second * 1e6

    @property
    def requests_per_second(self) -> float:
        """Requests of all replicas a second."""
        return self.replicas * self.state.requests_per_second

    @property
    def output_tokens_per_second(self) -> float:
        """New tokens of all replicas."""
        return self.requests_per_second * self.load.output_tokens

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens and new ones of all replicas."""
        return self.requests_per_second * self.load.tokens

    @property
    def floor_output_tokens_per_second(self) -> float | None:
        """:attr:`output_tokens_per_second` at the least seconds of each step."""
        if self.floor is None:
            return None
        return self.replicas * self.floor.requests_per_second * self.load.output_tokens

    @property
    def host_after_output_tokens_per_second(self) -> float | None:
        """:attr:`output_tokens_per_second` with the host's work after each step."""
        if self.host_after is None:
            return None
        return self.replicas * self.host_after.requests_per_second * self.load.output_tokens

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Dollars on demand for a million tokens, prompts and answers in the load's mix."""
        return self._usd(self.tokens_per_second)

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """Dollars on demand for a million new tokens, their prompts included."""
        return self._usd(self.output_tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Figures in seconds, tokens and dollars."""
        return {
            "concurrency": self.concurrency,
            "decode_rows": self.state.decode_rows * self.replicas,
            "chunk_share": self.state.chunk_share,
            "saturated": self.state.saturated,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second": self.output_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token_seconds": self.state.first_token_seconds,
            "time_per_output_token_seconds": self.state.token_seconds,
            "floor": None
            if self.floor is None
            else {
                "output_tokens_per_second": self.floor_output_tokens_per_second,
                "time_to_first_token_seconds": self.floor.first_token_seconds,
                "time_per_output_token_seconds": self.floor.token_seconds,
            },
            "host_after": None
            if self.host_after is None
            else {
                "output_tokens_per_second": self.host_after_output_tokens_per_second,
                "time_to_first_token_seconds": self.host_after.first_token_seconds,
                "time_per_output_token_seconds": self.host_after.token_seconds,
            },
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyLimits:
    """Latency that a server is asked to keep, means over requests; None for no limit."""

    first_token_seconds: float | None = None
    token_seconds: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.first_token_seconds is not None or self.token_seconds is not None

    def kept(self, point: ServingPoint) -> bool:
        """Whether a point keeps them."""
        pairs = (
            (point.state.first_token_seconds, self.first_token_seconds),
            (point.state.token_seconds, self.token_seconds),
        )
        return all(limit is None or seconds <= limit for seconds, limit in pairs)

    def __str__(self) -> str:
        parts = (("first token", self.first_token_seconds), ("per token", self.token_seconds))
        limits = [f"{name} {duration(limit)}" for name, limit in parts if limit is not None]
        return " and ".join(limits)


def latency(text: str | float | None, option: str) -> float | None:
    """Seconds of ``50ms``, ``1s`` or ``1.5s``, or of a number of seconds; None for None.

    Raises:
        OptionError: it is none of these.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|us|m|)", str(text).strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not match or seconds <= 0 or (not match[2] and isinstance(text, str)):
        raise OptionError(f"{option} is {text!r}; write a time such as 50ms, 1s or 1.5s")
    return seconds


@dataclass(frozen=True, kw_only=True)
class ServingForecast:
    """A language model served on a slice."""

    name: str
    on: Slice
    load: Load
    layout: str
    program: str
    """Which programs were compiled and priced."""
    attention: str = ""
    """Kernel or ops that read the cache, where the program says it."""
    origin: Origin
    """Origin of the seconds of steps; what is made of them is assumed to be a closed load in steady state."""
    memory: ServingMemory
    steps: Sequence[StepForecast] = ()
    points: Sequence[ServingPoint] = ()
    refused: Sequence[int] = ()
    """Concurrencies that were asked for and that the pages don't hold."""
    limits: LatencyLimits = LatencyLimits()
    bill: Bill
    compiler: ForecastCompile = field(default_factory=ForecastCompile)
    calibration: Calibration | None = None
    """Corrections of the steps' times; floors have none."""
    notes: Sequence[str] = ()
    request: ForecastCommand = field(default_factory=ForecastCommand, repr=False)

    @property
    def fits(self) -> bool:
        """Whether one request has room."""
        return self.concurrency > 0

    @property
    def concurrency(self) -> int:
        """Requests of the load that fit at their full length."""
        return self.memory.concurrency(self.load.tokens)

    @property
    def best(self) -> ServingPoint | None:
        """The cheapest point whose latency keeps the limits, which is that of most tokens a second; of equals the one of fewest requests. None where none keeps them."""
        within = [point for point in self.points if self.limits.kept(point)]
        most = max((point.tokens_per_second for point in within), default=0.0)
        return next((point for point in within if point.tokens_per_second >= EQUAL * most), None)

    def to_json(self) -> dict[str, Any]:
        """All figures, with their units in the names."""
        return {
            "recipe": self.name,
            "slice": self.on.name,
            "chips": self.on.num_chips,
            "origin": self.origin.value,
            "fits": self.fits,
            "load": asdict(self.load),
            "layout": self.layout,
            "program": self.program,
            "attention": self.attention,
            "memory": self.memory.to_json(),
            "concurrency": self.concurrency,
            "refused": list(self.refused),
            "steps": [step.to_json() for step in self.steps],
            "points": [point.to_json() for point in self.points],
            "limits": asdict(self.limits),
            "best": None if self.best is None else self.best.concurrency,
            "usd_per_hour": self.bill.usd_per_hour,
            "compiler": self.compiler.to_json(),
            "calibration": None
            if self.calibration is None
            else {
                "name": self.calibration.name,
                "chip": self.calibration.chip,
                "made": self.calibration.made,
                "kinds": factors_json(self.calibration),
            },
            "notes": list(self.notes),
            **self.request.to_json(),
        }
