"""Throughput over the last steps."""

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from systolic.train.ledger import Ledger

if TYPE_CHECKING:
    from systolic.train.setup import Setup


SPAN = 8
"""Steps that a reading covers at least. The host sees results late and several at once after a wait,
so the time between two of them says little about a step."""


class _Mark(NamedTuple):
    """What had been counted at a reading."""

    steps: int
    clock: float
    claimed: float
    waited: float
    device_waited: float


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
        self._marks = deque([self._mark()])
        """Readings, oldest first: the last one at least :data:`SPAN` steps ago, and those after it."""

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
        return self.ledger.clock() - self._marks[-1].clock

    def read(self) -> dict[str, Any]:
        """Figures since the last reading, and over the last :data:`SPAN` steps at least where there are so many.

        Throughput, step time, MFU, the shares of the time spent waiting for data and for the devices.
        """
        now = self._mark()
        while len(self._marks) > 1 and now.steps - self._marks[1].steps >= SPAN:
            self._marks.popleft()
        since = self._marks[0]
        self._marks.append(now)
        waited = now.waited - since.waited
        others = now.claimed - since.claimed - waited
        device_waited = now.device_waited - since.device_waited
        busy = max(now.clock - since.clock - others, 1e-9)
        step_seconds = busy / max(now.steps - since.steps, 1)
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

    def _mark(self) -> _Mark:
        return _Mark(
            steps=self.finished,
            clock=self.ledger.clock(),
            claimed=self.ledger.claimed,
            waited=self.ledger.spent("data_wait"),
            device_waited=self._device_waited,
        )
