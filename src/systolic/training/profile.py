"""Trace of a few steps of a session by XLA's profiler, for ``systolic explain RUN/profile``."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from systolic.core.errors import OptionError

WARM_UP = 10
"""Steps before the trace, in which batches read ahead are used up; fewer in a session that is too short."""

FOLDER = "profile"
"""Folder in the run's directory; XProf opens it with ``xprof --logdir RUN/profile``."""

STEP = "train"
DATA = "systolic.data_wait"
METRICS = "systolic.metrics_wait"

Event = Callable[[str, float, str], None]


def part(name: str) -> contextlib.AbstractContextManager[None]:
    """Names a part of the host's work in a trace; nearly free without one."""
    return jax.profiler.TraceAnnotation(name)


class SessionTrace:
    """Trace of a session.

    Python calls are not traced, since they would slow the host down and fill the file.

    Args:
        folder: Folder for the trace, written as ``plugins/profile/<time>/<host>.xplane.pb``.
        steps: Number of steps to trace; 0 for none.
        last: The session's last step.
        event: Called with the trace's path, or the reason for its absence; a failing profiler does not stop training.

    Raises:
        OptionError: ``steps`` is negative.
    """

    def __init__(self, folder: Path, steps: int, last: int, event: Event) -> None:
        if steps < 0:
            raise OptionError(
                f"profile is {steps}; give the number of steps to trace, or 0 for none"
            )
        self.folder = folder
        self._event = event
        self._warm_up, self._left, self._last = WARM_UP, steps, last
        self._running = False

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Context around a step, which begins the trace when it is due."""
        if self._left and not self._running:
            if self._warm_up and number + self._left <= self._last:
                self._warm_up -= 1
            else:
                self._begin()
        if not self._running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation(STEP, step_num=number)

    def done(self, results: Any) -> None:
        """Marks the end of a step; after the last one waits for ``results`` and ends the trace."""
        if not self._running:
            return
        self._left -= 1
        if not self._left:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Writes the trace, also of a session that ends early."""
        if not self._running:
            return
        self._running, self._left = False, 0
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            self._failed(error)
            return
        self._event("profile", 0.0, f"systolic explain {self.folder}")

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self.folder, profiler_options=options)
        except (RuntimeError, OSError) as error:
            self._failed(error)
            return
        self._running = True

    def _failed(self, error: Exception) -> None:
        self._left = 0
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self._event("profile", 0.0, f"no profile: {reason}")
