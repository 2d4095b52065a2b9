"""Keeps a failed save to the one line that tells it."""

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet_saves() -> Generator[None]:
    """Drops what TensorStore's threads report to a loop that Orbax has closed.

    When a disk fills up, every array of a checkpoint fails; Orbax raises the first failure and
    closes its event loop, and the others end on stderr as tracebacks without an owner.
    """
    before = sys.unraisablehook

    def hook(report: "sys.UnraisableHookArgs") -> None:
        if isinstance(report.exc_value, RuntimeError) and "loop is closed" in str(report.exc_value):
            return
        before(report)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
