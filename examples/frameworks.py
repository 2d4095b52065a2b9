"""Models of other frameworks under the same trainer: a PyTorch module and a Keras model.

Train them with: systolic train examples/frameworks.py:torch_digits --layout.fsdp -1
                 KERAS_BACKEND=jax systolic train examples/frameworks.py:keras_diabetes
Forecast them:   systolic forecast examples/frameworks.py:torch_digits --on v5e-4 --layout.fsdp 4
Or import one:   systolic import examples/frameworks.py:network
"""

import numpy as np
from sklearn.datasets import load_diabetes, load_digits

from systolic.data.arrays import Arrays
from systolic.job import Batch, Evaluation, Job, Layout, Optimizer, Precision
from systolic.models.program.config import KerasModel, TorchModule
from systolic.steps.tasks import ArrayClassification, ArrayRegression


def network():
    import torch
    from torch import nn

    layers = [
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(
        *layers, nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    ), torch.zeros(2, 1, 8, 8)


def keras_network():
    import keras
    from keras import layers

    x = inputs = keras.Input((10,), name="patient")
    for width in (64, 64):
        x = layers.Dropout(0.1)(layers.Dense(width, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(1)(x))


def digits():
    table = load_digits()
    image = (table.images[:, None] / 16).astype(np.float32)  # the name of forward's parameter
    parts = {"train": slice(1400), "validation": slice(1400, None)}
    return {split: {"input": image[i], "label": table.target[i]} for split, i in parts.items()}


def patients():
    table = load_diabetes()
    target = (table.target - table.target.mean()) / table.target.std()
    parts = {"train": slice(352), "validation": slice(352, None)}
    return {
        split: {"patient": table.data[i] * 20, "target": target[i]} for split, i in parts.items()
    }


def torch_digits(
    steps: int = 200, precision: Precision = Precision.auto, layout: Layout = Layout()
) -> Job:
    """Reads digits with a PyTorch module."""
    return Job(
        name="torch-digits", model=TorchModule(network), task=ArrayClassification(), data=Arrays.call(digits),
        steps=steps, batch=Batch(total=64), optimizer=Optimizer(learning_rate=3e-3), precision=precision, layout=layout,
        evaluation=Evaluation(every=100, metric="accuracy"),
    )  # fmt: skip


def keras_diabetes(steps: int = 200, layout: Layout = Layout()) -> Job:
    """Predicts how diabetes goes on after a year with a Keras model."""
    return Job(
        name="keras-diabetes", model=KerasModel(keras_network), task=ArrayRegression(), data=Arrays.call(patients),
        steps=steps, batch=Batch(total=32), optimizer=Optimizer(learning_rate=1e-3), precision=Precision.f32,
        layout=layout, evaluation=Evaluation(every=100),
    )  # fmt: skip
