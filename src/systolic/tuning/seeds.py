"""Luck or gain: the best and the default settings, each trained with several seeds that the search did not use."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from systolic.job import Mode
from systolic.tuning.objective import Aim
from systolic.tuning.results import StudyResult

LUCK = 0.05
"""Significance level: a difference with a smaller p value counts as a gain."""
FEWEST = 6
"""Fewest seeds whose equal differences are significant: all signs agree by chance in 2 of 64 cases."""
SPREAD = 1e-9
"""Spread of differences, relative to the values, that is attributed to rounding."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Results of the best and the default settings over seeds, by the first objective."""

    trial: int
    """Number of the best trial."""
    aim: Aim
    seeds: int
    """Number of seeds that each of the two settings is trained with."""
    best: Sequence[float]
    """Values of the best settings, by seed."""
    default: Sequence[float]
    """Values of the default settings, by seed."""
    failure: str = ""
    """Why the first seed without a result has none."""

    @property
    def is_whole(self) -> bool:
        """Whether every seed has a result; without the failed ones, the comparison would favour lucky seeds."""
        return len(self.best) == len(self.default) == self.seeds

    @property
    def gains(self) -> list[float]:
        """Differences by seed, positive where the best settings are better."""
        sign = -1 if self.aim.mode is Mode.min else 1
        return [sign * (best - other) for best, other in zip(self.best, self.default, strict=True)]

    @property
    def is_even(self) -> bool:
        """Whether the difference is the same for every seed."""
        values = [*self.best, *self.default]
        return max(self.gains) - min(self.gains) <= SPREAD * max(map(abs, values))

    @property
    def is_same(self) -> bool:
        """Whether the difference is zero for every seed."""
        values = [*self.best, *self.default]
        return self.is_even and abs(self.gain) <= SPREAD * max(map(abs, values))

    @property
    def gain(self) -> float:
        """Mean difference."""
        return statistics.fmean(self.gains)

    @property
    def chance(self) -> float:
        """p value of the difference: two-sided t-test, paired since both settings use the same seeds; a sign test if all differences are equal."""
        if self.is_even:
            return 1.0 if self.is_same else 2.0 ** (1 - self.seeds)
        from scipy.stats import ttest_rel

        return float(ttest_rel(self.best, self.default).pvalue)

    @property
    def sentence(self) -> str:
        """Verdict: whether the gain over the default settings is larger than the variation between seeds."""
        if not self.is_whole:
            counts = [self.seeds - len(values) for values in (self.best, self.default)]
            return f"no verdict: {counts[0]} of {self.seeds} seeds of the best settings and {counts[1]} of the default ones have no result ({self.failure})"
        chance = self.chance
        of = f"{abs(self.gain):.3g} in {self.aim.name}"
        if self.is_same:
            return f"no gain: the default settings have the same result with each of {self.seeds} seeds"
        if chance >= LUCK:
            more = f"; use --repeats {FEWEST} or more" if self.seeds < FEWEST else ""
            side = "better" if self.gain > 0 else "worse"
            return f"no verdict: the best settings are {side} than the default ones by {of}, not significant with {self.seeds} seeds (p {chance:.2g}){more}"
        of += f" over the same {self.seeds} seeds (p {chance:.2g})"
        if self.gain < 0:
            return f"the default settings are better by {of}: the best trial was lucky"
        return (
            f"the gain over the default settings is {of}, larger than the variation between seeds"
        )

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


def repeated(best: StudyResult, repeats: StudyResult) -> Repeated:
    """Compares the best and the default settings over several seeds.

    Args:
        best: Results of the search.
        repeats: Results of the trials that alternate between the best and the default settings.
    """
    assert best.best is not None
    aim, values = best.aims[0], ([], [])
    seeds = repeats.total // 2
    # One of a pair may have ended under a larger --repeats.
    rows = [row for row in repeats.rows if row.number < 2 * seeds]
    for row in rows:
        if row.is_done:
            values[row.number % 2].append(row.figures[aim.name])
    missing = [row for row in rows if not row.is_done]
    reasons = [f"{repeats.title(row)}: {row.reason}" for row in missing if row.reason]
    return Repeated(
        trial=best.best.number,
        aim=aim,
        seeds=seeds,
        best=values[0],
        default=values[1],
        failure=reasons[0] if reasons else "not ended; rerun to continue",
    )
