"""Plan: the answer of a search, as a value and as JSON."""

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from systolic.chips import Slice
from systolic.core.units import Origin, plural
from systolic.forecasting import Forecast
from systolic.planning.analytic import Analysis, Facts
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal, Objective, Total, front
from systolic.planning.space import RefusalRule, Refused
from systolic.report.notebook import notebook_html
from systolic.runs.plan_choice import FORMAT

if TYPE_CHECKING:
    from systolic.planning.enumeration import Margin
    from systolic.planning.notes import PlanNote
    from systolic.planning.wall import Wall

PAIRED_ERROR = 0.024
"""Standard deviation of the ratio of two close forecasts of one model on one slice from that on chips (benchmarks/plan/chips.py, fit half)."""


class SearchStop(enum.Enum):
    """Reason that a search ended early."""

    interrupted = "interrupted"
    time_limit = "time limit"


class CompileDepth(enum.Enum):
    """Depth of a candidate's compile; the values are those of a plan's JSON."""

    full = "whole"
    """Full compile, with the compiler's own cycles."""
    schedule = "schedule"
    """Up to the schedule: memory is exact, op times are estimates."""
    roofline = "roofline"
    """A CPU's program, and a GPU's without its compiler: priced by a roofline at any depth."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Compiled candidate."""

    candidate: Candidate
    analysis: Analysis
    forecast: Forecast | None = None
    total: Total | None = None
    """Totals of the whole job; None when it does not fit."""
    broken: str | None = None
    """The goal's limit that it breaks."""
    problem: str | None = None
    """Why there is no forecast."""
    full: bool = False
    """Whether the compile was full; else it stopped at the schedule."""
    schedule_seconds: float | None = None
    """Step time by the schedule alone, kept when a full compile replaced it."""

    @property
    def depth(self) -> CompileDepth:
        """Depth of the compile."""
        platform, forecast = self.candidate.on.platform, self.forecast
        if platform == "gpu" and forecast is not None:
            assumed = forecast.memory_origin is Origin.assumed
            return CompileDepth.roofline if assumed else CompileDepth.schedule
        if platform != "tpu":
            return CompileDepth.roofline
        return CompileDepth.full if self.full else CompileDepth.schedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan for a goal: the trials, and the refused parts of the space."""

    facts: Facts
    goal: Goal
    tried: Sequence[Trial]
    refused: Sequence[Refused]
    searched: int
    """Number of candidates analysed."""
    seconds: float
    stopped: SearchStop | None = None
    """Reason that the search ended early; None when it ended by itself."""
    margin: "Margin | None" = None
    """By how much layouts that were not compiled may beat the best; None where there are none."""
    wall: "Wall | None" = None
    """Wall-clock of the best; None without one."""
    target: str = ""
    """The recipe as it was given; empty for a plan of a Job."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's options."""
    arguments: Sequence[str] = ()
    """The recipe's options as typed."""
    notes: "Sequence[PlanNote]" = ()
    saved: Path | None = None
    """The file that was written with it."""

    def __repr__(self) -> str:
        """The best candidate on one line; the plan itself has hundreds."""
        best = self.best
        answer = "nothing fits" if best is None else f"best {best.forecast!r}"
        ranked, refused = len(self.ranking), len(self.refused)
        return f"<Plan of {plural(self.searched, 'candidate')}: {answer}; {ranked} ranked, {refused} refused>"

    def _repr_html_(self) -> str:
        return notebook_html(self)

    @property
    def ranking(self) -> list[Trial]:
        """Trials that fit and meet the limits, best first; of a tie the simplest."""
        return simplest_first(self.tried, self.goal)

    @property
    def tie(self) -> list[int]:
        """Ranks, from 1, of the layouts that the forecast can't tell from the fastest; empty where it can."""
        tied = {id(trial) for trial in tied_with_first(self.tried, self.goal)}
        ranks = [rank for rank, trial in enumerate(self.ranking, 1) if id(trial) in tied]
        return ranks if len(ranks) > 1 else []

    @property
    def best(self) -> Trial | None:
        """The first of the ranking."""
        return next(iter(self.ranking), None)

    @property
    def pareto(self) -> list[Trial]:
        """Trials that no other beats in both time and dollars; by time alone without prices."""
        ranked = [trial for trial in self.tried if trial.total is not None]
        points = [
            (trial.total.seconds, trial.total.usd if trial.total.usd is not None else float("inf"))
            for trial in ranked
            if trial.total is not None
        ]
        return [ranked[index] for index in front(points)]

    @property
    def failed(self) -> list[Trial]:
        """Trials that are no answer: they don't fit, break a limit, or did not compile."""
        good = {id(trial) for trial in self.ranking}
        return [trial for trial in self.tried if id(trial) not in good]

    def to_json(self) -> dict[str, Any]:
        """Plain values under their published names, sufficient for ``systolic train --plan``."""
        best = self.best
        front = {id(trial) for trial in self.pareto}
        return {
            "format": FORMAT,
            "recipe": self.target or None,
            **({} if self.target else {"job": self.facts.job.name}),
            "options": dict(self.options),
            "arguments": list(self.arguments),
            "goal": self.goal.to_json(),
            "best": None if best is None else self._ranked(best, front),
            "candidates": [self._ranked(trial, front) for trial in self.ranking],
            "rejected": [self._failed(trial) for trial in self.failed]
            + [
                {"slice": r.on.name, "layout": r.layout, "rule": r.rule.value, "reason": r.reason}
                for r in self.refused
            ],
            "tie": {"within": PAIRED_ERROR, "candidates": tie} if (tie := self.tie) else None,
            "margin": None if self.margin is None else self.margin.to_json(),
            "wall": None if self.wall is None else self.wall.to_json(),
            "searched": self.searched,
            "compiled": len(self.tried),
            "seconds": round(self.seconds, 2),
            "stopped": "" if self.stopped is None else self.stopped.value,
        }

    def _ranked(self, trial: Trial, front: set[int]) -> dict[str, Any]:
        assert trial.forecast is not None
        assert trial.total is not None
        return {
            **trial.forecast.figures_json(),
            "settings": trial.candidate.settings(self.facts.job),
            "flags": list(trial.candidate.compiler_flags),
            "total": {
                "steps": trial.total.steps,
                "seconds": trial.total.seconds,
                "usd": trial.total.usd,
                **self.goal.priced(trial.candidate.on),
                "kwh": trial.total.kwh,
            },
            "pareto": id(trial) in front,
            "estimated": {
                "step_seconds": trial.analysis.seconds_estimate,
                "peak_bytes": trial.analysis.bytes_estimate,
                "step_seconds_bound": trial.analysis.seconds_bound,
                "peak_bytes_bound": trial.analysis.bytes_bound,
            },
            "compile": trial.depth.value,
        }

    def _failed(self, trial: Trial) -> dict[str, Any]:
        return {
            "slice": trial.candidate.on.name,
            "layout": trial.candidate.text,
            "rule": (RefusalRule.goal if trial.broken else RefusalRule.compiler).value,
            "reason": reason_of(trial),
        }


