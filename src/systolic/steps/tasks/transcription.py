"""Text of a recording."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.steps.tasks.language import ScoredTokens

if TYPE_CHECKING:
    import jax

    from systolic.steps.tasks.scores import Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcription(ScoredTokens):
    """Cross-entropy of the next token of a recording's text, the tokens before it given (teacher forcing).

    Batches: features f32[batch, frames, mels]; tokens, targets int32[batch, sequence], targets -1 where there is no loss.
    """

    def scores(self, model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
        """Scores of each token, and f32[batch, sequence]: 1 for a target, 0 for padding."""
        import jax.numpy as jnp

        from systolic.steps.tasks.scores import cross_entropy

        logits = model(batch["features"], batch["tokens"])
        return cross_entropy(logits, batch["targets"]), (batch["targets"] >= 0).astype(jnp.float32)
