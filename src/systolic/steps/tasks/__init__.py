"""Tasks: losses and metrics of classes, tokens, vectors, transcripts, and arrays by name."""

import enum
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import COUNT, NOT_NEGATIVE, SHARE, check
from systolic.job import Task, TokenScorer
from systolic.job.data import MASK
from systolic.job.model import Mean

if TYPE_CHECKING:
    import jax

    from systolic.steps.logits import Scores

NO_LABEL = -1
"""Label of an example that is left out of loss and metrics."""
NUM_BYTES = 256
"""Number of byte ids where the unit is a byte; ids from it on mark documents."""


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
    unpooled: Annotated[int, NOT_NEGATIVE] = 0
    """Tokens at the start of each text that are read and not pooled: those of a prompt with ``include_prompt: false``."""

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
        there = batch["segments"] > 0
        if self.unpooled:
            there &= batch["positions"] >= self.unpooled
        there = there[..., None]
        match self.pooling:
            case TextPooling.mean:
                count = jnp.maximum(there.sum(axis=1), 1)
                vector = jnp.where(there, hidden, 0.0).sum(axis=1) / count
            case TextPooling.first:
                vector = hidden[:, 0]
            case TextPooling.maximum:
                # As sentence-transformers: a finite number, for a text that is cut within its prompt.
                vector = jnp.where(there, hidden, -1e9).max(axis=1)
        if self.normalise:
            length = jnp.linalg.norm(vector, axis=-1, keepdims=True)
            vector = vector / jnp.maximum(length, 1e-12)
        return {"embedding": vector}


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

        from systolic.steps.logits import with_mean

        read = cross_entropy_of(model)
        if train and self.label_smoothing > 0:
            read = partial(with_mean, scored=read)
        scores, sown = score(model, batch, read)
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

        nats = score(model, batch, cross_entropy_of(model))[0].nats
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


def cross_entropy_of(model: Any) -> "Callable[[jax.Array, jax.Array], Scores]":
    """Cross-entropy in the form that is fast where a model runs."""
    from systolic.models.linear import alone_on_cpu
    from systolic.steps.logits import cross_entropy, cross_entropy_on_cpu

    target = getattr(model, "target", None)
    return cross_entropy_on_cpu if target and alone_on_cpu(target) else cross_entropy


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

        hidden = model(batch["tokens"], batch["segments"], batch["positions"])
        logits = model.logits(hidden, batch["places"])
        scores = cross_entropy_of(model)(logits, batch["labels"])
        return scores, (batch["labels"] >= 0).astype(jnp.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcription(ScoredTokens):
    """Cross-entropy of the next token of a recording's text, the tokens before it given (teacher forcing).

    Batches: features f32[batch, frames, mels]; tokens, targets int32[batch, sequence], targets -1 where there is no loss.
    """

    def scores(self, model: Any, batch: "Mapping[str, jax.Array]") -> "tuple[Scores, jax.Array]":
        """Scores of each token, and f32[batch, sequence]: 1 for a target, 0 for padding."""
        import jax.numpy as jnp

        logits = model(batch["features"], batch["tokens"])
        scores = cross_entropy_of(model)(logits, batch["targets"])
        return scores, (batch["targets"] >= 0).astype(jnp.float32)
