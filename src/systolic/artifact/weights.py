"""The weights of a run, without its optimizer."""

from dataclasses import dataclass
from typing import Any

from systolic.artifact.access import Access
from systolic.artifact.checkpoint import CheckpointStore
from systolic.artifact.run import Run
from systolic.core.errors import NotFoundError, OptionError
from systolic.steps.steps import Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What evaluation and generation need."""

    step: int
    params: dict[str, Any]
    """The moving average where the job keeps one, else the weights."""
    rest: dict[str, Any]
    skipped: list[str]
    """Damaged checkpoints that were passed over, a line each."""


def load(run: Run, steps: Steps, which: str = "best") -> Weights:
    """Reads a checkpoint's weights onto the mesh of ``steps``.

    Args:
        run: The run.
        steps: The programs of its job on any mesh.
        which: ``best`` (the newest where none was ranked), ``last`` or a step's number.

    Raises:
        NotFoundError: no such checkpoint.
        RunError: none of them is intact.
    """
    evaluation = steps.job.evaluation
    with CheckpointStore(
        run.checkpoints, metric=evaluation.metric, mode=evaluation.mode, access=Access.read
    ) as store:
        if store.latest_step() is None:
            raise NotFoundError(
                f"{run.path} has no checkpoint yet; train it with systolic train --resume {run.path}"
            )
        if which == "best":
            step: int | str | None = "best" if store.best_step() is not None else None
        elif which == "last":
            step = None
        elif which.isdigit():
            step = int(which)
        else:
            raise OptionError(
                f"checkpoint {which!r} is neither best, last nor the number of a step; {run.path} has {', '.join(map(str, store.steps()))}"
            )
        averaged = steps.shapes.ema is not None
        only = ("ema", "rest") if averaged else ("params", "rest")
        restored = store.restore(steps.abstract_state, step=step, only=only)
        return Weights(
            step=restored.step,
            params=restored.state.ema if averaged else restored.state.params,
            rest=restored.state.rest,
            skipped=[
                f"checkpoint {step} is damaged ({reason})" for step, reason in restored.skipped
            ],
        )
