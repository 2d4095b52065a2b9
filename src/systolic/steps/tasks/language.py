"""Next-token prediction."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.job import Task
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax


class Unit(enum.Enum):
    """What a token is."""

    token = "token"
    byte = "byte"
    """Each target is one byte, so the loss is also reported as bits per byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel(Task):
    """Cross-entropy of the next token, over the targets that are not -1.

    Batches: tokens, targets, segments, positions int32[batch, sequence].
    """

    unit: Unit = Unit.token
    label_smoothing: float = 0.0
    """Share of the probability mass spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the squared log normaliser (PaLM, Chowdhery et al. 2022): keeps logits from drifting."""
    router_loss: float = 0.0
    """Weight of a mixture's load balancing loss."""

    def terms(
        self, model: Any, batch: "Mapping[str, jax.Array]", train: bool
    ) -> "Mapping[str, jax.Array | Mean]":
        """loss (nats a token; the regularisers only while training), accuracy, and bits_per_byte for bytes."""
        import jax.numpy as jnp

        logits, sown = forward(model, batch)
        nats, normaliser, best = cross_entropy(logits, batch["targets"])
        seen = (batch["targets"] >= 0).astype(jnp.float32)
        weight = seen.sum()
        entropy = (nats * seen).sum()
        loss = entropy
        if train and self.label_smoothing:
            even = (normaliser - jnp.mean(logits.astype(jnp.float32), axis=-1)) * seen
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * even.sum()
        if train and self.z_loss:
            loss = loss + self.z_loss * (normaliser**2 * seen).sum()
        terms = {"accuracy": Mean((best * seen).sum(), weight)}
        if self.router_loss and "router_loss" in sown:
            balance = sown["router_loss"].get_value()
            terms["router_loss"] = Mean(balance * weight, weight)
            if train:
                loss = loss + self.router_loss * balance * weight
        if self.unit is Unit.byte:
            terms["bits_per_byte"] = Mean(entropy / math.log(2), weight)
        return {"loss": Mean(loss, weight), **terms}

    def outputs(self, model: Any, batch: "Mapping[str, jax.Array]") -> "Mapping[str, jax.Array]":
        """nats f32[batch]: the summed loss of each row; tokens f32[batch]: its number of targets."""
        import jax.numpy as jnp

        nats, _, _ = cross_entropy(forward(model, batch)[0], batch["targets"])
        seen = (batch["targets"] >= 0).astype(jnp.float32)
        return {"nats": (nats * seen).sum(axis=-1), "tokens": seen.sum(axis=-1)}


def forward(model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[jax.Array, Any]":
    """The logits [batch, sequence, vocab] and what the model sowed as ``nnx.Intermediate`` on the way."""
    from flax import nnx

    call: Any = nnx.capture(model, nnx.Intermediate)
    return call(batch["tokens"], batch["segments"], batch["positions"])


def cross_entropy(
    logits: "jax.Array", targets: "jax.Array"
) -> "tuple[jax.Array, jax.Array, jax.Array]":
    """f32[batch, sequence] each: nats of the target, log normaliser, 1 where the target is the most likely.

    logits [batch, sequence, vocab] in any float dtype, targets int32[batch, sequence]; a target of -1 gives
    a number without meaning, to be masked by the caller. The target's logit is picked by a masked sum,
    which a vocabulary split over devices computes without gathering the logits.
    """
    import jax
    import jax.numpy as jnp

    wide = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(wide, axis=-1)
    ids = jax.lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1)
    picked = jnp.sum(jnp.where(ids == targets[..., None], wide, 0.0), axis=-1)
    best = (jnp.argmax(wide, axis=-1) == targets).astype(jnp.float32)
    return normaliser - picked, normaliser, best
