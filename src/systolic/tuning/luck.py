"""Luck or gain: the best settings and the defaults, each trained with several seeds that no trial was chosen by."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systolic.job import Mode
from systolic.tuning.objective import Aim

LUCK = 0.05
"""Probability of as large a difference between equal settings, below which it counts as a gain."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Values of the first objective over seeds."""

    trial: int
    """Number of the trial whose settings are the best."""
    aim: Aim
    best: Sequence[float]
    default: Sequence[float]

    @property
    def gain(self) -> float:
        """Difference of the means, positive where the best settings are better."""
        difference = statistics.fmean(self.best) - statistics.fmean(self.default)
        return -difference if self.aim.mode is Mode.min else difference

    @property
    def chance(self) -> float:
        """Probability of as large a difference between equal settings: Welch's t-test, two-sided."""
        if statistics.stdev(self.best) == statistics.stdev(self.default) == 0:
            return 1.0 if self.gain == 0 else 0.0
        from scipy.stats import ttest_ind

        return float(ttest_ind(self.best, self.default, equal_var=False).pvalue)

    @property
    def sentence(self) -> str:
        """Whether the gain over the default settings is larger than the luck of a seed."""
        count, chance = min(len(self.best), len(self.default)), self.chance
        of = f"{abs(self.gain):.3g} in {self.aim.name} over {count} seeds each (p {chance:.2g})"
        if chance >= LUCK:
            return (
                f"the difference to the default settings is {of}, no larger than the luck of a seed"
            )
        if self.gain < 0:
            return f"the default settings are better by {of}: the best trial was lucky"
        return f"the gain over the default settings is {of}, larger than the luck of a seed"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "trial": self.trial,
            "seeds": min(len(self.best), len(self.default)),
            "best": _figures(self.best),
            "default": _figures(self.default),
            "gain": self.gain,
            "p": self.chance,
            "sentence": self.sentence,
        }


def _figures(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values),
        "values": list(values),
    }
