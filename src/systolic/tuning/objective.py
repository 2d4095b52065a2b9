"""Objectives that trials are judged by: a validation metric of the recipe, or a cost of the trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from systolic.core.errors import OptionError, nearest
from systolic.job import Evaluation, Mode

COSTS: Mapping[str, str] = {
    "seconds": "time of a trial's steps",
    "dollars": "forecast price of a trial on --on",
    "parameters": "size of the model",
}
"""Objectives that are costs, not metrics, with what they measure."""


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
