"""The tiny recipe for trials: with a checkpoint at the end alone, as each takes as long as its steps."""

from systolic.job import Checkpoints, Evaluation, Job
from tests.training import tiny


def job(
    steps: int = 16,
    batch: int = 16,
    learning_rate: float = 1e-2,
    scale: float = 1.0,
    width: int = 16,
    evaluation: Evaluation = Evaluation(every=8),  # noqa: B008
    checkpoints: Checkpoints = Checkpoints(every=16),  # noqa: B008
    spoil: tuple[int, ...] = (),
    factor: float = float("nan"),
    halt_at: int = 0,
) -> Job:
    """Sorts made-up numbers into three classes."""
    return tiny.job(
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        scale=scale,
        width=width,
        evaluation=evaluation,
        checkpoints=checkpoints,
        spoil=spoil,
        factor=factor,
        halt_at=halt_at,
    )
