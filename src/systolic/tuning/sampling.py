"""Optuna's samplers and pruners, by name."""

import enum
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from systolic.core.errors import OptionError
from systolic.core.files import digest
from systolic.tuning.search import Searched, combinations, optuna, settled

STARTS = 5
"""Trials that end before the median pruner stops any."""
DRAWS = 16
"""Draws of settings that another trial has, before they are drawn at random."""
REDUCTION = 3
"""Reduction factor of Hyperband: one of this many trials is promoted from a rung."""


class Sampler(enum.Enum):
    """How the next trial is chosen."""

    tpe = "tpe"
    """Tree-structured Parzen estimator: draws near good settings, away from bad ones."""
    random = "random"
    grid = "grid"
    """Every combination once."""
    cmaes = "cmaes"
    """CMA-ES, for ranges of numbers."""


class Pruner(enum.Enum):
    """How trials are stopped early by the evaluations of their runs."""

    hyperband = "hyperband"
    median = "median"
    none = "none"


def check(sampler: Sampler, searched: Sequence[Searched], num_aims: int) -> int | None:
    """Checks a sampler against the search; returns the number of distinct settings, None for no limit on trials.

    Raises:
        OptionError: the sampler does not support the search.
    """
    if sampler is Sampler.grid:
        return math.prod(len(option.grid()) for option in searched)
    if sampler is Sampler.cmaes:
        if num_aims > 1:
            raise OptionError(
                f"--sampler cmaes takes one objective, and {num_aims} are given; use tpe, or give one"
            )
        if sum(option.is_range for option in searched) < 2:
            raise OptionError(
                "--sampler cmaes needs at least two ranges of numbers; use tpe, or search another range"
            )
        return None
    return combinations(searched)


def build(sampler: Sampler, searched: Sequence[Searched], seed: int, number: int) -> Any:
    """Optuna's sampler for one trial, which draws the same in every process.

    Args:
        sampler: Its name.
        searched: The options.
        seed: Seed of the study.
        number: Number of the trial, so that different trials draw differently.
    """
    with settled():
        inner = _built(sampler, searched, seed, number)
        if sampler in (Sampler.tpe, Sampler.random) and combinations(searched):
            return DistinctSampler(inner, searched, random.Random(f"{seed} {number}"))
        return RoundingSampler(inner, searched)


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
            return kinds.GridSampler({option.name: option.grid() for option in searched}, seed=seed)
        case Sampler.cmaes:
            return kinds.CmaEsSampler(seed=own, warn_independent_sampling=False)


class RoundingSampler:
    """Optuna's sampler, with drawn numbers rounded to those that trials train with.

    ``study`` is the whole study, which whoever draws with the sampler sets.

    Args:
        sampler: Optuna's.
        searched: The options.
    """

    def __init__(self, sampler: Any, searched: Sequence[Searched]) -> None:
        self.study: Any = None
        self._sampler = sampler
        self._options = {option.name: option for option in searched}
        self.infer_relative_search_space = sampler.infer_relative_search_space
        self.before_trial, self.after_trial = sampler.before_trial, sampler.after_trial
        self.reseed_rng = sampler.reseed_rng

    def sample_relative(self, study: Any, trial: Any, space: Any) -> dict[str, Any]:
        """Values of the options that are drawn jointly."""
        drawn = self._sampler.sample_relative(study, trial, space)
        return {name: self._as_trained(name, value) for name, value in drawn.items()}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """Value of one option."""
        drawn = self._sampler.sample_independent(study, trial, name, distribution)
        return self._as_trained(name, drawn)

    def _as_trained(self, name: str, value: Any) -> Any:
        return self._options[name].shown(value) if name in self._options else value


class DistinctSampler(RoundingSampler):
    """Sampler of a finite search that draws no settings twice, since the same job gives the same result.

    All options are drawn jointly: again if another trial has the same settings, and at random after :data:`DRAWS` draws.
    Two processes that draw at the same moment may draw the same.

    Args:
        sampler: Optuna's.
        searched: The options, each with its number of values.
        source: Source of random settings.
    """

    def __init__(self, sampler: Any, searched: Sequence[Searched], source: random.Random) -> None:
        super().__init__(sampler, searched)
        self._source = source
        self._inner_space = sampler.infer_relative_search_space
        self.infer_relative_search_space = self._space

    def _space(self, _study: Any, _trial: Any) -> dict[str, Any]:
        return {name: option.distribution for name, option in self._options.items()}

    def sample_relative(self, study: Any, trial: Any, space: Any) -> dict[str, Any]:
        """Settings that no other trial has, while any are left."""
        tried = self._tried(trial.number)
        total = combinations(list(self._options.values())) or 0
        own = self._inner_space(study, trial)
        for _ in range(DRAWS):
            drawn = super().sample_relative(study, trial, own)
            for name, distribution in space.items():
                if name not in drawn:
                    drawn[name] = self.sample_independent(study, trial, name, distribution)
            if len(tried) >= total or self._key(drawn) not in tried:
                return drawn
        while True:
            drawn = {
                name: option.at(self._source.randrange(option.count or 1))
                for name, option in self._options.items()
            }
            if self._key(drawn) not in tried:
                return drawn

    def _tried(self, number: int) -> set[tuple[Any, ...]]:
        """Settings of other trials, except those that failed for reasons unrelated to their settings."""
        fail = optuna().trial.TrialState.FAIL
        return {
            self._key(trial.params)
            # Not of the sampler's study, which under Hyperband has those of one bracket.
            for trial in self.study.get_trials(deepcopy=False)
            if trial.number != number and trial.state is not fail
            if set(self._options) <= set(trial.params)
        }

    def _key(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(option.shown(settings[name]) for name, option in self._options.items())


def pruner(name: Pruner, every: int, steps: int) -> Any:
    """Optuna's pruner.

    Args:
        name: Its name.
        every: Steps between evaluations.
        steps: Steps of the longest trial.
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
