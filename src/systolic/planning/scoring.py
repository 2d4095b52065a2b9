"""Scores of candidates by their estimates, corrected by the compiles so far.

Correction of the analytic estimates by this search's compiles, with its uncertainty, by kind of layout.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from systolic.job import Axis, Remat
from systolic.planning.analytic import Analysis, Facts, capacity
from systolic.planning.candidate import Candidate
from systolic.planning.goal import Goal, Tariff, Total
from systolic.planning.plan import Trial

NOISE = 0.15
"""Standard deviation of log(compiled / estimated) among layouts with equal features."""
PRIOR = 0.25
"""Prior standard deviation of a feature's weight."""
CHIPS = 12
"""Most kinds of chip that get a feature of their own."""


@dataclass
class Correction:
    """log(compiled / estimated) as a Bayesian linear regression over a candidate's features."""

    chips: dict[str, int] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    _fit: tuple[np.ndarray, np.ndarray] | None = None
    _known: dict[int, tuple[Candidate, np.ndarray]] = field(default_factory=dict)
    """Features by the candidate's id, which stays its own while the candidate is kept here."""

    def learn(self, candidate: Candidate, ratio: float) -> None:
        """Adds a compile by the ratio of its figure to the estimate."""
        if candidate.on.chip.name not in self.chips:
            self.chips[candidate.on.chip.name] = len(self.chips)
            self._known.clear()
        self.rows.append(self._features(candidate))
        self.logs.append(math.log(max(ratio, 1e-6)))
        self._fit = None

    def ratio(self, candidate: Candidate, optimism: float = 0.0) -> float:
        """Factor for an estimate, ``optimism`` standard deviations below the expected one."""
        if not self.rows:
            return 1.0
        weights, spread = self._fitted()
        key = id(candidate)
        if key not in self._known:
            self._known[key] = candidate, self._features(candidate)
        _, row = self._known[key]
        expected = float(row @ weights)
        if optimism:
            expected -= optimism * math.sqrt(max(float(row @ spread @ row), 0.0))
        return math.exp(expected)

    def left_out(self) -> list[float]:
        """log(compiled / estimated) of each compile, its estimate corrected by all other compiles."""
        if not self.rows:
            return []
        rows, logs = np.stack(self.rows), np.array(self.logs)
        weights, spread = self._fitted()
        # The residual of a linear fit without one row, by the row's own weight in the fit with it.
        own = np.einsum("ij,jk,ik->i", rows, spread, rows) / NOISE**2
        return [float(x) for x in (logs - rows @ weights) / np.maximum(1.0 - own, 1e-3)]

    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the features' weights."""
        if self._fit is None:
            rows = np.stack(self.rows)
            precision = np.full(rows.shape[1], PRIOR**-2)
            precision[0] = 1.0  # a wide prior: the common factor of all estimates may be far off
            spread = np.linalg.inv(rows.T @ rows / NOISE**2 + np.diag(precision))
            self._fit = spread @ rows.T @ np.array(self.logs) / NOISE**2, spread
        return self._fit

    def _features(self, candidate: Candidate) -> np.ndarray:
        layout = candidate.layout
        chip = np.zeros(CHIPS)
        known = self.chips.get(candidate.on.chip.name)
        if known is not None and known < CHIPS:
            chip[known] = 1.0
        remat = [1.0 if layout.remat is policy else 0.0 for policy in Remat]
        axes = [math.log2(layout.size(axis)) / 3 for axis in Axis]
        passes = math.log2(layout.accumulate) / 3
        rows = math.log2(max(candidate.per_pass, 1e-6)) / 6
        return np.array([1.0, *chip, *remat, *axes, passes, rows])


def likely(need: float, have: float) -> float:
    """Probability that an expected need of ``need`` bytes fits ``have``, for estimates off by about 15 %."""
    return 1.0 / (1.0 + math.exp(min((need / have - 1.0) / 0.06, 50.0)))


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
        need = base.forecast.need_bytes
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
        forecast = trial.forecast
        if forecast is None:
            return
        need = forecast.need_bytes
        if need:
            self.bytes_off.learn(ranked.candidate, need / ranked.analysis.bytes_estimate)
        if forecast.step_seconds:
            ratio = forecast.step_seconds / ranked.analysis.seconds_estimate
            self.time_off.learn(ranked.candidate, ratio)
