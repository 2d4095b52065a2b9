"""How requests end: each once, whoever is first."""

from systolic.core.errors import DataError, RunError, SystolicError
from systolic.serving.batch.asked import Asked
from systolic.serving.batch.facts import BatchWatcher, Ended
from systolic.serving.batch.intake import Intake
from systolic.serving.batch.queue import BatchQueue
from systolic.serving.refused import ExpiredError


class Endings:
    """Answers and failures of a model's requests."""

    def __init__(
        self, name: str, queue: BatchQueue, intake: Intake, watcher: BatchWatcher | None
    ) -> None:
        self._name, self._queue, self._intake, self._watcher = name, queue, intake, watcher

    def answer(self, asked: Asked) -> None:
        """Ends a request whose outputs are all there."""
        try:
            made = self._intake.answer_of(asked.examples, asked.outputs)
        except Exception as error:
            self.fail(asked, Ended.failed, RunError(f"{self._name} made no answer ({line(error)})"))
            return
        if self._queue.end(asked):
            asked.future.set_result(made)
            self._tell(asked, Ended.answered)

    def fail(self, asked: Asked, ended: Ended, error: SystolicError) -> None:
        """Ends a request with an error, unless it has ended."""
        if not self._queue.end(asked):
            return
        if asked.begin():
            asked.future.set_exception(error)
        else:
            ended = Ended.cancelled
        self._tell(asked, ended)

    def refuse(self, asked: Asked, error: BaseException) -> None:
        """Ends a request whose input can't be read."""
        known = (
            error
            if isinstance(error, SystolicError)
            else DataError(f"the input can't be read ({line(error)}); check the file")
        )
        self.fail(asked, Ended.refused, known)

    def expire(self, asked: Asked) -> None:
        """Ends a request whose deadline has passed."""
        assert asked.deadline is not None
        seconds = asked.deadline - asked.submitted
        self.fail(
            asked,
            Ended.expired,
            ExpiredError(
                f"{self._name} had no answer within {seconds:g} s; allow more, or try again"
            ),
        )

    def cancel(self, asked: Asked) -> None:
        """Ends a request whose future was cancelled."""
        if asked.future.cancelled() and self._queue.end(asked):
            self._tell(asked, Ended.cancelled)

    def _tell(self, asked: Asked, ended: Ended) -> None:
        try:
            if self._watcher is not None:
                self._watcher.answered(asked.facts(ended))
        finally:
            asked.examples, asked.outputs = [], []
            self._queue.forget(asked)


def line(error: BaseException) -> str:
    """An error of a library as one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
