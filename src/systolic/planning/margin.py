"""Margin of a plan: by how much a layout that was not compiled may beat the answer."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from systolic.planning.analytic import capacity
from systolic.planning.enumeration import Judge, Ranked
from systolic.planning.plan import Trial

MAY_FIT = 1.5
"""Ratio of the estimated need to the memory up to which a layout that was not compiled may fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """Layouts that were not compiled, beside the answer.

    Their times are estimates, corrected by the compiles, and no bounds: a margin assumes that they are off by
    no more than those of the compiled layouts were, each corrected by the other compiles.
    """

    layouts: int
    """Layouts that may fit and whose bound does not exclude that they beat the answer."""
    bounded: int
    """Layouts that can't beat it: their bound does not."""
    nearest: float
    """Ratio of the best estimated score among them to the answer's."""
    low: float
    """Smallest ratio of a compiled step time to its estimate."""
    high: float
    """Largest ratio of a compiled step time to its estimate."""
    compiled: int
    """Compiles that the ratios come from."""
    best: float
    """Ratio of the nearest's score to the answer's, if its estimate is off by ``low``."""

    @property
    def share(self) -> float:
        """Share of the answer's score by which one of them may beat it; 0 where none is expected to."""
        return max(0.0, 1.0 - self.best)

    def to_json(self) -> dict[str, Any]:
        """Plain values under their published names."""
        return {
            "layouts": self.layouts,
            "excluded_by_bounds": self.bounded,
            "nearest_estimate": self.nearest,
            "compiled_over_estimate": [self.low, self.high],
            "compiled": self.compiled,
            "may_be_better_by": self.share,
        }


def margin_of(judge: Judge, answer: Trial, waiting: Iterable[Ranked]) -> Margin | None:
    """The margin of an answer over the layouts that wait for a compile; None without any, or without compiles.

    Args:
        judge: Holds the corrections by all compiles.
        answer: The best compiled candidate.
        waiting: Candidates that were not compiled.
    """
    logs = judge.time_off.left_out()
    if not logs:
        return None
    low, high = math.exp(min(logs)), math.exp(max(logs))
    best = judge.score(answer)
    layouts, bounded, nearest, least = 0, 0, math.inf, math.inf
    for ranked in waiting:
        candidate, analysis = ranked.candidate, ranked.analysis
        if judge.need(ranked) > MAY_FIT * capacity(candidate.on):
            continue
        bound = judge.goal.score(judge.total(candidate, analysis.seconds_bound))
        if bound >= best:
            bounded += 1
            continue
        layouts += 1
        total = judge.expected(ranked)
        nearest = min(nearest, judge.goal.score(total) / best)
        hopeful = max(judge.goal.score(total.times(low)), bound)
        least = min(least, hopeful / best)
    if not layouts:
        return None
    return Margin(
        layouts=layouts,
        bounded=bounded,
        nearest=nearest,
        low=low,
        high=high,
        compiled=len(logs),
        best=least,
    )
