"""Tasks of language models: prediction of the next token, and of masked tokens."""

import enum
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.ranges import NOT_NEGATIVE, SHARE, check
from systolic.job import Task, TokenScorer
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax

    from systolic.steps.tasks.scores import Scores


NUM_BYTES = 256
"""Number of byte ids where the unit is a byte; ids from it on mark documents."""


class Unit(enum.Enum):
    """Unit of a token."""

    token = "token"
    byte = "byte"
    """A byte or the end of a document; the loss is also reported as bits per byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel(Task):
    """Cross-entropy of the next token, over the targets that are not -1.

    Batches: tokens, targets, segments, positions int32[batch, sequence].

    Raises:
        OptionError: a weight or share outside its range.
    """

    unit: Unit = Unit.token
    label_smoothing: Annotated[float, SHARE] = 0.0
    """Share of the probability mass spread evenly over the vocabulary."""
    z_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the squared log normaliser (PaLM, Chowdhery et al. 2022), against drifting logits."""
    router_loss: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of a mixture's load balancing loss."""

    def __post_init__(self) -> None:
        check(self)

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> "Mapping[str, jax.Array | Mean]":
        """loss (nats a token; the regularisers only while training), accuracy, and bits_per_byte for bytes.

        bits_per_byte is the bits of all targets over the bytes of text among them; the end of a document
        has bits but is no byte.
        A mixture also has router_loss and dropped, the share of choices whose expert had no free slot.
        """
        import jax.numpy as jnp

        from systolic.steps.tasks.scores import cross_entropy, with_mean

        smooth = train and self.label_smoothing > 0
        scores, sown = score(model, batch, with_mean if smooth else cross_entropy)
        seen = (batch["targets"] >= 0).astype(jnp.float32)
        weight = seen.sum()
        entropy = (scores.nats * seen).sum()
        loss = entropy
        if scores.mean is not None:
            even = (scores.normaliser - scores.mean) * seen
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * even.sum()
        if train and self.z_loss:
            loss = loss + self.z_loss * (scores.normaliser**2 * seen).sum()
        terms = {"accuracy": Mean((scores.best * seen).sum(), weight)}
        if self.router_loss and "router_loss" in sown:
            balance = sown["router_loss"].get_value()
            terms["router_loss"] = Mean(balance * weight, weight)
            if train:
                loss = loss + self.router_loss * balance * weight
        if "dropped" in sown:
            terms["dropped"] = Mean(sown["dropped"].get_value() * weight, weight)
        if self.unit is Unit.byte:
            text = (batch["targets"] >= 0) & (batch["targets"] < NUM_BYTES)
            bits = entropy / math.log(2)
            terms["bits_per_byte"] = Mean(bits, text.astype(jnp.float32).sum())
        return {"loss": Mean(loss, weight), **terms}

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """nats f32[batch]: the summed loss of each row; tokens f32[batch]: its number of targets."""
        import jax.numpy as jnp

        from systolic.steps.tasks.scores import cross_entropy

        nats = score(model, batch, cross_entropy)[0].nats
        seen = (batch["targets"] >= 0).astype(jnp.float32)
        return {"nats": (nats * seen).sum(axis=-1), "tokens": seen.sum(axis=-1)}


def score(
    model: Any, batch: "Mapping[str, jax.Array]", read: "Callable[[jax.Array, jax.Array], Scores]"
) -> "tuple[Scores, Any]":
    """Result of ``read`` on the logits and the targets, and the variables that the model sowed as ``nnx.Intermediate``."""
    from flax import nnx

    inputs = (batch["tokens"], batch["segments"], batch["positions"])
    if isinstance(model, TokenScorer):
        call: Any = nnx.capture(model.score, nnx.Intermediate)
        return call(read, batch["targets"], inputs)
    call = nnx.capture(model, nnx.Intermediate)
    logits, sown = call(*inputs)
    return read(logits, batch["targets"]), sown


class ScoredTokens(Task):
    """Base of tasks whose loss is the cross-entropy of tokens, each by itself."""

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> Mapping[str, Mean]:
        """``loss`` (nats a token that is to be predicted) and ``accuracy``, the share of these that are the most likely token."""
        del train
        scores, seen = self.scores(model, batch)
        weight = seen.sum()
        return {
            "loss": Mean((scores.nats * seen).sum(), weight),
            "accuracy": Mean((scores.best * seen).sum(), weight),
        }

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """nats f32[batch]: the summed loss of each row; tokens f32[batch]: its number of tokens to predict."""
        scores, seen = self.scores(model, batch)
        return {"nats": (scores.nats * seen).sum(axis=-1), "tokens": seen.sum(axis=-1)}

    @abstractmethod
    def scores(self, model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
        """Scores of each token, and f32[batch, tokens]: 1 for one to predict, 0 for padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTokens(ScoredTokens):
    """Cross-entropy of the chosen tokens, over the labels that are not -1 (Devlin et al. 2019).

    Batches: tokens, segments, positions int32[batch, sequence]; places, labels int32[batch, predictions].
    """

    def scores(self, model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
        """Scores of each prediction, and f32[batch, predictions]: 1 for a prediction, 0 for padding."""
        import jax.numpy as jnp

        from systolic.steps.tasks.scores import cross_entropy

        hidden = model(batch["tokens"], batch["segments"], batch["positions"])
        scores = cross_entropy(model.logits(hidden, batch["places"]), batch["labels"])
        return scores, (batch["labels"] >= 0).astype(jnp.float32)
