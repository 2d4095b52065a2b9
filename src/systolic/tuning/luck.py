"""Luck or gain: the best settings and the defaults, each trained with several seeds that no trial was chosen by."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systolic.job import Mode
from systolic.tuning.objective import Aim

LUCK = 0.05
"""Probability of as large a difference between equal settings, below which it counts as a gain."""


FEWEST = 6
"""Seeds from which the same difference with each tells a gain: it has one sign by chance in 2 of 64 cases."""
SPREAD = 1e-9
"""Spread of differences, as a share of the values, that is rounding."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Values of the first objective over seeds."""

    trial: int
    """Number of the trial whose settings are the best."""
    aim: Aim
    seeds: int
    """Of both settings."""
    best: Sequence[float]
    """By seed, and so are those of the default settings."""
    default: Sequence[float]
    failure: str = ""
    """Why a seed has no result, of the first that has none."""

    @property
    def is_whole(self) -> bool:
        """Whether every seed has a result: the others alone would tell of the lucky ones."""
        return len(self.best) == len(self.default) == self.seeds

    @property
    def gains(self) -> list[float]:
        """Difference with each seed, positive where the best settings are better."""
        sign = -1 if self.aim.mode is Mode.min else 1
        return [sign * (one - other) for one, other in zip(self.best, self.default, strict=True)]

    @property
    def is_even(self) -> bool:
        """Whether each seed makes the same difference."""
        values = [*self.best, *self.default]
        return max(self.gains) - min(self.gains) <= SPREAD * max(map(abs, values))

    @property
    def is_same(self) -> bool:
        """Whether no seed makes a difference."""
        values = [*self.best, *self.default]
        return self.is_even and abs(self.gain) <= SPREAD * max(map(abs, values))

    @property
    def gain(self) -> float:
        """Mean of the differences."""
        return statistics.fmean(self.gains)

    @property
    def chance(self) -> float:
        """Probability of as large a difference between equal settings: paired t-test, two-sided, since both are trained with the same seeds; a test of signs where the differences have no spread."""
        if self.is_even:
            return 1.0 if self.is_same else 2.0 ** (1 - self.seeds)
        from scipy.stats import ttest_rel

        return float(ttest_rel(self.best, self.default).pvalue)

    @property
    def sentence(self) -> str:
        """Whether the gain over the default settings is larger than the luck of a seed."""
        if not self.is_whole:
            counts = [self.seeds - len(values) for values in (self.best, self.default)]
            return f"no verdict: {counts[0]} of {self.seeds} seeds of the best settings and {counts[1]} of the default ones have no result ({self.failure})"
        chance = self.chance
        of = f"{abs(self.gain):.3g} in {self.aim.name}"
        if self.is_same:
            return f"the default settings do as well with each of {self.seeds} seeds"
        if chance >= LUCK:
            more = f"; give --repeats {FEWEST} or more" if self.seeds < FEWEST else ""
            side = "better" if self.gain > 0 else "worse"
            return f"no verdict: the best settings are {side} than the default ones by {of}, which {self.seeds} seeds cannot tell from luck (p {chance:.2g}){more}"
        of += f" over the same {self.seeds} seeds (p {chance:.2g})"
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
