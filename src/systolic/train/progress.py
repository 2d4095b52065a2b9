"""How far a run is, apart from the arrays: what a checkpoint keeps beside them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Progress:
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
    last: dict[str, float] = field(default_factory=dict)
    """The metrics of the last good step."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Progress":
        """Inverse of :meth:`to_json`."""
        return cls(**plain)

    def judge(self, value: float) -> bool:
        """Takes in an evaluation (smaller is better) and returns whether it is the best so far."""
        if not math.isnan(value) and (self.best is None or value < self.best):
            self.best, self.stale = value, 0
            return True
        self.stale += 1
        return False
