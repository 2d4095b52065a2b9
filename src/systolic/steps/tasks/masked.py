"""Prediction of masked tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.job import Task
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax

    from systolic.steps.tasks.scores import Scores


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTokens(Task):
    """Cross-entropy of the chosen tokens, over the labels that are not -1 (Devlin et al. 2019).

    Batches: tokens, segments, positions int32[batch, sequence]; places, labels int32[batch, predictions].
    """

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> Mapping[str, Mean]:
        """``loss`` (nats a chosen token) and ``accuracy``, the share whose label is the most likely token."""
        del train
        scores, seen = _scores(model, batch)
        weight = seen.sum()
        return {
            "loss": Mean((scores.nats * seen).sum(), weight),
            "accuracy": Mean((scores.best * seen).sum(), weight),
        }

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """nats f32[batch]: the summed loss of each row; tokens f32[batch]: its number of chosen tokens."""
        scores, seen = _scores(model, batch)
        return {"nats": (scores.nats * seen).sum(axis=-1), "tokens": seen.sum(axis=-1)}


def _scores(model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
    """Scores of each prediction, and f32[batch, predictions]: 1 for a prediction, 0 for padding."""
    import jax.numpy as jnp

    from systolic.steps.tasks.scores import cross_entropy

    hidden = model(batch["tokens"], batch["segments"], batch["positions"])
    scores = cross_entropy(model.logits(hidden, batch["places"]), batch["labels"])
    return scores, (batch["labels"] >= 0).astype(jnp.float32)
