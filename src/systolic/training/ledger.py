"""Where the time of a run went."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

KINDS = (
    "start",
    "compile",
    "step",
    "data_wait",
    "eval",
    "checkpoint",
    "diagnose",
    "sample",
    "other",
)
"""``step`` is productive; the rest is what a user would like to have back. ``start`` is imports, listing
the data and opening the run; ``sample`` is what a language model writes at the end, its compile too."""


class Ledger:
    """Seconds by kind; what nobody claims is ``other``.

    Args:
        clock: Seconds from any origin, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.started = clock()
        self._spent = dict.fromkeys(KINDS, 0.0)
        self.claimed = 0.0
        """Seconds claimed by any kind."""

    @contextmanager
    def spend(self, kind: str) -> Generator[None]:
        """Claims the time of a ``with`` block, less what blocks inside it claim."""
        start, before = self.clock(), self.claimed
        try:
            yield
        finally:
            inner = self.claimed - before
            self.add(kind, self.clock() - start - inner)

    def add(self, kind: str, seconds: float) -> None:
        """Claims seconds that were measured elsewhere."""
        self._spent[kind] += seconds
        self.claimed += seconds

    def settle(self, kind: str) -> None:
        """Claims all time that nobody has claimed so far; outside of :meth:`spend` only."""
        self.add(kind, max(0.0, self.clock() - self.started - self.claimed))

    def spent(self, kind: str) -> float:
        """Seconds of a kind so far."""
        return self._spent[kind]

    def close(self) -> dict[str, float]:
        """Seconds by kind since the ledger was opened; they add up to the wall time."""
        seconds = self.clock() - self.started
        spent = dict(self._spent)
        spent["other"] += max(0.0, seconds - self.claimed)
        return spent
