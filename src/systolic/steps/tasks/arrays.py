"""Losses of models that take arrays by name and return arrays by name, such as those of other frameworks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from systolic.core.errors import OptionError, nearest
from systolic.job import Task
from systolic.job.data import MASK
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayOutputs(Task):
    """The outputs themselves; the loss, their mean square, is a stand-in with which a train step can be forecast."""

    def terms(self, model: Any, batch: Mapping[str, "jax.Array"], train: bool) -> Mapping[str, Any]:
        """``loss``: mean square of the floating outputs of each example."""
        import jax.numpy as jnp

        parts = [
            jnp.square(output.astype(jnp.float32)).reshape(output.shape[0], -1).mean(axis=-1)
            for output in self.outputs(model, batch).values()
            if jnp.issubdtype(output.dtype, jnp.floating)
        ]
        return {"loss": sum(parts)}

    def outputs(self, model: Any, batch: Mapping[str, "jax.Array"]) -> Mapping[str, "jax.Array"]:
        """Every output of the model that has one entry an example."""
        size = batch[MASK].shape[0]
        outputs = model(**{name: array for name, array in batch.items() if name != MASK})
        return {
            name: output
            for name, output in outputs.items()
            if output.ndim and output.shape[0] == size
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayClassification(Task):
    """Softmax cross-entropy of one output against whole numbers, and the share that ranks first.

    All other arrays of the batch are the model's inputs. A label below 0 is left out.
    """

    output: str = "output"
    """Output with logits [batch, ..., classes]."""
    label: str = "label"
    """Array of the batch with the classes, int32[batch, ...]."""

    def terms(
        self, model: Any, batch: Mapping[str, "jax.Array"], train: bool
    ) -> Mapping[str, Mean]:
        """``loss`` (nats) and ``accuracy``, means over labels.

        Raises:
            OptionError: there is no such output or label.
        """
        import jax
        import jax.numpy as jnp

        logits = _output(model, batch, self.output, self.label).astype(jnp.float32)
        label = batch[self.label]
        known = label >= 0
        weight = known * jnp.expand_dims(batch[MASK], tuple(range(1, label.ndim)))
        chosen = jnp.where(known, label, 0)[..., None]
        hit = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=-1)[..., 0]
        # Ties count against the label, so that constant logits don't score.
        own = jnp.take_along_axis(logits, chosen, axis=-1)
        others = jnp.arange(logits.shape[-1]) != chosen
        first = ~jnp.any((logits >= own) & others, axis=-1)
        total = weight.sum()
        return {
            "loss": Mean(-(hit * weight).sum(), total),
            "accuracy": Mean((first * weight).sum(), total),
        }

    def outputs(self, model: Any, batch: Mapping[str, "jax.Array"]) -> Mapping[str, "jax.Array"]:
        """The logits, under the output's name."""
        return {self.output: _output(model, batch, self.output, self.label)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRegression(Task):
    """Mean squared error of one output; all other arrays of the batch are the model's inputs."""

    output: str = "output"
    """Output to fit, [batch, ...]."""
    target: str = "target"
    """Array of the batch with as many numbers an example."""

    def terms(self, model: Any, batch: Mapping[str, "jax.Array"], train: bool) -> Mapping[str, Any]:
        """``loss``: squared error of each example, averaged over its numbers.

        Raises:
            OptionError: there is no such output or target, or their sizes differ.
        """
        import jax.numpy as jnp

        predicted = _output(model, batch, self.output, self.target).astype(jnp.float32)
        wanted = batch[self.target]
        if predicted.size != wanted.size:
            raise OptionError(
                f"output {self.output} is {list(predicted.shape)} and {self.target} is {list(wanted.shape)}; give one target for each number"
            )
        apart = jnp.square(predicted - wanted.reshape(predicted.shape).astype(jnp.float32))
        return {"loss": apart.reshape(apart.shape[0], -1).mean(axis=-1)}

    def outputs(self, model: Any, batch: Mapping[str, "jax.Array"]) -> Mapping[str, "jax.Array"]:
        """The fitted output."""
        return {self.output: _output(model, batch, self.output, self.target)}


def _output(model: Any, batch: Mapping[str, "jax.Array"], output: str, answer: str) -> "jax.Array":
    if answer not in batch:
        raise OptionError(
            f"the batch has no array {answer!r}{nearest(answer, batch)}; it has {', '.join(sorted(set(batch) - {MASK}))}"
        )
    outputs = model(**{name: array for name, array in batch.items() if name not in (MASK, answer)})
    if output not in outputs:
        raise OptionError(
            f"the model has no output {output!r}{nearest(output, outputs)}; it has {', '.join(sorted(outputs))}"
        )
    return outputs[output]
