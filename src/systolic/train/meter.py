"""Throughput between records."""

from typing import TYPE_CHECKING, Any

from systolic.train.ledger import Ledger

if TYPE_CHECKING:
    from systolic.train.setup import Setup


class Meter:
    """Counts finished steps and the time they took, without compiles, evaluations and saves.

    Args:
        setup: What a step holds.
        ledger: Where other work claims its time.
        finished: Steps done before this session.
    """

    def __init__(self, setup: "Setup", ledger: Ledger, finished: int) -> None:
        self.setup, self.ledger = setup, ledger
        self.finished = finished
        """Steps whose results have been seen."""
        self.session_steps = 0
        self._mark()

    def done(self) -> None:
        """One more step has finished."""
        self.finished += 1
        self.session_steps += 1

    @property
    def quiet_seconds(self) -> float:
        """Since the last reading."""
        return self.ledger.clock() - self._clock

    def read(self) -> dict[str, Any]:
        """Figures since the last reading: throughput, step time, MFU, the share of the time spent waiting for data."""
        wall = self.ledger.clock() - self._clock
        waited = self.ledger.spent("data_wait") - self._waited
        others = self.ledger.claimed - self._claimed - waited
        busy = max(wall - others, 1e-9)
        steps = max(self.finished - self._finished, 1)
        step_seconds = busy / steps
        self._mark()
        left = self.setup.job.steps - self.finished
        return {
            f"{self.setup.unit}_per_second": self.setup.units_per_step / step_seconds,
            "step_seconds": step_seconds,
            "mfu": self.setup.mfu(step_seconds),
            "data_wait": min(waited / busy, 1.0),
            "memory_bytes": self.setup.machine.memory_bytes(),
            "eta_seconds": left * step_seconds,
        }

    def overall(self) -> tuple[float | None, float | None]:
        """Tokens or examples per second over the session's loop, and MFU; ``None`` where no step was made."""
        seconds = self.ledger.spent("step") + self.ledger.spent("data_wait")
        if not self.session_steps or not seconds:
            return None, None
        each = seconds / self.session_steps
        return self.setup.units_per_step / each, self.setup.mfu(each)

    def _mark(self) -> None:
        self._clock = self.ledger.clock()
        self._claimed = self.ledger.claimed
        self._waited = self.ledger.spent("data_wait")
        self._finished = self.finished
