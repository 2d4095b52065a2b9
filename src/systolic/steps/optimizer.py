"""Optax transformations of optimizer and schedule values."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from systolic.job import Optimizer, OptimizerKind, Schedule, ScheduleKind
from systolic.steps.state import UpdateRates

STACKED = ("layers", "experts", "stages")
"""Logical dims that stack copies of a matrix."""

SCHEDULED = optax.ScaleByScheduleState
"""Field of every rule's state that counts updates for the learning rate."""

LARS = 0.001
"""The trust coefficient of LARS (You et al. 2017)."""

Axes = Mapping[str, tuple[str | None, ...]]
"""Parameter name to the logical names of its dims; unnamed dims are ``None``."""


def schedule(value: Schedule, steps: int, peak: Any) -> Callable[[Any], Any]:
    """Step (counted from 0) to learning rate f32[]."""
    warmup = value.warms(steps)
    body = max(steps - warmup, 1)
    end = peak * value.final
    match value.kind:
        case ScheduleKind.constant:
            after = optax.constant_schedule(peak)
        case ScheduleKind.cosine:
            after = optax.cosine_decay_schedule(peak, body, alpha=value.final)
        case ScheduleKind.linear:
            after = optax.linear_schedule(peak, end, body)
        case ScheduleKind.wsd:
            decay = max(round(steps * value.decay), 1)
            stable = max(body - decay, 0)
            after = optax.join_schedules(
                [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [stable]
            )
    if not warmup:
        return after
    # The first step has 1/warmup of the peak, not 0, so that it moves the weights.
    rise = optax.linear_schedule(peak / warmup, peak, warmup - 1 if warmup > 1 else 1)
    return optax.join_schedules([rise, after], [warmup])


def num_updates(state: Any) -> Any:
    """Number of updates made by an optimizer state of :func:`build`, int32[]: its schedule's next step.

    Train steps whose update was dropped don't count.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, SCHEDULED))
    return next(node.count for node in nodes if isinstance(node, SCHEDULED))


def own_dims(axes: tuple[str | None, ...]) -> list[int]:
    """Dims of a parameter's own matrix, without those that stack copies of it."""
    return [dim for dim, name in enumerate(axes) if name not in STACKED]


def is_matrix(axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter is a matrix or a kernel (decayed), not a bias, a norm or another vector."""
    return len(own_dims(axes)) >= 2


def build(
    value: Optimizer,
    learning_rate: Callable[[Any], Any],
    axes: Axes,
    factors: Mapping[str, float] | None = None,
    rates: UpdateRates | None = None,
) -> optax.GradientTransformation:
    """The update rule over a flat dict of parameters; gradients arrive clipped.

    ``rates`` may be traced arrays; by default they are the optimizer's own numbers. What its state is made of
    depends on the optimizer alone.

    ``factors`` scale the updates of parameters, see :meth:`systolic.job.Model.update_factor`. Weight decay is added
    afterwards and is not scaled, except with muon.
    """
    sized, rates = scaled_updates(factors or {}), rates or UpdateRates.of(value)
    matrices = {name: is_matrix(dims) for name, dims in axes.items()}
    b1 = value.b1 if value.b1 is not None else {OptimizerKind.muon: 0.95}.get(value.kind, 0.9)
    b2 = (
        value.b2
        if value.b2 is not None
        else {OptimizerKind.lion: 0.99, OptimizerKind.adamw: 0.95, OptimizerKind.muon: 0.95}.get(
            value.kind, 0.999
        )
    )
    decay = (
        optax.add_decayed_weights(rates.weight_decay, mask=matrices)
        if value.weight_decay
        else optax.identity()
    )
    descend = optax.scale_by_learning_rate(learning_rate)
    match value.kind:
        case OptimizerKind.adamw:
            return optax.chain(optax.scale_by_adam(b1, b2, value.eps), *sized, decay, descend)
        case OptimizerKind.sgd:
            return optax.chain(decay, optax.trace(b1, nesterov=True), descend)
        case OptimizerKind.lion:
            return optax.chain(optax.scale_by_lion(b1, b2), *sized, decay, descend)
        case OptimizerKind.lamb:
            return optax.chain(
                optax.scale_by_adam(b1, b2, 1e-6), decay, scale_to_norms(axes, 1.0), descend
            )
        case OptimizerKind.lars:
            # The momentum includes the rate, so that a new rate does not rescale past gradients.
            return optax.chain(decay, scale_to_norms(axes, LARS), descend, optax.trace(b1))
        case OptimizerKind.adafactor:
            return optax.chain(
                optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), *sized, decay, descend
            )
        case OptimizerKind.muon:
            update_rule = _muon(value, (b1, b2), learning_rate, axes, rates)
            return optax.chain(update_rule, *sized) if sized else update_rule


def scaled_updates(factors: Mapping[str, float]) -> list[optax.GradientTransformation]:
    """Multiplies updates by the factors of their parameters; empty if all are 1, so that the state is the plain rule's."""
    if all(factor == 1 for factor in factors.values()):
        return []

    def apply(updates: Any, params: Any) -> Any:
        del params
        return {name: update * factors[name] for name, update in updates.items()}

    return [optax.stateless(apply)]


def scale_to_norms(axes: Axes, share: float) -> optax.GradientTransformation:
    """Scales each matrix's update by ``share`` x the norm of the matrix / the norm of the update.

    The norms are of each layer's own matrix where a parameter stacks several. Biases, norms and other
    vectors keep their update, as in the reference code of LARS and LAMB, and so do zeros.
    """

    def scaled(name: str, update: jax.Array, parameter: jax.Array) -> jax.Array:
        if not is_matrix(axes[name]):
            return update
        dims = tuple(own_dims(axes[name]))

        def norm(array: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum(jnp.square(array), axis=dims, keepdims=True))

        has, moves = norm(parameter), norm(update)
        known = (has > 0) & (moves > 0)
        return update * jnp.where(known, share * has / jnp.where(known, moves, 1.0), 1.0)

    def apply(updates: Any, params: Any) -> Any:
        return {name: scaled(name, update, params[name]) for name, update in updates.items()}

    return optax.stateless(apply)


def _muon(
    value: Optimizer,
    betas: tuple[float, float],
    learning_rate: Callable[[Any], Any],
    axes: Axes,
    rates: UpdateRates,
) -> optax.GradientTransformation:
    """Muon for hidden matrices, undecayed AdamW for embeddings, heads and vectors (Jordan 2024)."""
    return optax.contrib.muon(
        learning_rate,
        beta=betas[0],
        eps=value.eps,
        weight_decay=rates.weight_decay if value.weight_decay else 0.0,
        adam_b2=betas[1],
        adam_learning_rate=lambda step: learning_rate(step) * rates.adam_share,
        muon_weight_dimension_numbers={name: _muon_dims(dims) for name, dims in axes.items()},
    )


def _muon_dims(axes: tuple[str | None, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output dims of a hidden matrix; ``None`` for a parameter that AdamW updates."""
    own = own_dims(axes)
    if len(own) < 2 or "vocab" in axes:
        return None
    if axes[own[0]] in ("embed", "expert_embed"):
        return optax.contrib.MuonDimensionNumbers(
            reduction_axis=(own[0],), output_axis=tuple(own[1:])
        )
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(own[:-1]), output_axis=(own[-1],)
    )
