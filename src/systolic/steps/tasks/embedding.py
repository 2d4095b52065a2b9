"""Embeddings: one vector for a text."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.core.errors import OptionError
from systolic.core.ranges import check
from systolic.job import Task
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax


class TextPooling(enum.Enum):
    """How the vectors of a text's tokens become one."""

    mean = "mean"
    """The mean over all tokens, without padding."""
    first = "first"
    """The vector of the first token, such as [CLS]."""
    maximum = "maximum"
    """The largest number of all tokens, in each place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding(Task):
    """Vectors of texts, as sentence-transformers computes them (Reimers and Gurevych 2019).

    Batches: tokens, segments (0: padding), positions int32[batch, sequence].
    """

    pooling: TextPooling = TextPooling.mean
    normalise: bool = True
    """Whether vectors have length 1, so that their dot product is the cosine of their angle."""

    def __post_init__(self) -> None:
        check(self)

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> "Mapping[str, jax.Array | Mean]":
        """Refuses: vectors have no loss.

        Raises:
            OptionError: always.
        """
        del model, batch, train
        raise OptionError(
            "a model of embeddings has no loss to train or evaluate; use systolic predict, or train an encoder with the recipe mlm"
        )

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """``embedding`` f32[batch, d_model]."""
        import jax.numpy as jnp

        hidden = model(batch["tokens"], batch["segments"], batch["positions"]).astype(jnp.float32)
        there = (batch["segments"] > 0)[..., None]
        match self.pooling:
            case TextPooling.mean:
                count = jnp.maximum(there.sum(axis=1), 1)
                vector = jnp.where(there, hidden, 0.0).sum(axis=1) / count
            case TextPooling.first:
                vector = hidden[:, 0]
            case TextPooling.maximum:
                vector = jnp.where(there, hidden, -jnp.inf).max(axis=1)
        if self.normalise:
            length = jnp.linalg.norm(vector, axis=-1, keepdims=True)
            vector = vector / jnp.maximum(length, 1e-12)
        return {"embedding": vector}
