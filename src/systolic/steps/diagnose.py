"""Gradient probe: gradients, weights and updates of a step by layer, and the noise of the gradient.

It computes the same as the train step on the same state and batch and returns only figures, so
that a run with probes is bit for bit the run without.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from systolic.job import Stored
from systolic.job.model import Mean
from systolic.steps.state import TrainState
from systolic.steps.steps import Batch, StepFunctions

STACKED = "layers"
"""Logical name of the first dim of a parameter that stacks the layers."""

PARTS = (4, 2, 3)
"""Preferred numbers of parts of a batch for the noise of the gradient, best first."""

Figures = dict[str, Any]


def num_parts(steps: StepFunctions) -> int:
    """Number of parts of a batch with gradients of their own: the job's passes, or a divisor of the batch; 1 for none."""
    passes = steps.job.layout.accumulate
    if passes > 1:
        return passes
    each = steps.batch_size // steps.job.layout.batch_ways
    return next((count for count in PARTS if each % count == 0), 1)


def jit_diagnose(steps: StepFunctions) -> Any:
    """:func:`diagnose`, jitted: (state, batch) -> figures, whole on every device."""
    # It runs once in hundreds of steps, and on a CPU LLVM's optimisation takes longer than it saves.
    options = steps.target.compiler_options
    if steps.target.platform == "cpu":
        options = {"xla_backend_optimization_level": "1"}
    return jax.jit(
        lambda state, batch: diagnose(steps, state, batch),
        in_shardings=(steps.shardings, steps.batch_shardings),
        out_shardings=steps.target.sharding(PartitionSpec()),
        compiler_options=options,
    )


def diagnose(steps: StepFunctions, state: TrainState, batch: Batch) -> Figures:
    """Figures of the step that would be made on ``batch``.

    Returns:
        ``loss``, ``learning_rate``, ``big_square`` and ``small_square`` f32[]: the squared norm of the
        batch's mean gradient, and the mean over the parts of theirs (NaN where there is one part).
        ``parameters``: path to ``gradient``, ``weight``, ``update`` (2-norms) and ``lost`` (the share
        of the weights with an update that rounding cancels), f32[] each, or f32[layers] for a stacked
        parameter. Gradients are those before clipping.
    """
    count = num_parts(steps)
    gradients, loss, small = _gradients(steps, state, batch, count)
    big = optax.tree.norm(gradients, squared=True)
    clipped = gradients
    if steps.job.optimizer.clip:
        shrink = jnp.minimum(1.0, steps.job.optimizer.clip / jnp.maximum(jnp.sqrt(big), 1e-9))
        clipped = jax.tree.map(lambda g: g * shrink, gradients)
    moved, _ = steps.updates(clipped, state)
    found = {
        path: _of_parameter(
            gradients[path],
            # Stochastic rounding loses no update on average, so the weights count as float32.
            weight if steps.job.dtypes.parameters is Stored.f32 else weight.astype(jnp.float32),
            moved[path],
            stacked=is_stacked(steps.network.axes[path]),
        )
        for path, weight in state.params.items()
    }
    return {
        "loss": loss,
        "learning_rate": steps.learning_rate(state),
        "big_square": big,
        "small_square": small if count > 1 else jnp.asarray(jnp.nan, jnp.float32),
        "parameters": found,
    }


def is_stacked(axes: tuple[str | None, ...] | None) -> bool:
    """Whether a parameter holds one array for each layer along its first dim."""
    return bool(axes) and axes[0] == STACKED


def _gradients(
    steps: StepFunctions, state: TrainState, batch: Batch, count: int
) -> tuple[Figures, jax.Array, jax.Array]:
    """The batch's mean gradient in float32, its mean loss, the mean squared norm of its parts' gradients."""
    scale = steps.loss_scale(state)

    def loss(params: Any, model_state: Any, part: Batch) -> tuple[jax.Array, Any]:
        sums, model_state = steps.sums(params, model_state, part, train=True)
        return sums["loss"].total * scale, (sums["loss"], model_state)

    def one(carry: Any, part: Batch) -> tuple[Any, jax.Array]:
        total, model_state, mean = carry
        gradients, (more, model_state) = jax.grad(loss, has_aux=True)(
            state.params, model_state, part
        )
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        square = optax.tree.norm(gradients, squared=True)
        square /= (jnp.maximum(more.weight, 1e-9) * scale) ** 2
        return (
            jax.tree.map(jnp.add, total, gradients),
            model_state,
            jax.tree.map(lambda m, a: m + a.astype(jnp.float32), mean, more),
        ), square

    parts = steps.parts(batch, count)
    nothing = jnp.zeros((), jnp.float32)
    zeros = Mean(total=nothing, weight=nothing)
    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
    (total, _, mean), squares = jax.lax.scan(one, (total, state.model_state, zeros), parts)
    weight = jnp.maximum(mean.weight, 1e-9)
    return (
        jax.tree.map(lambda g: g / (weight * scale), total),
        mean.total / weight,
        jnp.mean(squares),
    )


def _of_parameter(
    gradient: jax.Array, weight: jax.Array, update: jax.Array, *, stacked: bool
) -> dict[str, jax.Array]:
    dims = tuple(range(int(stacked), weight.ndim))

    def norm(array: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(array.astype(jnp.float32)), axis=dims))

    moves = update != 0
    kind = jnp.finfo(weight.dtype)
    wide = weight.astype(jnp.float32)
    # Explicit rounding, since XLA may drop a cast to bf16 and back.
    after = jax.lax.reduce_precision(wide + update.astype(jnp.float32), kind.nexp, kind.nmant)
    lost = jnp.sum((moves & (after == wide)).astype(jnp.float32), axis=dims)
    return {
        "gradient": norm(gradient),
        "weight": norm(weight),
        "update": norm(update),
        "lost": lost / jnp.maximum(jnp.sum(moves.astype(jnp.float32), axis=dims), 1.0),
    }
