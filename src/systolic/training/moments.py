"""Second moments of the inputs of a model's matrices over the first batches of a split, to fit quantized weights to."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError
from systolic.job import Job, Split
from systolic.job.model import Mean
from systolic.models.watching import watch
from systolic.steps.steps import StepFunctions
from systolic.training.feed import evaluation


def input_moments(
    job: Job,
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    split: Split,
    batches: int,
) -> dict[str, np.ndarray]:
    """The sum of x x^T over the inputs x of each matrix, by path; float32.

    Args:
        job: With the data to read.
        steps: Its programs.
        weights: Parameters and other variables.
        shapes: Path to [inputs, inputs], after the number of layers where matrices are stacked.
        split: Part of the data.
        batches: The first so many.

    Raises:
        DataError: the split is empty.
    """
    network = steps.network

    def loss(moments: Any, params: Any, rest: Any, batch: Any) -> jax.Array:
        module = network.module(network.cast(params), rest, train=False)
        watch(module, moments)
        found = job.task.terms(module, batch, False)["loss"]
        return jnp.sum(found.total if isinstance(found, Mean) else found).astype(jnp.float32)

    program = jax.jit(
        lambda total, *given: jax.tree.map(jnp.add, total, jax.grad(loss)(total, *given)),
        donate_argnums=0,
        compiler_options=steps.target.compiler_options,
    )
    total = {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}
    feed, read = evaluation(job, steps, split), 0
    try:
        for batch in itertools.islice(feed, batches):
            total = program(total, weights.params, weights.model_state, batch)
            read += 1
    finally:
        feed.close()
    if not read:
        raise DataError(f"the {split.value} split of {job.name} is empty; give other data")
    return {path: np.asarray(one) for path, one in jax.device_get(total).items()}
