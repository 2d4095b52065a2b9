"""Text of a recording."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.job import Task
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax

    from systolic.steps.tasks.scores import Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcription(Task):
    """Cross-entropy of the next token of a recording's text, the tokens before it given (teacher forcing).

    Batches: features f32[batch, frames, mels]; tokens, targets int32[batch, sequence], targets -1 where there is no loss.
    """

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> Mapping[str, Mean]:
        """``loss`` (nats a token) and ``accuracy``, the share of targets that are the most likely token."""
        del train
        scores, seen = _scores(model, batch)
        weight = seen.sum()
        return {
            "loss": Mean((scores.nats * seen).sum(), weight),
            "accuracy": Mean((scores.best * seen).sum(), weight),
        }

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """nats f32[batch]: the summed loss of each text; tokens f32[batch]: its number of targets."""
        scores, seen = _scores(model, batch)
        return {"nats": (scores.nats * seen).sum(axis=-1), "tokens": seen.sum(axis=-1)}


def _scores(model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
    """Scores of each token, and f32[batch, sequence]: 1 for a target, 0 for padding."""
    import jax.numpy as jnp

    from systolic.steps.tasks.scores import cross_entropy

    logits = model(batch["features"], batch["tokens"])
    scores = cross_entropy(logits, batch["targets"])
    return scores, (batch["targets"] >= 0).astype(jnp.float32)
