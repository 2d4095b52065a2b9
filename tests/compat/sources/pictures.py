"""A recipe in a file of its own: a small network of the package on scikit-learn's digits."""

from dataclasses import replace

from systolic.job import Checkpoints, Evaluation, Job, Mode, Optimizer
from systolic.models.vision.config import CNN, Pixels
from systolic.recipes.digits import digits

NETWORK = CNN(channels=(4,), pixels=Pixels(size=8, channels=1, mean=(0.305,), std=(0.376,)))
OPTIMIZER = Optimizer(learning_rate=0.01)


def job(steps: int = 4, optimizer: Optimizer = OPTIMIZER) -> Job:
    """Reads digits with few weights."""
    plain = digits(
        steps=steps,
        batch=32,
        evaluation=Evaluation(every=4, batches=1, metric="accuracy", mode=Mode.max),
        checkpoints=Checkpoints(every=4, keep_last=1),
    )
    return replace(plain, model=NETWORK, optimizer=optimizer)
