"""Evaluators of a candidate's step time and memory: compiler and simulation, or recorded figures in tests."""

import abc
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from systolic.compiling import Compiler, JobProgram, Outcome
from systolic.compiling.compile import Pool
from systolic.forecasting import Forecast
from systolic.forecasting.run import of_outcome
from systolic.job import Job
from systolic.planning.candidate import Candidate
from systolic.sim.incomplete import NOTHING, Given


class PendingForecast(Protocol):
    """Forecast in progress."""

    def wait(self, seconds: float) -> bool:
        """Waits at most ``seconds``; returns whether :meth:`result` is ready."""
        ...

    def result(self) -> Forecast:
        """The forecast, after waiting for it.

        Raises:
            SystolicError: it failed, with the reason.
        """
        ...


class CandidateEvaluator(abc.ABC):
    """Context that forecasts candidates; leaving it ends the forecasts in progress."""

    @abc.abstractmethod
    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> PendingForecast:
        """Begins a forecast of a job under a candidate's settings.

        Args:
            job: The job; the candidate's layout, batch and precision replace its own.
            candidate: What to forecast, with its compiler flags.
            full: Whether to compile to the end; else up to the schedule.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None


OpenEvaluator = Callable[[int], CandidateEvaluator]
"""Makes an evaluator from the number of candidates to forecast at once."""


class CompilingEvaluator(CandidateEvaluator):
    """Compiles candidates, each in a child process, and simulates their schedules.

    Args:
        workers: Compiles at once.
        compiler: How to compile; flags come from the candidates.
        given: Trips and costs that programs leave open; a candidate's program need not have all of the names.
    """

    def __init__(
        self, workers: int, compiler: Compiler | None = None, given: Given = NOTHING
    ) -> None:
        self._given = replace(given, strict=False)
        self._pool = Pool(workers)
        self._compiler = compiler or Compiler()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._pool.__exit__(kind, error, trace)

    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> PendingForecast:
        """Submits a candidate; see :meth:`CandidateEvaluator.submit`."""
        compiler = replace(self._compiler, flags=candidate.compiler_flags)
        program = JobProgram(job=candidate.job(job))
        how = compiler if full else compiler.quick()
        clock = _CompileClock()
        outcome = self._pool.submit(program, candidate.on, how, clock.start)
        return _Compiling(
            outcome=outcome, name=job.name, candidate=candidate, clock=clock, given=self._given
        )


@dataclass
class _CompileClock:
    began: float | None = None
    """When the compile reported its first stage; None of one that waits, or was in the store."""

    def start(self, _: str) -> None:
        if self.began is None:
            self.began = time.monotonic()


@dataclass
class _Compiling:
    outcome: "Future[Outcome]"
    name: str
    candidate: Candidate
    clock: _CompileClock
    given: Given = NOTHING
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.outcome.add_done_callback(self._end)

    def _end(self, _: "Future[Outcome]") -> None:
        began = self.clock.began
        self.seconds = 0.0 if began is None else time.monotonic() - began

    def wait(self, seconds: float) -> bool:
        return bool(futures.wait([self.outcome], timeout=seconds).done)

    def result(self) -> Forecast:
        outcome = self.outcome.result()
        forecast = of_outcome(outcome, self.name, self.candidate.on, self.seconds, self.given)
        return replace(forecast, schedules=())  # a search has hundreds
