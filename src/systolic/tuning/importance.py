"""Importance of the options of a search."""

import math
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from systolic.job import Mode
from systolic.tuning.engine import optuna, settled
from systolic.tuning.objective import Aim
from systolic.tuning.search import Searched, combinations

ENOUGH = 30
"""Fewest distinct settings with a result for importances, unless the search has fewer settings."""
FENCE = 1.5
"""Interquartile ranges beyond the worse quartile after which a result is an outlier."""
FEWEST = 8
"""Fewest results in which outliers are identified."""


TREES = 16
"""Trees of a forest."""
FORESTS = (4, 32)
"""Fewest and most forests over which shares are averaged: with few results, those of one hang on its seed by several per cent."""
ERROR = 0.005
"""Standard error of every share at which no further forest is grown."""


def importance(study: Any, aims: Sequence[Aim], searched: Sequence[Searched]) -> dict[str, float]:
    """Share of each option in the variance of the first objective: functional ANOVA by random forests (Hutter et al. 2014).

    Shares sum to 1. ``study`` is Optuna's. Each distinct setting counts once, and outliers (see :func:`usual`) are left out.
    Empty if too few settings have a result.
    """
    states = optuna().trial.TrialState
    done = study.get_trials(deepcopy=False, states=(states.COMPLETE,))
    different = list(
        {tuple(sorted(trial.params.items())): trial for trial in reversed(done)}.values()
    )
    enough = min(ENOUGH, combinations(searched) or ENOUGH)
    if len(different) < enough or len(searched) < 2:
        return {}
    kept = usual([trial.values[0] for trial in different], aims[0].mode)
    if len(set(kept)) < 2:
        return {}
    low, high = min(kept), max(kept)
    with settled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # In memory and in trial order, so that the same study gives the same importances.
        own = optuna().create_study(directions=[aim.direction for aim in aims])
        own.add_trials([trial for trial in reversed(different) if low <= trial.values[0] <= high])
        means = _mean_shares(own)
    return means if all(map(math.isfinite, means.values())) else {}


def _mean_shares(study: Any, first: int = 0) -> dict[str, float]:
    """Share of each option, the mean over forests with seeds from ``first`` on; the largest first."""
    forests: list[dict[str, float]] = []
    fewest, most = FORESTS
    while len(forests) < most:
        forests.append(_shares(study, first + len(forests)))
        errors = [_error([shares[name] for shares in forests]) for name in forests[0]]
        if len(forests) >= fewest and max(errors) < ERROR:
            break
    means = {name: statistics.fmean(shares[name] for shares in forests) for name in forests[0]}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _shares(study: Any, seed: int) -> dict[str, float]:
    """Share of each option by one forest."""
    kind = optuna().importance.FanovaImportanceEvaluator
    return optuna().importance.get_param_importances(
        study, evaluator=kind(n_trees=TREES, seed=seed), target=lambda trial: trial.values[0]
    )


def usual(values: Sequence[float], mode: Mode) -> list[float]:
    """Values without outliers, which are more than 1.5 interquartile ranges worse than the worse quartile (Tukey's fence)."""
    if len(values) < FEWEST:
        return list(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = FENCE * (high - low)
    if mode is Mode.max:
        return [value for value in values if value >= low - reach]
    return [value for value in values if value <= high + reach]
