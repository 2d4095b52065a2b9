"""Bounds of what a server takes, and how often a key may ask."""

import math
import time
from dataclasses import dataclass
from typing import Annotated

from systolic.core.ranges import COUNT, POSITIVE, check


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Bounds of what a server takes.

    Raises:
        OptionError: a value out of its range.
    """

    body_bytes: Annotated[int, COUNT] = 64 << 20
    """Largest body of a request."""
    body_seconds: Annotated[float, POSITIVE] = 60.0
    """A request whose body has not arrived after so long is ended."""
    requests: Annotated[int, COUNT] = 2048
    """Requests that are answered or wait at once; more are refused with 503."""
    prompts: Annotated[int, COUNT] = 256
    """Prompts, texts or choices of one request."""
    heartbeat_seconds: Annotated[float, POSITIVE] = 10.0
    """An engine whose loop did not turn for so long makes the server not ready; six times as long, not alive."""
    deadline_seconds: Annotated[float, POSITIVE] | None = None
    """Ends each request so long after it came; a request may ask for less with the header X-Request-Timeout."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(kw_only=True)
class TokenBucket:
    """A rate with bursts: refills evenly over a minute, holds at most a minute's worth."""

    per_minute: int
    left: float
    at: float
    """Seconds of the monotonic clock when ``left`` was counted."""

    @classmethod
    def full(cls, per_minute: int) -> "TokenBucket":
        """A bucket that nothing was taken from."""
        return cls(per_minute=per_minute, left=float(per_minute), at=time.monotonic())

    def take(self, now: float) -> float:
        """Takes one; 0 where there was one, else the seconds until there is."""
        wait = self.wait_seconds(now)
        if not wait:
            self.left -= 1
        return wait

    def spend(self, count: int, now: float) -> None:
        """Takes what is known only afterwards; may leave a debt."""
        self._refill(now)
        self.left -= count

    def wait_seconds(self, now: float) -> float:
        """Seconds until there is one."""
        self._refill(now)
        return max(1 - self.left, 0.0) * 60 / self.per_minute

    def headers(self, what: str) -> dict[str, str]:
        """Headers that tell a client how much is left, as OpenAI names and writes them."""
        full = (self.per_minute - self.left) * 60 / self.per_minute
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(int(self.left), 0)),
            f"x-ratelimit-reset-{what}": duration(full),
        }

    def _refill(self, now: float) -> None:
        self.left = min(self.per_minute, self.left + (now - self.at) * self.per_minute / 60)
        self.at = now


def duration(seconds: float) -> str:
    """A time such as ``6m0s``, ``1.5s`` or ``12ms``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"
