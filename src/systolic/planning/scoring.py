"""Scores of candidates by their estimates, corrected by the compiles so far."""

from dataclasses import dataclass, field

from systolic.forecasting import Forecast
from systolic.planning.analytic import Analysis, capacity
from systolic.planning.candidate import Candidate
from systolic.planning.facts import Facts
from systolic.planning.goal import Goal, Tariff, Total
from systolic.planning.learned import Correction, likely
from systolic.planning.plan import Trial

OPTIMISM = 0.5
"""Standard deviations below the expected time in an optimistic estimate."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate in the queue."""

    candidate: Candidate
    analysis: Analysis


@dataclass
class Judge:
    """Scores under one goal; smaller is better."""

    facts: Facts
    goal: Goal
    time_off: Correction = field(default_factory=Correction)
    bytes_off: Correction = field(default_factory=Correction)
    _tariffs: dict[str, Tariff] = field(default_factory=dict)
    """Tariff of each slice, by its name."""

    def total(self, candidate: Candidate, seconds: float) -> Total:
        """Totals of the whole job at ``seconds`` a step."""
        units = candidate.batch * self.facts.units_per_example
        on = candidate.on
        if (tariff := self._tariffs.get(on.name)) is None:
            tariff = self._tariffs[on.name] = self.goal.tariff(on)
        return self.goal.total(tariff, units, seconds)

    def broken(self, candidate: Candidate, seconds: float) -> str | None:
        """Message about the goal's limit that ``seconds`` a step break; None where they break none."""
        return self.goal.broken(self.total(candidate, seconds))

    def expected(self, ranked: Ranked) -> Total:
        """Totals of the whole job by the corrected estimate."""
        ratio = self.time_off.ratio(ranked.candidate)
        return self.total(ranked.candidate, ranked.analysis.seconds_estimate * ratio)

    def need(self, ranked: Ranked) -> float:
        """Bytes of a device by the corrected estimate."""
        return ranked.analysis.bytes_estimate * self.bytes_off.ratio(ranked.candidate)

    def estimated(self, ranked: Ranked, optimism: float = 0.0) -> float:
        """Score by the corrected estimate, with a penalty for a candidate that may not fit."""
        candidate, analysis = ranked.candidate, ranked.analysis
        ratio = self.time_off.ratio(candidate, optimism)
        seconds = max(analysis.seconds_estimate * ratio, analysis.seconds_bound)
        fits = likely(self.need(ranked), capacity(candidate.on))
        penalty = 1 + 0.4 * (1 - fits) + (20 if fits < 0.03 else 0)
        total = self.total(candidate, seconds)
        limit = 1.0 if self.goal.broken(total) is None else 3.0
        return self.goal.score(total) * penalty * limit

    def hopeful(self, ranked: Ranked) -> float:
        """Score by the optimistic estimate."""
        return self.estimated(ranked, OPTIMISM)

    def beside(self, ranked: Ranked, base: Trial) -> float:
        """Score by the figures of a compiled candidate near it, times the ratio of the corrected estimates.

        Errors that both have in common cancel. Infinite where the bound exceeds the base's score.
        """
        candidate, analysis = ranked.candidate, ranked.analysis
        assert base.forecast is not None
        step = base.forecast.step_seconds
        assert step is not None
        near = self.time_off.ratio(candidate) / self.time_off.ratio(base.candidate)
        seconds = step * near * analysis.seconds_estimate / base.analysis.seconds_estimate
        need = _need(base.forecast)
        ratio = self.bytes_off.ratio(candidate)
        need += ratio * (analysis.bytes_estimate - base.analysis.bytes_estimate)
        fits = likely(need, capacity(candidate.on))
        # One that does not fit costs a compile and no more.
        penalty = 1 + 0.1 * (1 - fits) + (20 if fits < 0.03 else 0)
        total = self.total(candidate, max(seconds, analysis.seconds_bound))
        limit = 1.0 if self.goal.broken(total) is None else 3.0
        return self.goal.score(total) * penalty * limit

    def score(self, trial: Trial) -> float:
        """Score of a compiled candidate; infinite where it does not fit."""
        return float("inf") if trial.total is None else self.goal.score(trial.total)

    def learn(self, ranked: Ranked, trial: Trial) -> None:
        """Corrects estimates by the result of a compile."""
        made = trial.forecast
        if made is None:
            return
        need = _need(made)
        if need:
            self.bytes_off.learn(ranked.candidate, need / ranked.analysis.bytes_estimate)
        if made.step_seconds:
            ratio = made.step_seconds / ranked.analysis.seconds_estimate
            self.time_off.learn(ranked.candidate, ratio)


def _need(made: Forecast) -> float:
    """Bytes of a device that a compiled step needs, whether it fits or not; 0 where unknown."""
    known = made.memory.peak_bytes if made.memory is not None else 0
    return float(known or (made.rejected or {}).get("need_bytes", 0))
