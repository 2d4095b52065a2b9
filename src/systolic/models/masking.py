"""Masks of attention, and scale, soft cap and sinks of its logits: the arguments of every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from systolic.models.context_order import Order


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Positions that each position attends to."""

    segments: jax.Array | None = None
    """int32[batch, sequence]: a position sees its own segment only."""
    causal: bool = False
    """Whether a position sees only itself and earlier ones."""
    window: int = 0
    """Causal only: itself and the ``window - 1`` before it; 0 sees all."""
    order: Order | None = None
    """Order of queries, keys, values and segments; causality follows their natural order."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Transformation of the products of queries and keys before the softmax."""

    scale: float | None = None
    """Factor of the products; 1/sqrt(head_dim) by default."""
    cap: float = 0.0
    """Soft cap: ``cap * tanh(logit / cap)`` (Gemma 2, section 2); 0 has none."""
    sinks: jax.Array | None = None
    """f32[heads]: one more logit per head, in the softmax's denominator only."""

    @property
    def plain(self) -> bool:
        """Whether there is neither a soft cap nor a sink."""
        return not self.cap and self.sinks is None


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """``cap * tanh(logits / cap)``, same dtype; the logits themselves where the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits
