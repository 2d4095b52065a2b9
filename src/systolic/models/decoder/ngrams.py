"""Hashed n-gram embeddings: the last two, three, ... tokens looked up together.

A row of a table stands for all n-grams that hash to it. The lookups cost next to no arithmetic and
give a small model what it would otherwise spend layers on (Pagnoni et al. 2024, section 3.2.1, use
the same for bytes).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import Target
from systolic.models.context_order import Order
from systolic.models.decoder.config import Decoder
from systolic.models.linear import product
from systolic.models.parameters import weight

MULTIPLIER = 0x9E3779B1
"""The 32-bit golden ratio prime of multiplicative hashing (Knuth, TAOCP 3, 6.4)."""

GAIN = 8.0
"""Factor of the tables, which start at zero: rare rows need larger steps than the dense weights."""


def hashes(tokens: jax.Array, history: int, positions: jax.Array, rows: int) -> jax.Array:
    """Table rows of the n-grams that end at each token.

    Args:
        tokens: int32[batch, history + n]: the n tokens after ``history`` earlier ones; -1 is no token.
        history: One less than the longest n-gram.
        positions: int32[batch, n]: of the n tokens in their documents; what lies before a document is not seen.
        rows: Of a table; a power of two.

    Returns:
        int32[batch, n, history]: rows of the 2-gram, 3-gram, ...
    """
    count = positions.shape[1]
    code = tokens[:, history:].astype(jnp.uint32) + 1
    found = []
    for back in range(1, history + 1):
        earlier = tokens[:, history - back : history - back + count].astype(jnp.uint32) + 1
        code = code * jnp.uint32(MULTIPLIER) + jnp.where(positions >= back, earlier, 0)
        mixed = (code ^ (code >> 15)) * jnp.uint32(MULTIPLIER)
        found.append((mixed >> 16) ^ mixed)
    return (jnp.stack(found, axis=-1) & jnp.uint32(rows - 1)).astype(jnp.int32)


class NGrams(nnx.Module):
    """One table for each n from 2 to ``config.ngrams``, concatenated and projected to the model's width."""

    def __init__(self, config: Decoder, rngs: nnx.Rngs, target: Target) -> None:
        orders = config.ngrams - 1
        self.tables = nnx.Param(
            jnp.zeros((orders, config.ngram_rows, config.ngram_dim)),
            out_sharding=("orders", "vocab", "embed"),
        )
        self.out = weight(
            rngs,
            (orders * config.ngram_dim, config.d_model),
            (None, "embed"),
            orders * config.ngram_dim,
        )
        self.config, self.target = config, target

    @property
    def history(self) -> int:
        """Earlier tokens that a lookup needs."""
        return self.config.ngrams - 1

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, order: Order | None = None
    ) -> jax.Array:
        """int32[batch, history + n] tokens and int32[batch, n] positions to [batch, n, d_model] in ``order``."""
        ids = hashes(tokens, self.history, positions, self.config.ngram_rows)
        if order is not None:
            ids = order.arrange(ids)
        tables = self.target.constrain(self.tables[...], None, "vocab", None)
        looked = [tables[longer][ids[:, :, longer]] for longer in range(self.history)]
        found, out = jnp.concatenate(looked, axis=-1) * GAIN, self.out[...]
        if isinstance(out, jax.Array):
            return found @ out  # in float in every precision of training
        return product(self.target, "bsn,nd->bsd", found, out)
