"""The router of a mixture: which experts a token visits, with which weight, and how evenly."""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.models.decoder.options import Router, Score

LEAST = 1e-20
"""Added to the sum of sigmoid scores before it divides (DeepSeek-V3's published code)."""


class RouterBias(nnx.Variable):
    """Bias of each expert, f32[experts]; not a parameter, since no gradient moves it."""


def choose(
    router: Router, each: int, logits: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the best ``each`` experts of tokens.

    Args:
        router: The switches.
        each: Experts a token.
        logits: f32[..., experts].
        bias: f32[experts], which counts for the choice only; None for none.

    Returns:
        All scores f32[..., experts], the weights f32[..., each] of the chosen, and their numbers
        int32[..., each], the best first.
    """
    sigmoid = router.score is Score.sigmoid
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    ranked = scores if bias is None else scores + bias
    if router.top_groups < router.groups:
        ranked = _of_best_groups(router, ranked)
    weights, chosen = jax.lax.top_k(ranked, each)
    if ranked is not scores:
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.normalise:
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total + LEAST if sigmoid else total)
    if router.scale != 1:
        weights = weights * router.scale
    return scores, weights, chosen


def _of_best_groups(router: Router, ranked: jax.Array) -> jax.Array:
    """``ranked`` f32[..., experts], minus infinity outside of each token's best groups."""
    grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    if router.score is Score.sigmoid:
        rank = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    else:
        rank = grouped.max(axis=-1)
    best = jax.lax.top_k(rank, router.top_groups)[1]
    kept = jax.nn.one_hot(best, router.groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def routed_as(router: Router, scores: jax.Array, chosen: jax.Array) -> dict[str, jax.Array]:
    """``load`` and ``score`` f32[experts] of scores f32[..., experts] and choices int32[..., k].

    Scores that don't add up to 1 are divided by their sum first. Where experts have biases also
    ``chosen`` f32[experts], each one's share of all choices.
    """
    first = jax.nn.one_hot(chosen[..., 0], scores.shape[-1], dtype=jnp.float32)
    if router.score is Score.sigmoid:
        scores = scores / (scores.sum(axis=-1, keepdims=True) + LEAST)
    found = {"load": first.mean(axis=(0, 1)), "score": scores.mean(axis=(0, 1))}
    if router.bias:
        every = jax.nn.one_hot(chosen, scores.shape[-1], dtype=jnp.float32)
        found["chosen"] = every.mean(axis=(0, 1, 2))
    return found


def balance(load: jax.Array, score: jax.Array) -> jax.Array:
    """The load balancing loss f32[...] of ``load`` and ``score`` f32[..., experts] (Switch, Fedus et al. 2021).

    1 where experts are chosen evenly, their number where one gets all. It is a product of means, so
    these are averaged over a pipeline's microbatches before it is taken.
    """
    return load.shape[-1] * jnp.sum(load * score, axis=-1)


def moved(bias: jax.Array, chosen: jax.Array, rate: float) -> jax.Array:
    """Biases f32[..., experts] after a step in which experts had these shares of the choices (DeepSeek-V3, section 2.1.2)."""
    even = 1 / chosen.shape[-1]
    return bias + rate * jnp.sign(even - chosen)
