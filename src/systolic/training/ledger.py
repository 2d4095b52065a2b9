"""Ledger of a run's time, and a meter of the steps between two records."""

import enum
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from systolic.setup import Setup

SPAN = 8
"""Fewest steps in the mean that the time left is computed from."""


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

    def claim_rest(self, kind: Spent) -> None:
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


class _StepCounters(NamedTuple):
    """Counters at the end of a step."""

    steps: float
    clock: float
    claimed: float
    waited: float
    device_waited: float

    def to(self, later: "_StepCounters", share: float) -> "_StepCounters":
        """The point at a share of the way to a later mark."""
        return _StepCounters(*(a + (b - a) * share for a, b in zip(self, later, strict=True)))

    def busy(self, since: "_StepCounters") -> float:
        """Seconds since an earlier mark, waiting for data included, without other work."""
        others = (self.claimed - since.claimed) - (self.waited - since.waited)
        return max(self.clock - since.clock - others, 1e-9)


class Meter:
    """Counts finished steps and the time they took, without compiles, evaluations and saves.

    Args:
        setup: The job on this machine.
        ledger: Ledger that other work claims its time in.
        finished: Steps done before this session.
    """

    def __init__(self, setup: "Setup", ledger: Ledger, finished: int) -> None:
        self.setup, self.ledger = setup, ledger
        self.finished = finished
        """Steps whose results were read."""
        self.session_steps = 0
        self._device_waited = 0.0
        self._last = self._mark(finished)
        """Counters at the last step whose results were read."""
        self._unseen: deque[_StepCounters] = deque()
        """Steps after it that have finished, oldest first."""
        self._marks = deque([self._last])
        """Readings, oldest first: the last one at least :data:`SPAN` steps ago, and those after it."""

    def notice(self, count: int) -> None:
        """Takes note of ``count`` finished steps whose results were not read yet, in order.

        The host sees results some steps later, and several at once after a wait, so a step ends when
        it is noticed. Steps noticed together share the time evenly.
        """
        new = count - len(self._unseen)
        before, now = (self._unseen or [self._last])[-1], self._mark(self.finished + count)
        self._unseen.extend(before.to(now, (n + 1) / new) for n in range(new))

    def done(self) -> None:
        """Counts a step whose results were read."""
        self.notice(max(1, len(self._unseen)))
        self._last = self._unseen.popleft()
        self.finished += 1
        self.session_steps += 1

    def waited_for_device(self, seconds: float) -> None:
        """Adds time in which the host waited for results, so that the devices had work."""
        self._device_waited += seconds

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last reading."""
        return self.ledger.clock() - self._marks[-1].clock

    def read(self) -> dict[str, Any]:
        """Figures of the steps since the last reading, and the time left by the last :data:`SPAN` or more steps.

        Their number, mean time, throughput, MFU, and the shares of their time spent waiting for data
        and for the devices.
        """
        now, since = self._last, self._marks[-1]
        while len(self._marks) > 1 and now.steps - self._marks[1].steps >= SPAN:
            self._marks.popleft()
        lately = now.busy(self._marks[0]) / max(now.steps - self._marks[0].steps, 1)
        self._marks.append(now)
        waited = now.waited - since.waited
        device_waited = now.device_waited - since.device_waited
        busy, num_steps = now.busy(since), round(now.steps - since.steps)
        step_seconds = busy / max(num_steps, 1)
        left = self.setup.job.steps - self.finished
        expected = self.setup.expected
        return {
            f"{self.setup.unit}_per_second": self.setup.units_per_step / step_seconds,
            "num_steps": num_steps,
            "step_seconds": step_seconds,
            **(expected.beside(step_seconds) if expected is not None else {}),
            "mfu": self.setup.mfu(step_seconds),
            "data_wait": min(waited / busy, 1.0),
            "device_wait": min(device_waited / busy, 1.0),
            "memory_bytes": self.setup.machine.memory_bytes(),
            "eta_seconds": left * lately,
        }

    def step_seconds(self) -> float | None:
        """Mean time of the session's steps, waiting for data included; ``None`` without steps."""
        seconds = self.ledger.spent(Spent.step) + self.ledger.spent(Spent.data_wait)
        return seconds / self.session_steps if self.session_steps and seconds else None

    def overall(self) -> tuple[float | None, float | None]:
        """Tokens or examples per second over the session's loop, and MFU; ``None`` without steps."""
        each = self.step_seconds()
        if each is None:
            return None, None
        return self.setup.units_per_step / each, self.setup.mfu(each)

    def _mark(self, steps: float) -> _StepCounters:
        return _StepCounters(
            steps=steps,
            clock=self.ledger.clock(),
            claimed=self.ledger.claimed,
            waited=self.ledger.spent(Spent.data_wait),
            device_waited=self._device_waited,
        )
