"""Scores of targets under logits, with as few passes over the logits as possible."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from systolic.models.layers import name


class Scores(NamedTuple):
    """Scores of targets, f32[...] each."""

    nats: jax.Array
    """Cross-entropy of the target."""
    normaliser: jax.Array
    """Logarithm of the sum of the exponentials."""
    best: jax.Array
    """1 where the target is the most likely token (the first of equals)."""
    mean: jax.Array | None = None
    """Mean logit, from :func:`with_mean`."""


def cross_entropy(logits: jax.Array, targets: jax.Array) -> Scores:
    """Scores of targets int32[...] under logits [..., vocab] of any float dtype, in float32.

    The scores of a target of -1 are meaningless and must be masked by the caller. The target's logit
    comes from a masked sum and ``best`` from maxima: they need no extra pass, and a vocabulary split
    over devices needs no gather of the logits.
    """
    wide = logits.astype(jnp.float32)
    ids = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    picked = jnp.sum(jnp.where(ids == targets[..., None], wide, 0.0), axis=-1)
    normaliser = log_normaliser(wide)
    fixed = jax.lax.stop_gradient(wide)
    before = jnp.max(jnp.where(ids < targets[..., None], fixed, -jnp.inf), axis=-1)
    best = (picked >= jnp.max(fixed, axis=-1)) & (picked > before)
    return Scores(nats=normaliser - picked, normaliser=normaliser, best=best.astype(jnp.float32))


def with_mean(logits: jax.Array, targets: jax.Array) -> Scores:
    """:func:`cross_entropy`, and the mean logit."""
    mean = jnp.mean(logits.astype(jnp.float32), axis=-1)
    return cross_entropy(logits, targets)._replace(mean=mean)


@jax.custom_jvp
def log_normaliser(logits: jax.Array) -> jax.Array:
    """logsumexp over the last dim.

    Its derivative uses only the logits and the result. A backward pass that kept the result, named
    ``normaliser``, thus reads recomputed logits once, without maximum and sum.
    """
    return jax.nn.logsumexp(logits, axis=-1)


@log_normaliser.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (logits,), (moved,) = primals, tangents
    normaliser = name(log_normaliser(logits), "normaliser")
    return normaliser, jnp.sum(jnp.exp(logits - normaliser[..., None]) * moved, axis=-1)
