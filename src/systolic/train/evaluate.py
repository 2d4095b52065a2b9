"""The task's metrics over a split."""

import itertools
from collections.abc import Callable
from typing import Any

import jax

from systolic.core.errors import DataError
from systolic.job import Job, Split
from systolic.steps.steps import Steps
from systolic.train.feed import evaluation


class HaltedError(Exception):
    """An evaluation that was asked to end early."""


def never() -> bool:
    """Goes on to the end."""
    return False


def evaluate(
    job: Job,
    steps: Steps,
    program: Any,
    params: Any,
    rest: Any,
    split: Split,
    batches: int = 0,
    halt: Callable[[], bool] = never,
) -> dict[str, float]:
    """Means over a split, weighted exactly (by token or example), name to value.

    Args:
        job: What is evaluated.
        steps: Its programs.
        program: ``steps.evaluate``, jitted or compiled.
        params: Weights.
        rest: Other variables.
        split: Which part of the data.
        batches: Reads only the first so many batches; 0 reads all.
        halt: Asked before each batch whether to give up.

    Raises:
        DataError: the split is empty.
        HaltedError: ``halt`` said so.
    """
    feed = evaluation(job, steps, split)
    total: Any = None
    try:
        for batch in itertools.islice(feed, batches or None):
            if halt():
                raise HaltedError
            sums = program(params, rest, batch)
            total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    finally:
        feed.close()
    if total is None:
        raise DataError(
            f"the {split.value} split of {job.name} is empty; give the recipe data for it"
        )
    return {
        name: float(mean.total) / max(float(mean.weight), 1e-9)
        for name, mean in jax.device_get(total).items()
    }
