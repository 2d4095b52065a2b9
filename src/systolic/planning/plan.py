"""The answer of a search, as a value and as JSON."""

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from systolic.artifact.chosen import FORMAT
from systolic.forecasting import Forecast
from systolic.forecasting.forecast import COSTS
from systolic.planning.analytic import Analysis
from systolic.planning.candidate import Candidate
from systolic.planning.facts import Facts
from systolic.planning.goal import Goal, Total, front
from systolic.planning.objective import Objective
from systolic.planning.space import RefusalRule, Refused

if TYPE_CHECKING:
    from systolic.planning.notes import PlanNote


class SearchStop(enum.Enum):
    """Why a search ended before it was done."""

    interrupted = "interrupted"
    time_limit = "time limit"


class CompileDepth(enum.Enum):
    """How far a candidate was compiled; the values are those of a plan's JSON."""

    full = "whole"
    """To the end, with the compiler's own cycles."""
    schedule = "schedule"
    """Up to the schedule: memory is exact, the time of ops estimated."""
    roofline = "roofline"
    """A GPU's program, however far it was compiled."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate that was compiled."""

    candidate: Candidate
    analysis: Analysis
    forecast: Forecast | None = None
    total: Total | None = None
    """Of the whole job; None when it does not fit."""
    broken: str | None = None
    """The goal's limit that it breaks."""
    problem: str | None = None
    """Why there is no forecast."""
    full: bool = False
    """Compiled to the end; else up to the schedule."""
    schedule_seconds: float | None = None
    """Of a full compile: the step time that its schedule alone had given."""

    @property
    def depth(self) -> CompileDepth:
        """How far it was compiled."""
        if self.candidate.on.platform != "tpu":
            return CompileDepth.roofline
        return CompileDepth.full if self.full else CompileDepth.schedule


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A goal, what was tried for it and what was not."""

    facts: Facts
    goal: Goal
    tried: Sequence[Trial]
    refused: Sequence[Refused]
    searched: int
    """Candidates that the analytic model saw."""
    seconds: float
    stopped: SearchStop | None = None
    """Why the search ended early; None when it ended by itself."""
    target: str = ""
    """The recipe as it was given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's options."""
    arguments: Sequence[str] = ()
    """The same as they were typed."""
    notes: "Sequence[PlanNote]" = ()

    @property
    def ranking(self) -> list[Trial]:
        """What fits and keeps the limits, best first."""
        return ranking(self.tried, self.goal)

    @property
    def best(self) -> Trial | None:
        """The first of the ranking."""
        return next(iter(self.ranking), None)

    @property
    def pareto(self) -> list[Trial]:
        """What no other beats in both time and dollars; by time alone where nothing has a price."""
        ranked = [one for one in self.tried if one.total is not None]
        points = [
            (one.total.seconds, one.total.usd if one.total.usd is not None else float("inf"))
            for one in ranked
            if one.total is not None
        ]
        return [ranked[index] for index in front(points)]

    @property
    def failed(self) -> list[Trial]:
        """What was compiled and is no answer: does not fit, breaks a limit, did not compile."""
        good = {id(one) for one in self.ranking}
        return [one for one in self.tried if id(one) not in good]

    def to_json(self) -> dict[str, Any]:
        """The published names, and what ``systolic train --plan`` needs."""
        best = self.best
        front = {id(one) for one in self.pareto}
        return {
            "format": FORMAT,
            "recipe": self.target or self.facts.job.name,
            "options": dict(self.options),
            "arguments": list(self.arguments),
            "goal": self.goal.to_json(),
            "best": None if best is None else self._one(best, front),
            "candidates": [self._one(one, front) for one in self.ranking],
            "rejected": [self._failed(one) for one in self.failed]
            + [
                {"slice": r.on.name, "layout": r.layout, "rule": r.rule.value, "reason": r.reason}
                for r in self.refused
            ],
            "searched": self.searched,
            "compiled": len(self.tried),
            "seconds": round(self.seconds, 2),
            "stopped": "" if self.stopped is None else self.stopped.value,
        }

    def _one(self, one: Trial, front: set[int]) -> dict[str, Any]:
        assert one.forecast is not None
        assert one.total is not None
        plain = one.forecast.to_json()
        return {
            **{name: value for name, value in plain.items() if name not in COSTS},
            "settings": one.candidate.settings(self.facts.job),
            "flags": list(one.candidate.compiler_flags),
            "total": {
                "steps": one.total.steps,
                "seconds": one.total.seconds,
                "usd": one.total.usd,
                "kwh": one.total.kwh,
            },
            "pareto": id(one) in front,
            "estimated": {
                "step_seconds": one.analysis.seconds_estimate,
                "peak_bytes": one.analysis.bytes_estimate,
                "step_seconds_bound": one.analysis.seconds_bound,
                "peak_bytes_bound": one.analysis.bytes_bound,
            },
            "compile": one.depth.value,
        }

    def _failed(self, one: Trial) -> dict[str, Any]:
        return {
            "slice": one.candidate.on.name,
            "layout": one.candidate.text,
            "rule": (RefusalRule.goal if one.broken else RefusalRule.compiler).value,
            "reason": reason_of(one),
        }


def ranking(tried: Sequence[Trial], goal: Goal) -> list[Trial]:
    """What fits and keeps the goal's limits, best first.

    A step time from the schedule alone is taken to differ from that of the full compile as others of its chip did.
    """
    ratios = full_over_schedule(tried)

    def score(one: Trial) -> float:
        assert one.total is not None
        known = 1.0 if one.full else ratios.get(one.candidate.on.chip.name, 1.0)
        return goal.score(one.total.times(known))

    good = [one for one in tried if one.total is not None and one.broken is None]
    return sorted(good, key=score)


def full_over_schedule(tried: Sequence[Trial]) -> dict[str, float]:
    """Chip to the median ratio of step times: of full compiles, over what the schedule alone had given."""
    found: dict[str, list[float]] = {}
    for one in tried:
        seconds = one.forecast.step_seconds if one.forecast is not None else None
        if one.full and one.schedule_seconds and seconds:
            found.setdefault(one.candidate.on.chip.name, []).append(seconds / one.schedule_seconds)
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def reason_of(one: Trial) -> str:
    """Why a compiled candidate is no answer."""
    from systolic.core.units import gibibytes

    if one.problem is not None:
        return one.problem
    if one.broken is not None:
        return one.broken
    refused = (one.forecast.rejected if one.forecast is not None else None) or {}
    return f"needs {gibibytes(refused.get('need_bytes', 0))} of {gibibytes(refused.get('have_bytes', 0))}"


def default_objective(slices: int, deadline: bool, budget: bool) -> Objective:
    """A deadline leaves the cost to be small, a budget or a single slice the time; else both."""
    if deadline:
        return Objective.cost
    if budget or slices == 1:
        return Objective.time
    return Objective.pareto
