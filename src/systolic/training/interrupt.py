"""Signal handling: SIGTERM or Ctrl-C makes the loop save and stop.

A second Ctrl-C exits at once in a command, and raises KeyboardInterrupt in a Python program.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from systolic.core.shutdown import raise_lost_interrupt
from systolic.training import distributed

AGREE = 8
"""Maximum number of steps or batches between two collective checks for a stop."""

AGREE_SECONDS = 2.0
"""Maximum interval between the checks when steps or batches are slow."""


class Interrupt:
    """Context that handles signals and records a request to stop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: signal.Signals | None = None
        self._clock = clock
        self._told = False
        """All processes have agreed to stop."""
        self._ended = False
        """The program ended the training; a later signal is for the program."""
        self._late: signal.Signals | None = None
        self._asked_at: float | None = None
        self._calls, self._interval = 0, 1
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        raise_lost_interrupt()
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # Only the main thread can handle signals.
                continue
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # ty: ignore[invalid-argument-type]
        if self._late is not None:
            os.kill(os.getpid(), self._late)

    def end(self) -> None:
        """Makes the loop save and stop as a signal does, without a message."""
        self._ended = self.signal is None
        self.signal = self.signal or signal.SIGTERM

    def alone(self) -> bool:
        """Whether a single-process job should stop; valid at any point."""
        return self.signal is not None and not distributed.several()

    def agreed(self) -> bool:
        """Whether any process of the job was asked to stop. Collective."""
        self._ask_all(AGREE_SECONDS)
        self._asked_at = None  # The interval of later calls may differ.
        return self._told

    def soon(self) -> bool:
        """Whether to stop before the next step or batch; the same answer in every process.

        Every process calls it before each step or batch. It communicates every :data:`AGREE` calls, or about every
        :data:`AGREE_SECONDS` if the slowest process takes longer, and otherwise returns False.
        """
        if not distributed.several():
            return self.signal is not None
        self._calls += 1
        if self._calls >= self._interval:
            passed = None if self._asked_at is None else self._clock() - self._asked_at
            self._ask_all(AGREE_SECONDS if passed is None else passed / self._calls)
        return self._told

    def _ask_all(self, pace: float) -> None:
        """Communicates with all processes unless a stop is agreed; ``pace`` is this process's seconds between calls."""
        if self._told:
            return
        self._told, slowest = distributed.agree(self.signal is not None, pace)
        self._asked_at, self._calls = self._clock(), 0
        self._interval = max(1, min(AGREE, int(AGREE_SECONDS / max(slowest, 1e-9))))
        if self._told:
            self.signal = self.signal or signal.SIGTERM

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._ended:
            self._ended, self._late = False, signal.Signals(number)
            return
        # Written to the descriptor, since a handler may interrupt a print.
        if self.signal is not None and number == signal.SIGINT:
            if self._before.get(signal.SIGINT) is signal.default_int_handler:
                raise KeyboardInterrupt  # Don't kill a Python program or a notebook.
            os.write(2, b"\nsystolic: exited at once; steps since the last checkpoint are lost\n")
            # An exception would wait for the running step. Exiting is safe: checkpoints are atomic.
            os._exit(130)
        self.signal = signal.Signals(number)
        os.write(2, b"\nsystolic: stopping after this step to save; Ctrl-C again exits at once\n")


def end_training() -> None:
    """Makes the training in this process save and stop; signals that arrive meanwhile reach the caller's handler."""
    for each in _open:
        each.end()


_open: list[Interrupt] = []
