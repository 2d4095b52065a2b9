"""Objectives that trials are judged by: a validation metric of the recipe, or a cost of the trial; and the importance of options for them."""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.core.errors import OptionError, nearest
from systolic.job import Evaluation, Mode
from systolic.tuning.search import Searched, combinations, optuna, settled

COSTS: Mapping[str, str] = {
    "seconds": "time of a trial's steps",
    "dollars": "forecast price of a trial on --on",
    "parameters": "size of the model",
}
"""Objectives that are costs, not metrics, with what they measure."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Aim:
    """An objective: a figure of a trial to minimise or maximise."""

    name: str
    mode: Mode

    @property
    def is_cost(self) -> bool:
        """Whether it is one of :data:`COSTS`."""
        return self.name in COSTS

    @property
    def text(self) -> str:
        """``max:accuracy``."""
        return f"{self.mode.value}:{self.name}"

    @property
    def direction(self) -> str:
        """Optuna's name of the direction."""
        return "minimize" if self.mode is Mode.min else "maximize"

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another."""
        return value < than if self.mode is Mode.min else value > than

    def of(
        self, summary: Mapping[str, Any], *, dollars: float | None, parameters: int | None
    ) -> float | None:
        """The objective's value in a trial; None if the trial has none.

        Args:
            summary: Summary of the trial's run.
            dollars: Price of its steps.
            parameters: Size of its model.
        """
        if self.name == "seconds":
            return float(summary["time"]["step"])
        if self.name == "dollars":
            return dollars
        if self.name == "parameters":
            return parameters
        value = summary["final"]["metrics"].get(f"validation_{self.name}")
        return None if value is None else float(value)


def parse(texts: Sequence[str], evaluation: Evaluation, *, priced: bool) -> tuple[Aim, ...]:
    """Parses ``--objective``; the default is the recipe's own metric.

    Metrics come before costs, in whichever order they are given, so that the best trial is not just the cheapest. Whether
    the task reports the metrics is checked later, see :func:`check_reported`.

    Args:
        texts: Metrics or costs, with ``min:`` or ``max:`` where the recipe does not define the direction.
        evaluation: The recipe's evaluation, with its metric and direction.
        priced: Whether a slice is given, so that dollars are known.

    Raises:
        OptionError: a name is given twice, all are costs, a direction is unknown, or dollars are given without a slice.
    """
    aims: dict[str, Aim] = {}
    for text in texts or (evaluation.metric,):
        direction, colon, name = text.rpartition(":")
        if name in aims:
            raise OptionError(f"--objective names {name} twice; give it once")
        if name == "dollars" and not priced:
            raise OptionError("--objective dollars needs a slice; add --on v5e-4")
        aims[name] = Aim(
            name=name, mode=_mode(text, direction if colon else None, name, evaluation)
        )
    if all(aim.is_cost for aim in aims.values()):
        costs = " and ".join(aims)
        warning = f"minimising {costs} alone picks the smallest model"
        if any(aim.mode is Mode.max for aim in aims.values()):
            warning = f"{costs} alone says nothing about the trained model"
        raise OptionError(f"--objective: {warning}; add --objective {evaluation.metric}")
    return tuple(sorted(aims.values(), key=lambda aim: aim.is_cost))


def check_reported(aims: Sequence[Aim], reported: Sequence[str]) -> None:
    """Checks that the task reports the metrics that trials are judged by.

    Raises:
        OptionError: a metric is not reported; the message lists those that are.
    """
    for aim in aims:
        if not aim.is_cost and aim.name not in reported:
            known = [*reported, *COSTS]
            raise OptionError(
                f"--objective is {aim.name!r}, which the recipe does not report{nearest(aim.name, known)}; it takes {', '.join(known)}"
            )


def _mode(text: str, direction: str | None, name: str, evaluation: Evaluation) -> Mode:
    if direction is not None:
        if direction not in ("min", "max"):
            raise OptionError(f"--objective is {text!r}; it takes min:{name} or max:{name}")
        return Mode(direction)
    if name == evaluation.metric:
        return evaluation.mode
    if name in COSTS or name == "loss":
        return Mode.min
    known = list(dict.fromkeys([evaluation.metric, "loss", *COSTS]))
    raise OptionError(
        f"--objective {name} has no direction{nearest(name, known)}; give min:{name} or max:{name}, or one of {', '.join(known)}"
    )


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
