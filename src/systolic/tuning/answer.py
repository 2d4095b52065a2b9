"""From a search to its answer: trials, the best settings' command, and their comparison with the default ones."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from systolic.chips import slice
from systolic.core.files import write_json
from systolic.planning.goal import priced
from systolic.tuning.definition import Tuning
from systolic.tuning.display.page import write_page
from systolic.tuning.folder import RESULTS, num_results
from systolic.tuning.importance import importance
from systolic.tuning.results import StudyResult, rows_of
from systolic.tuning.seeds import Repeated
from systolic.tuning.study import SharedStudy


@dataclass(frozen=True, kw_only=True)
class TrialsEnded:
    """How the trials of a search ended."""

    result: StudyResult
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class StudyAnswer:
    """Results of a study with their page."""

    result: StudyResult
    page: Path
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class TunedSearch:
    """A search and its repeats, by whichever processes run the trials.

    Args:
        tuning: The search.
        words: Options of the recipe, as typed.
        seeds: Seeds to repeat the best and the default settings with; 0 for none.
        run: Runs the trials of a search.
        tell: Called with each line for the user.
        begin: Called before the repeats.
    """

    tuning: Tuning
    words: Sequence[str]
    seeds: int
    run: Callable[[Tuning, SharedStudy], TrialsEnded]
    tell: Callable[[str], None]
    begin: Callable[[], None] = lambda: None

    def answer(self) -> StudyAnswer:
        """Runs the search and its repeats, and writes ``study.json`` and ``report.html``.

        Raises the errors of :meth:`~systolic.tuning.definition.Tuning.open` and of ``run``.
        """
        with closing(self.tuning.open()) as shared:
            return self._answer(shared)

    def _answer(self, shared: SharedStudy) -> StudyAnswer:
        tuning = self.tuning
        if line := lost(tuning, shared):
            self.tell(line)
        ended = self.run(tuning, shared)
        result, interrupted = tuning.with_command(ended.result, self.words), ended.interrupted
        best = result.best
        if best is not None and len(tuning.aims) == 1:
            result = replace(result, examples=tuning.examples)
        # Written before the repeats, which may fail.
        page = written(tuning, result)
        if self.seeds and best is not None and result.finished == result.total:
            self.begin()
            repeating = tuning.repeating(shared, best.number, self.seeds)
            with closing(repeating.open()) as own:
                again = self.run(repeating, own)
            told = repeated(result, again.result)
            interrupted = interrupted or again.interrupted
            result = replace(result, repeats=told.to_json())
            page = written(tuning, result)
        elif self.seeds and best is not None and not interrupted:
            self.tell(
                f"--repeats is skipped, since the search ended after {result.finished} of {result.total} trials; raise --budget and rerun"
            )
        return StudyAnswer(result=result, page=page, interrupted=interrupted)


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
    told = "--objective seconds is wall time"
    shared = f"the {workers} workers share this machine, so that trials slow each other down"
    machines = "machines that share the study may differ in speed"
    why = [shared] if workers > 1 else []
    why += [machines] if tuning.storage is not None else []
    return f"{told}: {', and '.join(why)}" if why else ""


def study_result(
    tuning: Tuning, shared: SharedStudy, *, stopped: str = "", weighed: bool = True
) -> StudyResult:
    """Results of a study so far.

    Args:
        tuning: The search.
        shared: Its study.
        stopped: Why the search ended before all trials were done.
        weighed: Whether to add the importance of options, which takes a second.
    """
    of = {} if tuning.on is None else priced(slice(tuning.on), tuning.price)
    rows = rows_of(shared, tuning.trials, tuning.searched, tuning.aims, tuning.runs)
    found = StudyResult(
        name=tuning.address.name,
        recipe=tuning.recipe.target,
        rows=rows,
        total=max(tuning.trials, len(rows)),
        searched=tuning.searched,
        aims=tuning.aims,
        importance=importance(shared.study, tuning.aims, tuning.searched) if weighed else {},
        stopped=stopped,
        price_region=of.get("price_region", ""),
        price_as_of=of.get("price_as_of", ""),
        first_seed=None if tuning.repeats is None else tuning.base["seed"] + 1,
    )
    # A trial that ended early may have left the budget for the last ones.
    return found if found.finished < found.total else replace(found, stopped="")


def repeated(best: StudyResult, repeats: StudyResult) -> Repeated:
    """Compares the best and the default settings over several seeds.

    Args:
        best: Results of the search.
        repeats: Results of the trials that alternate between the best and the default settings.
    """
    assert best.best is not None
    aim, values = best.aims[0], ([], [])
    seeds = repeats.total // 2
    # One of a pair may have ended under a larger --repeats.
    rows = [row for row in repeats.rows if row.number < 2 * seeds]
    for row in rows:
        if row.is_done:
            values[row.number % 2].append(row.figures[aim.name])
    missing = [row for row in rows if not row.is_done]
    told = [f"{repeats.title(row)}: {row.reason}" for row in missing if row.reason]
    return Repeated(
        trial=best.best.number,
        aim=aim,
        seeds=seeds,
        best=values[0],
        default=values[1],
        failure=told[0] if told else "not ended; rerun to continue",
    )


def written(tuning: Tuning, result: StudyResult) -> Path:
    """Writes the results into the study's folder; returns the path of the page."""
    write_json(tuning.folder / RESULTS, result.to_json())
    return write_page(result, tuning.folder)
