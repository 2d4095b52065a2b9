"""Second moments or largest magnitudes of the inputs of a model's matrices, to fit quantized weights and activations to."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import Task
from systolic.job.data import MASK
from systolic.job.model import Mean
from systolic.models.quantized.activation_stats import counting, watch
from systolic.steps.step_functions import StepFunctions


def input_moments(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
) -> dict[str, np.ndarray]:
    """The sum of x x^T over the inputs x of each matrix, by path; float32, zeros where there is no batch.

    Args:
        steps: Programs of a job.
        weights: Parameters and other variables.
        shapes: Path to [inputs, inputs], after the number of layers where matrices are stacked.
        batches: Examples as the job's data has them; their padding does not count.
    """
    return watched(steps, weights, shapes, batches, jnp.add)


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
        batches: Examples as the job's data has them; their padding does not count.
    """
    return watched(steps, weights, shapes, batches, jnp.maximum)


def watched(
    steps: StepFunctions,
    weights: Any,
    shapes: Mapping[str, tuple[int, ...]],
    batches: Iterable[Mapping[str, Any]],
    join: Callable[[jax.Array, jax.Array], jax.Array],
) -> dict[str, np.ndarray]:
    """Statistics of several batches from :mod:`systolic.models.quantized.activation_stats`, joined; zeros without batches."""
    network, task = steps.network, steps.job.task

    def read(seen: Any, params: Any, rest: Any, batch: Any) -> jax.Array:
        module = network.module(network.cast(params), rest, train=False)
        watch(module, seen)
        with counting(_counted(batch)):
            return _sum_of_outputs(task, module, batch)

    program = jax.jit(
        lambda total, *arguments: jax.tree.map(join, total, jax.grad(read)(total, *arguments)),
        donate_argnums=0,
        compiler_options=steps.target.compiler_options,
    )
    total = {path: jnp.zeros(shape, jnp.float32) for path, shape in shapes.items()}
    for batch in batches:
        total = program(total, weights.params, weights.model_state, batch)
    return {path: np.asarray(statistic) for path, statistic in jax.device_get(total).items()}


def _counted(batch: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Masks of what is no padding, as :func:`~systolic.models.quantized.activation_stats.counting` takes them: of tokens, of predictions, and of examples."""
    size = jax.tree.leaves(batch)[0].shape[0]
    rows = batch[MASK] > 0 if MASK in batch else jnp.ones(size, bool)
    masks = []
    if "segments" in batch:
        masks.append(batch["segments"] > 0)
    elif "tokens" in batch and "targets" in batch:  # a prompt has no targets, but text after it
        masks.append(jax.lax.cummax((batch["targets"] >= 0).astype(jnp.int32), 1, reverse=True) > 0)
    if "places" in batch:
        masks.append(batch["labels"] >= 0)
    return [*(mask & rows[:, None] for mask in masks), rows]


def _sum_of_outputs(task: Task, module: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A number that all of a model's products lead to: the sum of what it predicts, or of the loss where that is nothing."""
    predictions = [output for output in task.outputs(module, batch).values() if _is_float(output)]
    if not predictions:
        loss = task.terms(module, batch, False)["loss"]
        predictions = [loss.total if isinstance(loss, Mean) else loss]
    return sum((jnp.sum(output, dtype=jnp.float32) for output in predictions), start=jnp.zeros(()))


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
