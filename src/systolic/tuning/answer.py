"""From a search to its results: trials, the best settings' command, and their comparison with the default ones."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from systolic.core.files import write_json
from systolic.core.machine import bounded_workers
from systolic.core.reporter import reporter, working
from systolic.tuning.definition import Tuning
from systolic.tuning.display.page import write_page
from systolic.tuning.folder import RESULTS, num_results
from systolic.tuning.processes import Processes
from systolic.tuning.results import StudyResult
from systolic.tuning.seeds import repeated
from systolic.tuning.study import SharedStudy
from systolic.tuning.trials import INTERRUPTED, TrialWorker


def answer(tuning: Tuning, workers: int) -> StudyResult:
    """Runs a search and its repeats, and writes ``study.json`` and ``report.html``.

    Args:
        tuning: The search.
        workers: Worker processes on this machine; 0 runs the trials in this process.

    Raises the errors of :meth:`~systolic.tuning.definition.Tuning.open`, of
    :class:`~systolic.tuning.trials.TrialWorker` and of :class:`~systolic.tuning.processes.Processes`.
    """
    if workers:
        tuning.check_plain()
    count = bounded_workers(workers) if workers else 0
    with closing(tuning.open()) as shared:
        return _answer(tuning, shared, count)


def _answer(tuning: Tuning, shared: SharedStudy, workers: int) -> StudyResult:
    if line := lost(tuning, shared):
        reporter().warn(line)
    result = tuning.with_command(_trained(tuning, tuning, shared, workers))
    best = result.best
    if best is not None and len(tuning.aims) == 1:
        result = replace(result, examples=tuning.examples)
    # Written before the repeats, which may fail.
    result = written(tuning, result)
    if tuning.seeds and best is not None and result.finished == result.total:
        repeating = tuning.repeating(shared, best.number)
        with working("repeats"), closing(repeating.open()) as own:
            again = _trained(repeating, tuning, own, workers)
        result = replace(
            result,
            repeats=repeated(result, again).to_json(),
            interrupted=result.interrupted or again.interrupted,
        )
        result = written(tuning, result)
    elif tuning.seeds and best is not None and not result.interrupted:
        reporter().warn(
            f"--repeats is skipped, since the search ended after {result.finished} of {result.total} trials; raise --budget and rerun"
        )
    return result


def _trained(tuning: Tuning, search: Tuning, shared: SharedStudy, workers: int) -> StudyResult:
    """Runs the trials of a search or of its repeats; returns their results.

    Args:
        tuning: The search or its repeats.
        search: The search.
        shared: The study of ``tuning``.
        workers: Worker processes; 0 runs the trials in this process.
    """
    if line := beyond(tuning, tuning.result(shared, weighed=False)):
        reporter().warn(line)
    if workers:
        again = None if tuning.repeats is None else tuning.repeats.of
        processes = Processes(
            tuning=tuning,
            shared=shared,
            search=search.record(again),
            count=workers,
        )
        return replace(processes.run(), interrupted=processes.interrupted)

    def ended() -> None:
        reporter().update(tuning.result(shared, weighed=False))

    worker = TrialWorker(tuning=tuning, shared=shared, ended=ended)
    with shared.reported():
        worker.work()
    result = tuning.result(shared, stopped=worker.stopped)
    return replace(result, interrupted=worker.stopped == INTERRUPTED)


def warn_before(tuning: Tuning, trials: int | None, workers: int) -> None:
    """Warns of a search that has fewer settings than trials are wanted, and of trials that are timed beside others.

    Args:
        tuning: The search.
        trials: The wanted number of trials; None for the default.
        workers: Worker processes on this machine.
    """
    if trials is not None and trials > tuning.trials:
        reporter().warn(
            f"--trials is {trials}, and the search has {tuning.trials} distinct settings; each is trained once"
        )
    if line := wall_time(tuning, workers):
        reporter().warn(line)


def lost(tuning: Tuning, shared: SharedStudy) -> str:
    """Line for a study that has no trials beside a ``study.json`` with results; empty otherwise."""
    results = num_results(tuning.folder)
    if not results or shared.trials(tuning.trials):
        return ""
    return f"{tuning.folder / RESULTS} has {results} results and the study in {shared.where.shown} no trial: it was lost or emptied and is rebuilt; finished runs in {tuning.runs} are used again, the other trials are trained again"


def beyond(tuning: Tuning, before: StudyResult) -> str:
    """Line for a study that has more trials than are asked for; empty otherwise."""
    if before.finished <= tuning.trials:
        return ""
    return f"--trials is {tuning.trials}, and {before.finished} trials of the study have ended; give a larger number to extend it"


def wall_time(tuning: Tuning, workers: int) -> str:
    """Line for trials that are judged by seconds while others may run beside them; empty otherwise.

    Args:
        tuning: The search.
        workers: Worker processes on this machine.
    """
    if all(aim.name != "seconds" for aim in tuning.aims):
        return ""
    shared = f"the {workers} workers share this machine, so that trials slow each other down"
    machines = "machines that share the study may differ in speed"
    why = [shared] if workers > 1 else []
    why += [machines] if tuning.storage is not None else []
    return f"--objective seconds is wall time: {', and '.join(why)}" if why else ""


def written(tuning: Tuning, result: StudyResult) -> StudyResult:
    """Writes the results and their page into the study's folder; returns them with the page's path."""
    write_json(tuning.folder / RESULTS, result.to_json())
    return replace(result, page=Path(write_page(result, tuning.folder)))
