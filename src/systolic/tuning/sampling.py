"""Samplers and pruners by name: Optuna's own."""

import enum
from collections.abc import Sequence
from typing import Any

from systolic.core.digest import digest
from systolic.core.errors import OptionError
from systolic.tuning.engine import optuna, settled
from systolic.tuning.search import Searched

STARTS = 5
"""Trials that are never stopped early by the median."""
REDUCTION = 3
"""Hyperband: one of so many trials goes on from a rung."""


class Sampler(enum.Enum):
    """How the next trial is chosen."""

    tpe = "tpe"
    """Tree-structured Parzen estimator: near what was good, away from what was bad."""
    random = "random"
    grid = "grid"
    """Every combination once."""
    cmaes = "cmaes"
    """CMA-ES, for ranges of numbers."""


class Pruner(enum.Enum):
    """Which trials are stopped early, by the run's own evaluations."""

    hyperband = "hyperband"
    median = "median"
    none = "none"


def check(sampler: Sampler, searched: Sequence[Searched], num_aims: int) -> int | None:
    """Checks a sampler against the search; the number of combinations of a grid, else None.

    Raises:
        OptionError: the sampler does not take such a search.
    """
    if sampler is Sampler.grid:
        total = 1
        for one in searched:
            total *= len(one.grid())
        return total
    if sampler is Sampler.cmaes:
        if num_aims > 1:
            raise OptionError("--sampler cmaes takes one objective; use tpe, or leave one out")
        if sum(one.is_range for one in searched) < 2:
            raise OptionError(
                "--sampler cmaes takes two ranges of numbers or more; use tpe, or search another range"
            )
    return None


def build(sampler: Sampler, searched: Sequence[Searched], seed: int, number: int) -> Any:
    """Optuna's sampler for one trial, the same whichever process draws it.

    Args:
        sampler: Its name.
        searched: The options.
        seed: Of the study.
        number: Of the trial: two processes must not draw the same.
    """
    with settled():
        return RoundingSampler(_built(sampler, searched, seed, number), searched)


def _built(sampler: Sampler, searched: Sequence[Searched], seed: int, number: int) -> Any:
    kinds = optuna().samplers
    own = int(digest([seed, number], 8), 16)
    match sampler:
        case Sampler.tpe:
            # Running trials count as bad ones, so that workers spread out.
            return kinds.TPESampler(seed=own, multivariate=len(searched) > 1, constant_liar=True)
        case Sampler.random:
            return kinds.RandomSampler(seed=own)
        case Sampler.grid:
            return kinds.GridSampler({one.name: one.grid() for one in searched}, seed=seed)
        case Sampler.cmaes:
            return kinds.CmaEsSampler(seed=own, warn_independent_sampling=False)


class RoundingSampler:
    """Optuna's sampler, whose numbers are those that the trials train with.

    Args:
        sampler: Optuna's.
        searched: The options.
    """

    def __init__(self, sampler: Any, searched: Sequence[Searched]) -> None:
        self._sampler = sampler
        self._options = {one.name: one for one in searched}
        self.infer_relative_search_space = sampler.infer_relative_search_space
        self.before_trial, self.after_trial = sampler.before_trial, sampler.after_trial
        self.reseed_rng = sampler.reseed_rng

    def sample_relative(self, study: Any, trial: Any, space: Any) -> dict[str, Any]:
        """Values that are drawn together."""
        drawn = self._sampler.sample_relative(study, trial, space)
        return {name: self._as_trained(name, value) for name, value in drawn.items()}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """The value of one option."""
        drawn = self._sampler.sample_independent(study, trial, name, distribution)
        return self._as_trained(name, drawn)

    def _as_trained(self, name: str, value: Any) -> Any:
        return self._options[name].shown(value) if name in self._options else value


def pruner(name: Pruner, every: int, steps: int) -> Any:
    """Optuna's pruner.

    Args:
        name: Its name.
        every: Steps between evaluations.
        steps: Of the longest trial.
    """
    kinds = optuna().pruners
    match name:
        case Pruner.hyperband:
            return kinds.HyperbandPruner(
                min_resource=min(every, steps), max_resource=steps, reduction_factor=REDUCTION
            )
        case Pruner.median:
            return kinds.MedianPruner(n_startup_trials=STARTS)
        case Pruner.none:
            return kinds.NopPruner()
