"""A recipe for tests: a perceptron on made-up numbers, with faults to be planted."""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from systolic.data.arrays import Arrays
from systolic.job import (
    Batch,
    Data,
    Evaluation,
    Field,
    Guard,
    GuardRule,
    Job,
    Layout,
    Model,
    Optimizer,
    OptimizerKind,
    Read,
    Schedule,
    Split,
    Task,
)

FEATURES = 16
VALIDATION = 512


class Fault(enum.Enum):
    none = "none"
    dead = "dead"
    """The second layer's inputs are all far below zero."""
    bf16 = "bf16"
    """Weights are stored in bfloat16."""


class Network(nnx.Module):
    def __init__(self, fault: Fault, rngs: nnx.Rngs):
        kind = jnp.bfloat16 if fault is Fault.bf16 else jnp.float32
        bias = nnx.initializers.constant(-100.0 if fault is Fault.dead else 0.0)
        self.first = nnx.Linear(FEATURES, 32, rngs=rngs, param_dtype=kind)
        self.second = nnx.Linear(32, 32, rngs=rngs, param_dtype=kind, bias_init=bias)
        self.out = nnx.Linear(32, 3, rngs=rngs, param_dtype=kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.relu(self.first(x))
        return self.out(nnx.relu(self.second(hidden))).astype(jnp.float32)


@dataclass(frozen=True)
class Perceptron(Model):
    fault: Fault = Fault.none

    def build(self, rngs: Any, target: Any) -> nnx.Module:
        return Network(self.fault, rngs)


@dataclass(frozen=True)
class Labels(Task):
    def terms(self, model: Any, batch: Mapping[str, Any], train: bool) -> Mapping[str, Any]:
        logits = model(batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return {"loss": loss * batch["weight"]}


def made(examples: int) -> dict[Split, dict[str, np.ndarray]]:
    """Three classes, a fifth of the labels wrong."""
    rng = np.random.default_rng(0)
    count = examples + VALIDATION
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    label = (x[:, 0] + x[:, 1] > 0.5).astype(np.int32) + (x[:, 2] > 0)
    wrong = rng.random(count) < 0.2
    label[wrong] = rng.integers(0, 3, wrong.sum())
    arrays = {"x": x, "label": label, "weight": np.ones(count, np.float32)}
    parts = {Split.train: slice(0, examples), Split.validation: slice(examples, count)}
    return {split: {k: v[part] for k, v in arrays.items()} for split, part in parts.items()}


@dataclass(frozen=True)
class Numbers(Data):
    """``spoiled`` batches have their loss multiplied by ``factor``."""

    examples: int
    spoiled: tuple[int, ...] = ()
    factor: float = 30.0
    arrays: Arrays = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        splits = {split.value: arrays for split, arrays in made(self.examples).items()}
        object.__setattr__(self, "arrays", Arrays.call(lambda: splits))

    def fields(self) -> Mapping[str, Field]:
        return self.arrays.fields()

    def size(self, split: Split) -> int | None:
        return self.arrays.size(split)

    def open(self, read: Read) -> Any:
        batches = self.arrays.open(read)
        return Spoiled(batches, self) if read.split is Split.train else batches


class Spoiled:
    def __init__(self, batches: Any, data: Numbers):
        self.batches, self.data, self.number = batches, data, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self.batches)
        self.number += 1
        if self.number in self.data.spoiled:
            batch |= {"weight": batch["weight"] * np.float32(self.data.factor)}
        return batch

    def get_state(self) -> bytes:
        return json.dumps([self.number, self.batches.get_state().decode()]).encode()

    def set_state(self, state: bytes) -> None:
        self.number, inner = json.loads(state)
        self.batches.set_state(inner.encode())

    def close(self) -> None:
        self.batches.close()


def job(
    fault: Fault = Fault.none,
    examples: int = 8192,
    steps: int = 240,
    batch: int = 32,
    optimizer: Optimizer = Optimizer(kind=OptimizerKind.adamw, learning_rate=3e-3),  # noqa: B008
    rule: GuardRule = GuardRule.ignore,
    spoiled: tuple[int, ...] = (),
    evaluation: Evaluation = Evaluation(every=60),  # noqa: B008
) -> Job:
    """Sorts made-up numbers into three classes."""
    return Job(
        name="planted",
        model=Perceptron(fault),
        task=Labels(),
        data=Numbers(examples, spoiled),
        steps=steps,
        batch=Batch(total=batch),
        optimizer=optimizer,
        schedule=Schedule(warmup=min(10, steps - 1)),
        evaluation=evaluation,
        guard=Guard(rule=rule),
    )


class Slope(nnx.Module):
    """A loss whose gradient is the mean of the examples."""

    def __init__(self) -> None:
        self.weights = nnx.Param(jnp.ones((2, FEATURES * 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.weights[...].reshape(-1) * x, axis=-1)


@dataclass(frozen=True)
class Line(Model):
    def build(self, rngs: Any, target: Any) -> nnx.Module:
        return Slope()


@dataclass(frozen=True)
class Value(Task):
    def terms(self, model: Any, batch: Mapping[str, Any], train: bool) -> Mapping[str, Any]:
        return {"loss": model(batch["x"])}


def noisy(scale: float, batch: int, accumulate: int = 1) -> Job:
    """Gradients are normal with a known ratio tr(Σ) / |G|²."""
    rng = np.random.default_rng(0)
    dims = 2 * FEATURES * 4
    mean = np.sqrt(dims / scale / dims)
    x = (rng.normal(size=(8192, dims)) + mean).astype(np.float32)
    return Job(
        name="noisy",
        model=Line(),
        task=Value(),
        data=Arrays.call(lambda: {"train": {"x": x}}),
        steps=16,
        batch=Batch(total=batch),
        optimizer=Optimizer(kind=OptimizerKind.sgd, learning_rate=1e-3, clip=0.0),
        layout=Layout(accumulate=accumulate),
        guard=Guard(rule=GuardRule.ignore),
    )
