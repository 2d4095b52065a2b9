"""SIGTERM and Ctrl-C ask the loop to save and leave; a second Ctrl-C leaves at once."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

from systolic.train import hosts

AGREE = 8
"""Several processes ask each other every so many steps or batches whether one was told to stop."""


class Interrupt:
    """Within its ``with`` block, remembers that the process was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # Not the main thread: whoever runs this owns the signals.
                continue
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # ty: ignore[invalid-argument-type]

    def agree(self) -> None:
        """Another process of the job was asked to stop, so this one is too."""
        self.signal = self.signal or signal.SIGTERM

    def agreed(self) -> bool:
        """Whether any process of the job was asked to stop; all of them call this at the same point."""
        if not hosts.any_of(self.signal is not None):
            return False
        self.agree()
        return True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # Straight to the descriptor: a handler may run in the middle of a print.
        if self.signal is not None and number == signal.SIGINT:
            os.write(2, b"\nsystolic: left at once; what came after the last checkpoint is lost\n")
            # An exception would wait for the step that runs. Checkpoints are whole or absent.
            os._exit(130)
        self.signal = signal.Signals(number)
        os.write(2, b"\nsystolic: stopping after this step to save; Ctrl-C again leaves at once\n")
