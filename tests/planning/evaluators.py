"""Evaluators that compile nothing: their answers are figures, ready at once or after some waits."""

from collections.abc import Callable

from systolic.core.errors import SystolicError
from systolic.forecasting import Forecast
from systolic.job import Job
from systolic.planning.candidate import Candidate
from systolic.planning.search import CandidateEvaluator

Answer = Callable[[Job, Candidate, bool], Forecast | SystolicError | None]
"""Forecast of a candidate, compiled in full or not; None where the compile never ends."""


class AnsweredForecast:
    """An answer that is there after so many waits."""

    def __init__(self, answer: Forecast | SystolicError | None, waits: int) -> None:
        self._answer, self._waits = answer, waits

    def wait(self, seconds: float) -> bool:
        self._waits -= 1
        return self._answer is not None and self._waits < 0

    def result(self) -> Forecast:
        assert self._answer is not None
        if isinstance(self._answer, SystolicError):
            raise self._answer
        return self._answer


class AnsweringEvaluator(CandidateEvaluator):
    """Answers by a function.

    Args:
        answer: What it says of a candidate.
        waits: How often to wait for the answer to the n-th candidate.
    """

    def __init__(self, answer: Answer, waits: Callable[[int], int] = lambda _: 0) -> None:
        self._answer, self._waits = answer, waits
        self.asked: list[Candidate] = []

    def submit(self, job: Job, candidate: Candidate, *, full: bool) -> AnsweredForecast:
        self.asked.append(candidate)
        return AnsweredForecast(self._answer(job, candidate, full), self._waits(len(self.asked)))

    def __call__(self, workers: int) -> "AnsweringEvaluator":
        """The same, as a search opens it."""
        return self
