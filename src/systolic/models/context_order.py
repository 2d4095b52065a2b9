"""The order in which a sequence lies over the context axis, so that a causal mask gives each device equal work.

In natural order the device with the end of the sequence compares its queries with all keys, the one
with the start with few: of ``n`` devices the last does ``2 - 1 / n`` times the mean. Here each device
holds two chunks, one from the start and one from the end (0 and 2n-1, 1 and 2n-2, ...), whose work
adds up to the same. Only attention, and what looks at neighbours, has to know.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import ContextOrder, Target

LEAST_TOKENS = 4096
"""Rows from which on balanced order pays on a TPU (``ContextOrder.auto``).

By schedule, two layers of width 2,048 with 131,072 tokens a step on v5e-8 with context 4, natural against balanced: 1,024
tokens 213 and 233 ms, 2,048 216 and 230, 4,096 240.4 and 240.5, 8,192 279 and 267, 16,384 354 and 318. Moving the pieces takes as
long for any row, what equal work saves grows with it.
"""


@dataclass(frozen=True)
class Order:
    """A sequence of ``2 * ways`` chunks, over ``ways`` devices."""

    ways: int

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The natural number of the chunk at each place: 0, 2n-1, 1, 2n-2, ..."""
        last = 2 * self.ways - 1
        return tuple(chunk for first in range(self.ways) for chunk in (first, last - first))

    def indices(self, sequence: int) -> np.ndarray:
        """int32[sequence]: the natural index of what lies at each place."""
        natural = np.arange(sequence, dtype=np.int32).reshape(len(self.chunks), -1)
        return natural[list(self.chunks)].reshape(-1)

    def arrange(self, array: jax.Array, axis: int = 1) -> jax.Array:
        """``array`` with its natural sequence dim in this order."""
        return _take(array, axis, self.chunks)

    def restore(self, array: jax.Array, axis: int = 1) -> jax.Array:
        """Inverse of :meth:`arrange`."""
        return _take(array, axis, tuple(int(place) for place in np.argsort(self.chunks)))


def balanced(target: Target, sequence: int) -> Order | None:
    """The order for a causal decoder; None where the sequence stays as it is.

    On a TPU each chunk must hold whole blocks of the attention kernel. On a GPU, cuDNN masks by place.
    """
    ways = target.layout.context
    multiple = 2 * ways * (128 if target.platform == "tpu" else 1)
    order = target.layout.context_order
    if ways == 1 or order is ContextOrder.natural:
        return None
    if order is ContextOrder.auto and target.platform == "tpu" and sequence < LEAST_TOKENS:
        return None
    if target.platform == "gpu" or sequence % multiple:
        return None
    return Order(ways)


def _take(array: jax.Array, axis: int, chunks: tuple[int, ...]) -> jax.Array:
    # Slices that the compiler sees through, not a gather.
    parts = jnp.split(array, len(chunks), axis=axis)
    return jnp.concatenate([parts[chunk] for chunk in chunks], axis=axis)
