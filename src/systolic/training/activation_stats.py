"""Second moments or largest magnitudes of the inputs of a model's matrices, to fit quantized weights and activations to."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError
from systolic.job import Job, Split, Task
from systolic.job.model import Mean
from systolic.models.quantized.activation_stats import watch
from systolic.steps.programs import evaluation
from systolic.steps.step_functions import StepFunctions


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
    with closing(evaluation(job, steps, split)) as feed:
        moments = watched(steps, weights, shapes, itertools.islice(feed, batches), jnp.add)
    if moments is None:
        raise DataError(f"the {split.value} split of {job.name} is empty; give other data")
    return moments


def largest_inputs(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
) -> dict[str, np.ndarray]:
    """The largest magnitude of each input of each matrix, by path; float32, zeros where there is no batch.

    Args:
        steps: Programs of a job.
        weights: Parameters and other variables.
        shapes: Path to [inputs], after the number of layers where matrices are stacked.
        batches: Examples as the job's data has them.
    """
    largest = watched(steps, weights, shapes, batches, jnp.maximum)
    return {path: np.zeros(shape) for path, shape in shapes.items()} if largest is None else largest


def watched(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, np.ndarray] | None:
    """Statistics of several batches from :mod:`systolic.models.quantized.activation_stats`, joined; ``None`` without batches."""
    network, task = steps.network, steps.job.task

    def read(seen: Any, params: Any, rest: Any, batch: Any) -> jax.Array:
        module = network.module(network.cast(params), rest, train=False)
        watch(module, seen)
        return _sum_of_outputs(task, module, batch)

    program = jax.jit(
        lambda total, *arguments: jax.tree.map(join, total, jax.grad(read)(total, *arguments)),
        donate_argnums=0,
        compiler_options=steps.target.compiler_options,
    )
    total = {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}
    count = 0
    for batch in batches:
        total = program(total, weights.params, weights.model_state, batch)
        count += 1
    if not count:
        return None
    return {path: np.asarray(statistic) for path, statistic in jax.device_get(total).items()}


def _sum_of_outputs(task: Task, module: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A number that all of a model's products lead to: the sum of what it predicts, or of the loss where that is nothing."""
    predictions = [output for output in task.outputs(module, batch).values() if _is_float(output)]
    if not predictions:
        loss = task.terms(module, batch, False)["loss"]
        predictions = [loss.total if isinstance(loss, Mean) else loss]
    return sum((jnp.sum(output, dtype=jnp.float32) for output in predictions), start=jnp.zeros(()))


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
