"""Causes of poor learning, from a run's records alone."""

import math
import shlex
from typing import Any

from systolic.explaining import curve, layers
from systolic.explaining.cause import Cause
from systolic.explaining.settings import settings_of
from systolic.runs.record import RunRecord, State

EVERY = 50
"""Steps between probes in advice."""


def learning(history: RunRecord) -> list[Cause]:
    """Causes of poor learning, worst first; [] where the records show none."""
    curves, found = curve.causes(history), layers.causes(history)
    # What happens in the layers explains a curve, but not the length of the run.
    late = [cause for cause in curves if cause.name == "too-short"]
    return [*(cause for cause in curves if cause not in late), *found, *late]


def vitals(history: RunRecord) -> dict[str, Any]:
    """Figures of a run's learning to show even without a problem; ``None`` where unknown.

    ``update_ratio`` is the median ratio of updates to weights at the peak learning rate,
    ``noise_scale`` and ``batch`` are in examples, ``epochs`` are passes over the training data.
    """
    found = sorted(layers.ratios(history).values()) if history.diagnoses else []
    points = curve.validation(history)
    scale = layers.noise_scale(history) if history.diagnoses else None
    return {
        "update_ratio": found[len(found) // 2] if found else None,
        "noise_scale": scale if scale is None or math.isfinite(scale) else None,
        "batch": history.start.get("batch"),
        "epochs": history.epochs,
        "training_loss": history.loss_near(history.train_steps[-1]) if history.train else None,
        "validation_loss": points[-1][1] if points else None,
    }


def unknown(history: RunRecord, *, probed: bool = False) -> list[str]:
    """Questions that the records can't answer, and the command that would, in a line each.

    Args:
        history: The run.
        probed: A probe of its newest checkpoint was tried, so that explaining it again shows no more.
    """
    where = str(history.path)
    every = max(min(EVERY, (history.steps or history.step) // 4), 1)
    afresh = f"train a new run with --diagnose {every}"
    over = history.is_finished or history.state is State.stopped
    again = shlex.join(["systolic", "train", "--resume", where, "--diagnose", str(every)])
    probing = shlex.join(["systolic", "explain", where]) if not probed else afresh
    if not history.train:
        return ["the run has no record of a step, so nothing can be judged"]
    found = []
    if len(history.train) < curve.FEW:
        found.append(f"{len(history.train)} records are too few for a curve; train for more steps")
    if not history.diagnoses:
        found.append(
            f"gradients, updates and noise by layer were never probed; {probing if over else again}"
        )
    elif not layers.training(history):
        found.append(
            f"updates by layer were probed only where the learning rate has decayed; to probe before the end: {afresh if over else again}"
        )
    elif layers.noise_scale(history) is None:
        found.append(
            "the gradient noise scale needs gradients of batches of two sizes: --layout.accumulate 2, or at least 2 examples a device"
        )
    elif math.isinf(layers.noise_scale(history) or 0.0):
        found.append(
            "the gradient noise scale is far above the batch: noise hides the gradient in these probes"
        )
    if not curve.validation(history):
        found.append(
            f"overfitting can't be judged: the run has no evaluation of the validation split; {_evaluated(history)}"
        )
    if history.epochs is None:
        found.append("the run has no record of how often the data was read")
    return found


def _evaluated(history: RunRecord) -> str:
    """The change that gives a run evaluations of validation data, of which it has none so far."""
    settings = settings_of(history)
    steps = history.steps or history.step
    asked = settings.get("evaluation.every")
    if history.is_finished or (asked and history.step >= asked):
        # The end has one wherever there is such data.
        for name, value in (("validation", "DATA"), ("validation_share", 0.05)):
            if settings.has(name) and (more := settings.change(name, value=value)):
                return f"train with data for it, {more}"
        return "give the recipe validation data"
    return settings.change("evaluation.every", value=max(min(100, steps // 2), 1)) or "train on"
