"""How requests end: each once, whoever is first."""

from systolic.core.errors import DataError, RunError, SystolicError
from systolic.serving.batch.batch_queue import BatchQueue, BatchRequest
from systolic.serving.batch.facts import BatchWatcher, Ended
from systolic.serving.batch.intake import Intake
from systolic.serving.errors import ExpiredError


class Completions:
    """Answers and failures of a model's requests."""

    def __init__(
        self, name: str, queue: BatchQueue, intake: Intake, watcher: BatchWatcher | None
    ) -> None:
        self._name, self._queue, self._intake, self._watcher = name, queue, intake, watcher

    def answer(self, request: BatchRequest) -> None:
        """Ends a request whose outputs are all there."""
        try:
            made = self._intake.answer_of(request.examples, request.outputs)
        except Exception as error:
            self.fail(
                request, Ended.failed, RunError(f"{self._name} made no answer ({line(error)})")
            )
            return
        if self._queue.end(request):
            request.future.set_result(made)
            self._tell(request, Ended.answered)

    def fail(self, request: BatchRequest, ended: Ended, error: SystolicError) -> None:
        """Ends a request with an error, unless it has ended."""
        if not self._queue.end(request):
            return
        if request.begin():
            request.future.set_exception(error)
        else:
            ended = Ended.cancelled
        self._tell(request, ended)

    def refuse(self, request: BatchRequest, error: BaseException) -> None:
        """Ends a request whose input can't be read."""
        known = (
            error
            if isinstance(error, SystolicError)
            else DataError(f"the input can't be read ({line(error)}); check the file")
        )
        self.fail(request, Ended.refused, known)

    def expire(self, request: BatchRequest) -> None:
        """Ends a request whose deadline has passed."""
        assert request.deadline is not None
        seconds = request.deadline - request.submitted
        self.fail(
            request,
            Ended.expired,
            ExpiredError(
                f"{self._name} had no answer within {seconds:g} s; allow more, or try again"
            ),
        )

    def cancel(self, request: BatchRequest) -> None:
        """Ends a request whose future was cancelled."""
        if request.future.cancelled() and self._queue.end(request):
            self._tell(request, Ended.cancelled)

    def _tell(self, request: BatchRequest, ended: Ended) -> None:
        try:
            if self._watcher is not None:
                self._watcher.answered(request.facts(ended))
        finally:
            request.examples, request.outputs = [], []
            self._queue.forget(request)


def line(error: BaseException) -> str:
    """An error of a library as one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
