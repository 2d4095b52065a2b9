"""Luck or gain: the best settings and the defaults, each trained with several seeds that no trial was chosen by."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systolic.job import Mode
from systolic.tuning.objective import Aim

LUCK = 0.05
"""Probability of as large a difference between equal settings, below which it counts as a gain."""


FEWEST = 4
"""Seeds from which values without spread tell a gain: 2 of 70 ways to divide eight values are as far apart."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Values of the first objective over seeds."""

    trial: int
    """Number of the trial whose settings are the best."""
    aim: Aim
    seeds: int
    """Of both settings."""
    best: Sequence[float]
    default: Sequence[float]
    failure: str = ""
    """Why a seed has no result, of the first that has none."""

    @property
    def is_whole(self) -> bool:
        """Whether every seed has a result: the others alone would tell of the lucky ones."""
        return len(self.best) == len(self.default) == self.seeds

    @property
    def is_flat(self) -> bool:
        """Whether no seed makes a difference."""
        return len(set(self.best)) == len(set(self.default)) == 1

    @property
    def gain(self) -> float:
        """Difference of the means, positive where the best settings are better."""
        difference = statistics.fmean(self.best) - statistics.fmean(self.default)
        return -difference if self.aim.mode is Mode.min else difference

    @property
    def chance(self) -> float:
        """Probability of as large a difference between equal settings: Welch's t-test, two-sided; a permutation test where it has no spread."""
        if self.is_flat:
            return 1.0 if self.gain == 0 else 2 / math.comb(2 * self.seeds, self.seeds)
        from scipy.stats import ttest_ind

        return float(ttest_ind(self.best, self.default, equal_var=False).pvalue)

    @property
    def sentence(self) -> str:
        """Whether the gain over the default settings is larger than the luck of a seed."""
        if not self.is_whole:
            counts = [self.seeds - len(values) for values in (self.best, self.default)]
            return f"no verdict: {counts[0]} of {self.seeds} seeds of the best settings and {counts[1]} of the default ones have no result ({self.failure})"
        chance = self.chance
        of = (
            f"{abs(self.gain):.3g} in {self.aim.name} over {self.seeds} seeds each (p {chance:.2g})"
        )
        if self.is_flat and self.gain and chance >= LUCK:
            return f"no verdict: the difference to the default settings is {of}, and as many equal values are too few to tell a seed's luck; give --repeats {FEWEST}"
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
