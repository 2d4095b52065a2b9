"""Scores of tokens without the whole logits: they exist for one part of the sequence at a time.

The backward pass computes the logits of a part again. What a part adds to the gradient of the
output matrix stays on its device until all parts are through: each shard of the tokens has a copy
of the matrix of its own, so that the sum over shards comes once, after the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from systolic.job import Target


def score_chunks(
    score: Callable[[jax.Array, jax.Array], Any],
    hidden: jax.Array,
    matrix: jax.Array,
    axes: tuple[str, str],
    targets: jax.Array,
    target: Target,
) -> Any:
    """``score`` of all tokens, part by part.

    Args:
        score: Logits [..., vocab] and targets int32[...] to a tree of arrays [...].
        hidden: [batch, sequence, d_model].
        matrix: The output matrix; as it is stored, for a transposed copy would double it.
        axes: Its logical axes: "embed" and "vocab", in either order.
        targets: int32[batch, sequence].
        target: Its layout says how many parts; they divide the sequence of each of its shards.

    Returns:
        The tree, its arrays [batch, sequence].
    """
    layout, (batch, sequence) = target.layout, targets.shape
    shards = layout.batch_ways if batch % layout.batch_ways == 0 else 1
    pieces, chunks = layout.context, layout.loss_chunks
    split = (shards, batch // shards, pieces, chunks, sequence // (pieces * chunks))

    def cut(array: jax.Array) -> jax.Array:
        """[chunks, shards, pieces, batch / shards, sequence / (pieces x chunks), ...]; no token moves."""
        parts = jnp.moveaxis(array.reshape(*split, *array.shape[2:]), (3, 0, 2), (0, 1, 2))
        return target.constrain(parts, None, "batch", "sequence", *[None] * (parts.ndim - 3))

    def join(parts: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(parts, (0, 1, 2), (3, 0, 2)).reshape(batch, sequence)
        return target.constrain(whole, "batch", "sequence")

    dims = "".join("v" if axis == "vocab" else "d" for axis in axes)

    def part(hidden: jax.Array, targets: jax.Array, copies: jax.Array) -> Any:
        with jax.named_scope("logits"):
            logits = jnp.einsum(f"cpbsd,cp{dims}->cpbsv", hidden, copies)
            logits = target.constrain(logits, "batch", "sequence", None, None, "vocab")
        return score(logits, targets)

    kept = jax.checkpoint_policies.save_only_these_names("normaliser")
    again = jax.checkpoint(part, policy=kept, prevent_cse=False)
    with jax.named_scope("logits"):
        # Split as the parameter is, so that its gradient is summed into shards, not into whole copies.
        stored = target.constrain(matrix, *axes)
        copies = jnp.broadcast_to(stored, (shards, pieces, *matrix.shape))
        gathered = [axis if axis == "vocab" else None for axis in axes]
        copies = target.constrain(copies, "batch", "sequence", *gathered)
    _, scores = jax.lax.scan(
        lambda _, xs: (None, again(*xs, copies)), None, (cut(hidden), cut(targets))
    )
    return jax.tree.map(join, scores)
