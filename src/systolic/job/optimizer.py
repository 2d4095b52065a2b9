"""Optimizers and learning rate schedules as values; :mod:`systolic.steps` turns them into Optax."""

import enum
from dataclasses import dataclass


class OptimizerKind(enum.Enum):
    """The update rule."""

    adamw = "adamw"
    sgd = "sgd"
    """SGD with Nesterov momentum ``b1``."""
    lion = "lion"
    adafactor = "adafactor"
    lamb = "lamb"
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
    """An update rule with its constants; ``None`` takes the rule's usual value."""

    kind: OptimizerKind = OptimizerKind.adamw
    learning_rate: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; vectors, biases and norms are never decayed."""
    b1: float | None = None
    """Decay of the first moment, or the momentum of sgd and muon."""
    b2: float | None = None
    """Decay of the second moment."""
    eps: float = 1e-8
    clip: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns it off."""
    adam_learning_rate: float | None = None
    """muon only: the peak rate of the parameters that AdamW updates."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights that evaluation uses; 0 keeps none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate over the steps of the job."""

    kind: ScheduleKind = ScheduleKind.cosine
    warmup: int = 0
    """Steps of linear warm-up from 0."""
    decay: float = 0.2
    """wsd: the share of the steps that decays."""
    final: float = 0.1
    """The last learning rate as a share of the peak."""
