"""A recipe with a Flax model, a loss and data of its own: the names that docs and examples import."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import nnx

from systolic.data.arrays import Arrays
from systolic.job import Batch, Checkpoints, Evaluation, Job, Model, Optimizer, Task

OPTIMIZER = Optimizer(learning_rate=0.1)


class Network(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(3, width, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))[:, 0]


@dataclass(frozen=True)
class Perceptron(Model):
    width: int = 4

    def build(self, rngs, target):
        return Network(self.width, rngs)


@dataclass(frozen=True)
class Logistic(Task):
    scale: float = 1.0

    def terms(self, model, batch, train):
        logits = model(batch["features"])
        loss = optax.sigmoid_binary_cross_entropy(logits, batch["above"])
        return {"loss": loss * self.scale, "accuracy": (logits > 0) == (batch["above"] > 0.5)}


def load():
    features = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    above = (features.sum(1) > 0).astype(np.float32)
    parts = {"train": slice(0, 64), "validation": slice(64, 80)}
    return {
        split: {"features": features[rows], "above": above[rows]} for split, rows in parts.items()
    }


def job(width: int = 4, steps: int = 4, optimizer: Optimizer = OPTIMIZER) -> Job:
    """Tells rows whose sum is positive."""
    return Job(
        name="tables",
        model=Perceptron(width),
        task=Logistic(),
        data=Arrays.call(load),
        steps=steps,
        batch=Batch(total=16),
        optimizer=optimizer,
        evaluation=Evaluation(every=4, metric="accuracy"),
        checkpoints=Checkpoints(every=2),
    )
