"""Which options of a search mattered."""

import math
import statistics
import warnings
from collections.abc import Sequence

from systolic.job import Mode
from systolic.tuning.engine import optuna, settled
from systolic.tuning.objective import Aim
from systolic.tuning.search import Searched, combinations
from systolic.tuning.study import SharedStudy

ENOUGH = 30
"""Results of different settings from which importances say something, where not all settings have one."""
FENCE = 1.5
"""Quartile distances beyond the worse quartile after which a result is far worse than the others."""
FEWEST = 8
"""Results from which there are such."""


def importance(
    shared: SharedStudy, aims: Sequence[Aim], searched: Sequence[Searched]
) -> dict[str, float]:
    """Share of each option in the spread of the first objective, of 1 in all: functional ANOVA by a random forest (Hutter et al. 2014).

    Settings that were trained twice count once, and results far worse than the others, which :func:`usual` leaves out, do not.
    Empty where too few settings have a result.
    """
    states = optuna().trial.TrialState
    done = shared.study.get_trials(deepcopy=False, states=(states.COMPLETE,))
    different = list({tuple(sorted(one.params.items())): one for one in reversed(done)}.values())
    enough = min(ENOUGH, combinations(searched) or ENOUGH)
    if len(different) < enough or len(searched) < 2:
        return {}
    kept = usual([one.values[0] for one in different], aims[0].mode)
    if len(set(kept)) < 2:
        return {}
    low, high = min(kept), max(kept)
    with settled(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # In memory, and in the order of the trials: the same study gives the same answer.
        own = optuna().create_study(directions=[aim.direction for aim in aims])
        own.add_trials([one for one in reversed(different) if low <= one.values[0] <= high])
        found = optuna().importance.get_param_importances(
            own,
            evaluator=optuna().importance.FanovaImportanceEvaluator(seed=0),
            target=lambda trial: trial.values[0],
        )
    return {name: float(share) for name, share in found.items() if math.isfinite(share)}


def usual(values: Sequence[float], mode: Mode) -> list[float]:
    """Values without those far worse than the others: beyond Tukey's fence, 1.5 quartile distances from the worse quartile."""
    if len(values) < FEWEST:
        return list(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = FENCE * (high - low)
    if mode is Mode.max:
        return [value for value in values if value >= low - reach]
    return [value for value in values if value <= high + reach]
