"""A search as it is asked for, by the command or from Python: checked together and made a :class:`Tuning`."""

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from systolic.chips import slice
from systolic.core.errors import OptionError
from systolic.core.ranges import dashed
from systolic.planning.objective import PriceTerm
from systolic.recipes import Recipe
from systolic.tuning import objective, sampling
from systolic.tuning.definition import Tuning
from systolic.tuning.option_values import reader
from systolic.tuning.sampling import Pruner, Sampler
from systolic.tuning.search import parse

TRIALS = 20


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """Settings of a search as given; the options of ``systolic tune`` describe them."""

    search: Sequence[str]
    trials: int | None = None
    sampler: Sampler = Sampler.tpe
    pruner: Pruner | None = None
    objective: Sequence[str] = ()
    trial_steps: int | None = None
    study: Path | None = None
    storage: str | None = None
    repeats: int = 0
    stale_after: int = 120
    sampler_seed: int = 0
    on: str | None = None
    quick: bool = False
    budget: float | None = None
    price: PriceTerm = PriceTerm.on_demand

    def tuning(self, recipe: Recipe, options: Mapping[str, Any], given: Collection[str]) -> Tuning:
        """The search over a recipe; writes nothing.

        Args:
            recipe: The recipe.
            options: All of its arguments.
            given: Names of the options that the user gave, as typed without dashes before them.

        Raises:
            OptionError: an option is unknown, of another type, or without effect.
            TakenError: the folder has files and is no study.
            MissingExtraError: Optuna is not installed.
        """
        self._check_forecast()
        searched = parse(self.search, reader(recipe))
        self._check_given(recipe, options, given, [one.name for one in searched])
        rule = recipe(options).evaluation
        aims = objective.parse(self.objective, rule, priced=self.on is not None)
        size = sampling.check(self.sampler, searched, len(aims))
        usual = TRIALS if self.sampler is not Sampler.grid or size is None else size
        made = Tuning(
            recipe=recipe,
            options=options,
            searched=searched,
            aims=aims,
            folder=self.study or Path(),
            storage=self.storage,
            trials=min(self.trials or usual, size or sys.maxsize),
            sampler=self.sampler,
            seed=self.sampler_seed,
            steps=self.trial_steps,
            on=self.on,
            quick=self.quick,
            price=self.price,
            budget_usd=self.budget,
            stale_seconds=self.stale_after,
        )
        return made.settled(self.pruner, named=self.study is not None)

    def limit(self, tuning: Tuning) -> str:
        """Line for a search that has fewer settings than trials are asked for; empty otherwise."""
        if self.trials is None or self.trials <= tuning.trials:
            return ""
        return f"--trials is {self.trials}, and the search has {tuning.trials} distinct settings; each is trained once"

    def _check_given(
        self,
        recipe: Recipe,
        options: Mapping[str, Any],
        given: Collection[str],
        names: Sequence[str],
    ) -> None:
        for name in names:
            if name in given:
                raise OptionError(f"--{name} is both given and searched; leave one out")
        if self.repeats and "seed" not in options:
            raise OptionError(
                f"--repeats needs an option seed, which {recipe.target} does not have; add it to the recipe, or leave --repeats out"
            )
        if self.repeats and "seed" in names:
            raise OptionError("--repeats sets the seed, which is also searched; leave one out")
        if "steps" in names and self.trial_steps is not None:
            raise OptionError("--trial-steps is given and steps is searched; leave one out")
        if self.trial_steps is not None and "steps" not in {
            dashed(name) for name in inspect.signature(recipe.function).parameters
        }:
            raise OptionError(
                f"--trial-steps needs an option steps, which {recipe.target} does not have; leave --trial-steps out"
            )

    def _check_forecast(self) -> None:
        """Refuses forecast options without a slice."""
        given = {
            "--quick": self.quick,
            "--budget": self.budget is not None,
            "--price": self.price is not PriceTerm.on_demand,
        }
        for name, is_given in given.items():
            if is_given and self.on is None:
                raise OptionError(f"{name} needs a forecast, and no slice is given; add --on v5e-4")
        if self.on is not None:
            slice(self.on)
