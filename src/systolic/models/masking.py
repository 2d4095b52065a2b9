"""What a position of attention sees, and what its logits go through: the arguments of every kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from systolic.models.order import Order


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What a position sees."""

    segments: jax.Array | None = None
    """int32[batch, sequence]; only positions of its own segment."""
    causal: bool = False
    """Itself and earlier ones only."""
    window: int = 0
    """Causal only: itself and the ``window - 1`` before it; 0 sees all."""
    order: Order | None = None
    """In which queries, keys, values and segments lie; what is earlier is so in their natural order."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """From products of queries and keys to what the softmax takes."""

    scale: float | None = None
    """Factor of the products; 1/sqrt(head_dim) by default."""
    cap: float = 0.0
    """Soft cap: ``cap * tanh(logit / cap)`` (Gemma 2, section 2); 0 has none."""
    sinks: jax.Array | None = None
    """f32[heads]: a logit more for each head, which takes its share of the softmax and adds nothing."""

    @property
    def plain(self) -> bool:
        """Whether the logits go to the softmax as they are."""
        return not self.cap and self.sinks is None


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """``cap * tanh(logits / cap)``, same dtype; the logits themselves where the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits
