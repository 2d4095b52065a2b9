"""Progress of a run, kept in a checkpoint beside the arrays."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RATE = "learning_rate"


@dataclass(kw_only=True, slots=True)
class TrainingProgress:
    """Progress of training; the same after a resume as without one."""

    step: int = 0
    """Steps started."""
    best: float | None = None
    """The best evaluation so far, negated where larger is better."""
    stale: int = 0
    """Evaluations since the best one."""
    owed: bool = False
    """Whether a signal ended this step's evaluation early."""
    bad_steps: int = 0
    in_a_row: int = 0
    """Bad steps since the last good one."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the metrics of the steps since the last regular record."""
    summed: int = 0
    """Number of those steps without bad ones, whose updates were dropped."""
    last: dict[str, float] = field(default_factory=dict)
    """Mean of those steps; before the first of them that of the last record."""

    def to_json(self) -> dict[str, Any]:
        """Progress as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "TrainingProgress":
        """Inverse of :meth:`to_json`."""
        return cls(**plain)

    def take(self, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a good step.

        ``last`` holds the step's own learning rate and the means of the other metrics.
        """
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.summed += 1
        self.last = {name: total / self.summed for name, total in self.sums.items()}
        if RATE in metrics:
            self.last[RATE] = metrics[RATE]

    def record(self) -> None:
        """Begins the next interval, after the means were recorded."""
        self.sums, self.summed = {}, 0

    def judge(self, value: float) -> bool:
        """Adds an evaluation (smaller is better); returns whether it is the best so far."""
        if not math.isnan(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
            return True
        self.stale += 1
        return False
