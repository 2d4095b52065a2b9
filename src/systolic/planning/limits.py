"""Limits of a search: compiles, time and workers."""

from dataclasses import dataclass

import psutil

from systolic.core.machine import bounded

WORKER_BYTES = 4 * 2**30
"""Memory of one compile of a large program."""
SETTLE_SECONDS = 900.0
"""Longest wait for full compiles without a time limit; with flags that change the schedule they can take hours."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search."""

    programs: int = 24
    """Most compiles up to the schedule, those from the store included."""
    fruitless: int | None = None
    """Most compiles while none fits; None for no limit of its own."""
    seconds: float | None = None
    workers: int = 0
    """Compiles at once, at most one a core; 0: as many as cores and memory allow."""
    finalists: int = 2
    """Candidates that get a full compile, with the compiler's own cycles."""
    settle_seconds: float = SETTLE_SECONDS
    """Time limit of the full compiles where ``seconds`` is None."""

    @property
    def at_once(self) -> int:
        """Number of workers, with 0 resolved."""
        if self.workers:
            return bounded(self.workers)
        return max(1, bounded(int(psutil.virtual_memory().available // WORKER_BYTES)))
