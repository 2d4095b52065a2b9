"""From a search to its results: trials, the best settings' command, and their comparison with the defaults over several seeds."""

import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.files import write_json
from systolic.core.machine import bounded_workers
from systolic.core.reporter import reporter, working
from systolic.job import Mode
from systolic.tuning.definition import Tuning
from systolic.tuning.display.page import write_page
from systolic.tuning.objective import Aim
from systolic.tuning.processes import Processes
from systolic.tuning.results import StudyResult
from systolic.tuning.study import RESULTS, SharedStudy, num_results
from systolic.tuning.trials import INTERRUPTED, TrialWorker

LUCK = 0.05
"""Significance level: a difference with a smaller p value counts as a gain."""
FEWEST = 6
"""Fewest seeds whose equal differences are significant: all signs agree by chance in 2 of 64 cases."""
SPREAD = 1e-9
"""Spread of differences, relative to the values, that is attributed to rounding."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Results of the best and the default settings over seeds, by the first objective."""

    trial: int
    """Number of the best trial."""
    aim: Aim
    seeds: int
    """Number of seeds that each of the two settings is trained with."""
    best: Sequence[float]
    """Values of the best settings, by seed."""
    default: Sequence[float]
    """Values of the default settings, by seed."""
    failure: str = ""
    """Why the first seed without a result has none."""

    @property
    def is_whole(self) -> bool:
        """Whether every seed has a result; without the failed ones, the comparison would favour lucky seeds."""
        return len(self.best) == len(self.default) == self.seeds

    @property
    def gains(self) -> list[float]:
        """Differences by seed, positive where the best settings are better."""
        sign = -1 if self.aim.mode is Mode.min else 1
        return [sign * (best - other) for best, other in zip(self.best, self.default, strict=True)]

    @property
    def is_even(self) -> bool:
        """Whether the difference is the same for every seed."""
        values = [*self.best, *self.default]
        return max(self.gains) - min(self.gains) <= SPREAD * max(map(abs, values))

    @property
    def is_same(self) -> bool:
        """Whether the difference is zero for every seed."""
        values = [*self.best, *self.default]
        return self.is_even and abs(self.gain) <= SPREAD * max(map(abs, values))

    @property
    def gain(self) -> float:
        """Mean difference."""
        return statistics.fmean(self.gains)

    @property
    def chance(self) -> float:
        """p value of the difference: two-sided t-test, paired since both settings use the same seeds; a sign test if all differences are equal."""
        if self.is_even:
            return 1.0 if self.is_same else 2.0 ** (1 - self.seeds)
        from scipy.stats import ttest_rel

        return float(ttest_rel(self.best, self.default).pvalue)

    @property
    def sentence(self) -> str:
        """Verdict: whether the gain over the default settings is larger than the variation between seeds."""
        if not self.is_whole:
            counts = [self.seeds - len(values) for values in (self.best, self.default)]
            return f"no verdict: {counts[0]} of {self.seeds} seeds of the best settings and {counts[1]} of the default ones have no result ({self.failure})"
        chance = self.chance
        of = f"{abs(self.gain):.3g} in {self.aim.name}"
        if self.is_same:
            return f"no gain: the default settings have the same result with each of {self.seeds} seeds"
        if chance >= LUCK:
            more = f"; use --repeats {FEWEST} or more" if self.seeds < FEWEST else ""
            side = "better" if self.gain > 0 else "worse"
            return f"no verdict: the best settings are {side} than the default ones by {of}, not significant with {self.seeds} seeds (p {chance:.2g}){more}"
        of += f" over the same {self.seeds} seeds (p {chance:.2g})"
        if self.gain < 0:
            return f"the default settings are better by {of}: the best trial was lucky"
        return (
            f"the gain over the default settings is {of}, larger than the variation between seeds"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "trial": self.trial,
            "seeds": self.seeds,
            "best": _figures(self.best),
            "default": _figures(self.default),
            "gain": self.gain if self.is_whole else None,
            "p": self.chance if self.is_whole else None,
            "sentence": self.sentence,
        }


def _figures(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
        "values": list(values),
    }


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
    reasons = [f"{repeats.title(row)}: {row.reason}" for row in missing if row.reason]
    return Repeated(
        trial=best.best.number,
        aim=aim,
        seeds=seeds,
        best=values[0],
        default=values[1],
        failure=reasons[0] if reasons else "not ended; rerun to continue",
    )


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
        ended()  # trials of an earlier call, so that a display tells those of this one
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
