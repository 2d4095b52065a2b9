"""Correction of the analytic estimates by this search's compiles, with its uncertainty, by kind of layout."""

import math
from dataclasses import dataclass, field

import numpy as np

from systolic.job import Axis, Remat
from systolic.planning.candidate import Candidate

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
        remat = [1.0 if layout.remat is one else 0.0 for one in Remat]
        axes = [math.log2(layout.size(axis)) / 3 for axis in Axis]
        passes = math.log2(layout.accumulate) / 3
        rows = math.log2(max(candidate.per_pass, 1e-6)) / 6
        return np.array([1.0, *chip, *remat, *axes, passes, rows])


def likely(need: float, have: float) -> float:
    """Probability that an expected need of ``need`` bytes fits ``have``, for estimates off by about 15 %."""
    return 1.0 / (1.0 + math.exp(min((need / have - 1.0) / 0.06, 50.0)))
