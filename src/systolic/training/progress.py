"""Progress of a run, apart from the arrays, which a checkpoint keeps beside them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RATE = "learning_rate"


@dataclass(kw_only=True, slots=True)
class TrainingProgress:
    """Changes while the job trains; the same after a resume as without one."""

    step: int = 0
    """Steps started."""
    best: float | None = None
    """The best evaluation so far, negated where larger is better."""
    stale: int = 0
    """Evaluations since then."""
    owed: bool = False
    """A signal ended the evaluation of this step early."""
    bad_steps: int = 0
    in_a_row: int = 0
    """Bad steps since the last good one."""
    sums: dict[str, float] = field(default_factory=dict)
    """The metrics of the steps since the last regular record, added up."""
    summed: int = 0
    """Number of those steps, without bad ones, whose update was dropped."""
    last: dict[str, float] = field(default_factory=dict)
    """The mean of those steps, or, before the first of them, the last record's."""

    def to_json(self) -> dict[str, Any]:
        """Progress as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "TrainingProgress":
        """Inverse of :meth:`to_json`."""
        return cls(**plain)

    def take(self, metrics: Mapping[str, float]) -> None:
        """Takes in the metrics of a step that counts.

        A learning rate is the step's own; of the rest ``last`` holds means.
        """
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.summed += 1
        self.last = {name: total / self.summed for name, total in self.sums.items()}
        if RATE in metrics:
            self.last[RATE] = metrics[RATE]

    def record(self) -> None:
        """Begins the next interval: the means so far are on record."""
        self.sums, self.summed = {}, 0

    def judge(self, value: float) -> bool:
        """Takes in an evaluation (smaller is better) and returns whether it is the best so far."""
        if not math.isnan(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
            return True
        self.stale += 1
        return False
