"""Ledger of a run's time."""

import enum
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Spent(enum.Enum):
    """Kinds of spent time."""

    start = "start"
    """Start-up: imports, listing the data, opening the run."""
    compile = "compile"
    step = "step"
    """Training steps: the only productive kind."""
    data_wait = "data_wait"
    eval = "eval"
    checkpoint = "checkpoint"
    diagnose = "diagnose"
    sample = "sample"
    """The sample of a language model at the end, its compile included."""
    other = "other"
    """Unclaimed time."""


class Ledger:
    """Seconds by kind; unclaimed time is ``other``.

    Args:
        clock: Monotonic seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.started = clock()
        self._spent = dict.fromkeys(Spent, 0.0)
        self.claimed = 0.0
        """Seconds claimed by any kind."""
        self._doing = (Spent.start, self.started)

    @contextmanager
    def spend(self, kind: Spent) -> Generator[None]:
        """Claims the time of a ``with`` block, less that of nested blocks."""
        start, before, outer = self.clock(), self.claimed, self._doing[0]
        self._doing = (kind, start)
        try:
            yield
        finally:
            inner, now = self.claimed - before, self.clock()
            self._doing = (outer, now)
            self.add(kind, now - start - inner)

    def doing(self) -> tuple[Spent, float]:
        """Present account of the time, and seconds since it last changed."""
        kind, since = self._doing
        return kind, self.clock() - since

    def add(self, kind: Spent, seconds: float) -> None:
        """Claims seconds that were measured elsewhere."""
        self._spent[kind] += seconds
        self.claimed += seconds

    def settle(self, kind: Spent) -> None:
        """Claims all time unclaimed so far; only outside of :meth:`spend`."""
        self.add(kind, max(0.0, self.clock() - self.started - self.claimed))

    def spent(self, kind: Spent) -> float:
        """Seconds of a kind so far."""
        return self._spent[kind]

    def close(self) -> dict[str, float]:
        """Seconds by the name of their kind since the ledger was opened; they add up to the wall time."""
        seconds = self.clock() - self.started
        spent = {kind.value: claimed for kind, claimed in self._spent.items()}
        spent[Spent.other.value] += max(0.0, seconds - self.claimed)
        return spent
