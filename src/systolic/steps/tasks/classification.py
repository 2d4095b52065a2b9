"""Classification: one label per image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.ranges import COUNT, SHARE, check
from systolic.job import Task
from systolic.job.data import MASK
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax

NO_LABEL = -1
"""Label of an example that is left out of loss and metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification(Task):
    """Softmax cross-entropy against one label, with the share of labels that rank first (or among five).

    Raises:
        OptionError: ``label_smoothing`` outside 0 to 1, or no ``top``.
    """

    label_smoothing: Annotated[float, SHARE] = 0.0
    """Share of the target probability spread evenly over all classes, in training."""
    top: Annotated[int, COUNT] = 5
    """Number of classes that a prediction lists."""

    def __post_init__(self) -> None:
        check(self)

    def terms(
        self, model: Any, batch: Mapping[str, "jax.Array"], train: bool
    ) -> Mapping[str, Mean]:
        """``loss`` (nats), ``accuracy`` and, with more than five classes, ``top5_accuracy`` (shares).

        Batch: image uint8[batch, height, width, channels], label int32[batch], mask f32[batch].
        Values are weighted means, since examples labelled -1 have weight 0.
        """
        import jax
        import jax.numpy as jnp

        logits = model(batch["image"]).astype(jnp.float32)
        num_classes = logits.shape[-1]
        known = batch["label"] != NO_LABEL
        weight = batch[MASK] * known
        label = jnp.where(known, batch["label"], 0)
        log_probability = jax.nn.log_softmax(logits)
        hit = jnp.take_along_axis(log_probability, label[:, None], axis=-1)[:, 0]
        share = self.label_smoothing if train else 0.0
        loss = -(1 - share) * hit - share * log_probability.mean(axis=-1)
        # Ties count against the label, so that constant logits don't score.
        own = jnp.take_along_axis(logits, label[:, None], axis=-1)
        others = jnp.arange(num_classes) != label[:, None]
        rank = jnp.sum((logits >= own) & others, axis=-1)
        values = {"loss": loss, "accuracy": rank < 1}
        if num_classes > 5:
            values["top5_accuracy"] = rank < 5
        total = weight.sum()
        return {name: Mean((value * weight).sum(), total) for name, value in values.items()}

    def outputs(self, model: Any, batch: Mapping[str, "jax.Array"]) -> Mapping[str, "jax.Array"]:
        """The best classes: ``label`` int32[batch, k] and ``probability`` f32[batch, k], best first."""
        import jax
        import jax.numpy as jnp

        logits = model(batch["image"]).astype(jnp.float32)
        probability, label = jax.lax.top_k(jax.nn.softmax(logits), min(self.top, logits.shape[-1]))
        return {"label": label, "probability": probability}