def ranking(tried: Sequence[Trial], goal: Goal) -> list[Trial]:
    """Trials that fit and meet the goal's limits, best first.

    A step time from a schedule alone is scaled by the ratio that other full compiles on its chip had.
    """
    ratios = full_over_schedule(tried)

    def score(trial: Trial) -> float:
        return goal.score(_scaled(trial, ratios))

    good = [trial for trial in tried if trial.total is not None and trial.broken is None]
    if goal.objective is Objective.fit:
        return sorted(good, key=lambda trial: (*size(trial.candidate.on, goal), score(trial)))
    return sorted(good, key=score)


def _scaled(trial: Trial, ratios: Mapping[str, float]) -> Total:
    assert trial.total is not None
    return trial.total.times(1.0 if trial.full else ratios.get(trial.candidate.on.chip.name, 1.0))


def tied_with_first(tried: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The first of a ranking, and the layouts of its slice, batch and precision within :data:`PAIRED_ERROR` of it."""
    ratios, ranked = full_over_schedule(tried), ranking(tried, goal)

    def same(trial: Trial) -> bool:
        of, first = trial.candidate, ranked[0].candidate
        alike = (of.on, of.batch, of.precision) == (first.on, first.batch, first.precision)
        slower = _scaled(trial, ratios).seconds / _scaled(ranked[0], ratios).seconds
        return alike and slower <= 1 + PAIRED_ERROR

    return [trial for trial in ranked if same(trial)]


def simplest_first(tried: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The ranking, with what ties with its first by simplicity; others keep their places."""
    tied = tied_with_first(tried, goal)
    members, turns = set(map(id, tied)), iter(sorted(tied, key=lambda t: t.candidate.complexity))
    return [next(turns) if id(t) in members else t for t in ranking(tried, goal)]


def size(on: Slice, goal: Goal) -> tuple[int, float, str]:
    """Sort key of slices by size: chips, then dollars an hour, then name."""
    price = goal.hourly(on)
    return on.num_chips, math.inf if price is None else price, on.name


def full_over_schedule(tried: Sequence[Trial]) -> dict[str, float]:
    """Chip to the median ratio of a full compile's step time to that of its schedule."""
    by_chip: dict[str, list[float]] = {}
    for trial in tried:
        seconds = trial.forecast.step_seconds if trial.forecast is not None else None
        if trial.full and trial.schedule_seconds and seconds:
            by_chip.setdefault(trial.candidate.on.chip.name, []).append(
                seconds / trial.schedule_seconds
            )
    return {name: statistics.median(ratios) for name, ratios in by_chip.items()}


def reason_of(trial: Trial) -> str:
    """Reason that a compiled candidate is no answer."""
    from systolic.core.units import gibibytes

    if trial.problem is not None:
        return trial.problem
    if trial.broken is not None:
        return trial.broken
    short = trial.forecast.rejected if trial.forecast is not None else None
    need, have = (0, 0) if short is None else (short.need_bytes, short.have_bytes)
    return f"needs {gibibytes(need)} of {gibibytes(have)}"


def default_objective(slices: int, deadline: bool, budget: bool) -> Objective:
    """Cost under a deadline, time under a budget or on a single slice, else both."""
    if deadline:
        return Objective.cost
    if budget or slices == 1:
        return Objective.time
    return Objective.pareto
