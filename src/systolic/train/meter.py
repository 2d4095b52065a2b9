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
        self._device_waited = 0.0
        self._mark()

    def done(self) -> None:
        """One more step has finished."""
        self.finished += 1
        self.session_steps += 1

    def waited_for_device(self, seconds: float) -> None:
        """The host was done and waited for a step's results: the devices had work all the time."""
        self._device_waited += seconds

    @property
    def quiet_seconds(self) -> float:
        """Since the last reading."""
        return self.ledger.clock() - self._clock

    def read(self) -> dict[str, Any]:
        """Figures since the last reading: throughput, step time, MFU, the shares of the time spent waiting for data and for the devices."""
        wall = self.ledger.clock() - self._clock
        waited = self.ledger.spent("data_wait") - self._waited
        others = self.ledger.claimed - self._claimed - waited
        device_waited = self._device_waited
        busy = max(wall - others, 1e-9)
        steps = max(self.finished - self._finished, 1)
        step_seconds = busy / steps
        self._mark()
        left = self.setup.job.steps - self.finished
        expected = self.setup.expected
        return {
            f"{self.setup.unit}_per_second": self.setup.units_per_step / step_seconds,
            "step_seconds": step_seconds,
            **(expected.beside(step_seconds) if expected is not None else {}),
            "mfu": self.setup.mfu(step_seconds),
            "data_wait": min(waited / busy, 1.0),
            "device_wait": min(device_waited / busy, 1.0),
            "memory_bytes": self.setup.machine.memory_bytes(),
            "eta_seconds": left * step_seconds,
        }

    def step_seconds(self) -> float | None:
        """Mean of the session's steps, waiting for data included; ``None`` where no step was made."""
        seconds = self.ledger.spent("step") + self.ledger.spent("data_wait")
        return seconds / self.session_steps if self.session_steps and seconds else None

    def overall(self) -> tuple[float | None, float | None]:
        """Tokens or examples per second over the session's loop, and MFU; ``None`` where no step was made."""
        each = self.step_seconds()
        if each is None:
            return None, None
        return self.setup.units_per_step / each, self.setup.mfu(each)

    def _mark(self) -> None:
        self._clock = self.ledger.clock()
        self._claimed = self.ledger.claimed
        self._waited = self.ledger.spent("data_wait")
        self._finished = self.finished
        self._device_waited = 0.0
