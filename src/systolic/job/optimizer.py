"""Optimizers and learning rate schedules as values; :mod:`systolic.steps` builds them with Optax."""

import enum
from dataclasses import dataclass, fields, replace
from typing import Annotated

from systolic.core.arguments import Alternative
from systolic.core.errors import OptionError
from systolic.core.ranges import NOT_NEGATIVE, POSITIVE, SHARE, Range, check


class OptimizerKind(enum.Enum):
    """The update rule."""

    adamw = "adamw"
    sgd = "sgd"
    """SGD with Nesterov momentum ``b1``."""
    lion = "lion"
    adafactor = "adafactor"
    lamb = "lamb"
    """AdamW with each matrix's update scaled to the matrix's norm (You et al. 2020); vectors keep theirs."""
    lars = "lars"
    """SGD with momentum ``b1``, each matrix's gradient scaled to a thousandth of the matrix's norm (You et al. 2017)."""
    muon = "muon"
    """Orthogonalised momentum for matrices, AdamW for embeddings, heads, norms and biases."""


class ScheduleKind(enum.Enum):
    """The shape of the learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"
    """Warm-up, stable, decay: constant until the last ``decay`` share of the steps, then linear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """An update rule with its constants; ``None`` takes the rule's default.

    Raises:
        OptionError: a constant outside its range.
    """

    kind: OptimizerKind = OptimizerKind.adamw
    learning_rate: Annotated[float, POSITIVE] = 3e-4
    """Peak learning rate."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decay of matrices, apart from the gradient; sgd and lars add it to the gradient, lamb to the update that it scales. Vectors, biases and norms are never decayed."""
    b1: Annotated[float | None, SHARE] = None
    """Decay of the first moment, or momentum of sgd and muon."""
    b2: Annotated[float | None, SHARE] = None
    """Decay of the second moment."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Term added to the denominator of the update."""
    clip: Annotated[float, NOT_NEGATIVE] = 1.0
    """Global gradient norm to clip to; 0 does not clip."""
    adam_learning_rate: Annotated[float | None, POSITIVE] = None
    """muon only: peak learning rate of the parameters that AdamW updates."""
    ema: Annotated[float, SHARE] = 0.0
    """Decay of the exponential moving average of the weights that evaluation uses; 0 keeps none."""

    def __post_init__(self) -> None:
        check(self, "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChange:
    """Changes to a recipe's own optimizer, which may depend on the model; ``None`` keeps a field.

    The fields are those of :class:`Optimizer`, which checks the values.
    """

    kind: OptimizerKind | None = None
    """The update rule. A rule other than the recipe's brings its own default constants."""
    learning_rate: float | None = None
    """Peak learning rate."""
    weight_decay: float | None = None
    """Decay of matrices, apart from the gradient; sgd and lars add it to the gradient, lamb to the update that it scales. Vectors, biases and norms are never decayed."""
    b1: float | None = None
    """Decay of the first moment, or momentum of sgd and muon."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """Term added to the denominator of the update."""
    clip: float | None = None
    """Global gradient norm to clip to; 0 does not clip."""
    adam_learning_rate: float | None = None
    """muon only: peak learning rate of the parameters that AdamW updates."""
    ema: float | None = None
    """Decay of the exponential moving average of the weights that evaluation uses; 0 keeps none."""

    def __post_init__(self) -> None:
        check(self, "optimizer")

    def of(self, own: Optimizer, *others: Optimizer) -> Optimizer:
        """The optimizer with these changes.

        Args:
            own: The recipe's, for its model.
            others: Optimizers of the recipe for other rules; if the rule is changed to one of
                them, its constants are the defaults.

        Raises:
            OptionError: a constant outside its range.
        """
        known = {optimizer.kind: optimizer for optimizer in (*others, own)}
        kind = self.kind or own.kind
        changed = {
            name: value for name in self.__slots__ if (value := getattr(self, name)) is not None
        }
        return replace(known.get(kind) or Optimizer(kind=kind), **changed)


def change_of(rule: Optimizer) -> OptimizerChange:
    """All of an optimizer as a change, which a run that resumes reads back."""
    return OptimizerChange(**{field.name: getattr(rule, field.name) for field in fields(rule)})


ChangedOptimizer = Annotated[OptimizerChange, Alternative(Optimizer, change_of)]
"""Change of a recipe's own optimizer, or from Python another optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate over the steps of the job.

    Raises:
        OptionError: a value outside its range.
    """

    kind: ScheduleKind = ScheduleKind.cosine
    warmup: Annotated[int, NOT_NEGATIVE] = 0
    """Steps of linear warm-up."""
    decay: Annotated[float, Range(above=0, most=1)] = 0.2
    """wsd: share of the steps that decay."""
    final: Annotated[float, Range(least=0, most=1)] = 0.1
    """Final learning rate as a share of the peak."""

    def __post_init__(self) -> None:
        check(self, "schedule")

    def warms(self, steps: int) -> int:
        """Steps of warm-up in a job of ``steps``; the last step at least has the peak."""
        return min(self.warmup, steps - 1)

    def note(self, steps: int) -> str | None:
        """Note on how a job of ``steps`` departs from the schedule; ``None`` if it does not."""
        del steps
        return None

    def check_steps(self, steps: int) -> None:
        """Checks that the warm-up ends before the job does.

        Raises:
            OptionError: it does not.
        """
        if self.warmup and self.warmup >= steps:
            raise OptionError(
                f"schedule.warmup is {self.warmup} and the job has {steps} steps; it must be less than the steps, {_tenth(steps)} for example"
            )

    def shortened(self, own: "Schedule", steps: int) -> "Schedule":
        """Schedule for a short run: the recipe's ``own`` warm-up takes at most a tenth of ``steps``; a typed one is kept."""
        if self.warmup != own.warmup or self.warmup <= _tenth(steps):
            return self
        return Shortened(
            kind=self.kind,
            warmup=_tenth(steps),
            decay=self.decay,
            final=self.final,
            own=self.warmup,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortened(Schedule):
    """A recipe's schedule with its warm-up shortened for a short run, so that the learning rate still decays."""

    own: Annotated[int, NOT_NEGATIVE]
    """Steps of warm-up before it was shortened."""

    def note(self, steps: int) -> str | None:
        """See :meth:`Schedule.note`."""
        return f"schedule.warmup is {self.own} by default and the job has {steps} steps, so it is shortened to {self.warmup}, a tenth of them; give another --schedule.warmup, or more --steps"


def _tenth(steps: int) -> int:
    """A tenth of the steps, at least 1 if another step follows."""
    return min(max(steps // 10, 1), max(steps - 1, 0))
