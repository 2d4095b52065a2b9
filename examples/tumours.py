"""A recipe of your own: your Flax NNX model, your data, your loss.

Train it with: systolic train examples/tumours.py:job --steps 300
"""

from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_breast_cancer

from systolic.data.arrays import Arrays
from systolic.job import Batch, Evaluation, Job, Model, Optimizer, Task


class Network(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(30, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.hidden(x))))[:, 0]


@dataclass(frozen=True)
class Perceptron(Model):
    width: int = 64

    def build(self, rngs, target):
        return Network(self.width, rngs)


@dataclass(frozen=True)
class FocalLoss(Task):
    gamma: float = 2.0

    def terms(self, model, batch, train):
        logits, malignant = model(batch["features"]), batch["malignant"]
        right = (logits > 0) == (malignant > 0.5)
        return {"loss": optax.sigmoid_focal_loss(logits, malignant, gamma=self.gamma), "accuracy": right}  # fmt: skip


def load():
    table = load_breast_cancer()
    features = (table.data - table.data.mean(0)) / table.data.std(0)
    order = np.random.default_rng(0).permutation(len(features))
    parts = {"train": order[:400], "validation": order[400:480], "test": order[480:]}
    return {split: {"features": features[i], "malignant": 1.0 - table.target[i]} for split, i in parts.items()}  # fmt: skip


def job(width: int = 64, steps: int = 300, optimizer: Optimizer = Optimizer(learning_rate=3e-3)) -> Job:  # fmt: skip
    """Tells malignant from benign tumours in scikit-learn's breast cancer table."""
    return Job(
        name="tumours", model=Perceptron(width), task=FocalLoss(), data=Arrays.call(load),
        steps=steps, batch=Batch(total=32), optimizer=optimizer, evaluation=Evaluation(every=100, metric="accuracy"),
    )  # fmt: skip
