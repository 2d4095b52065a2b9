"""A recipe for tests, in one file so that a run's copy of it stands alone: a small network with batch
norm and dropout on made-up numbers, and data that can be spoiled at given steps."""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from systolic.data.arrays import Arrays
from systolic.job import (
    Batch,
    Checkpoints,
    Data,
    Dtypes,
    Evaluation,
    Field,
    Guard,
    Job,
    Layout,
    Model,
    Optimizer,
    Precision,
    Read,
    Schedule,
    Split,
    Task,
)


class Network(nnx.Module):
    def __init__(self, width: int, dropout: float, rngs: nnx.Rngs, target: Any):
        self.hidden = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(width, 3, rngs=rngs)
        self.target = target

    def __call__(self, x: jax.Array) -> jax.Array:
        self.target.note("a plain product was chosen")
        hidden = self.norm(self.hidden(x.astype(self.hidden.kernel.dtype)))
        return self.out(self.dropout(nnx.relu(hidden))).astype("float32")


@dataclass(frozen=True)
class Perceptron(Model):
    width: int = 16
    dropout: float = 0.1

    def build(self, rngs: Any, target: Any) -> nnx.Module:
        return Network(self.width, self.dropout, rngs, target)


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x))).astype("float32")


@dataclass(frozen=True)
class RowByRow(Model):
    """A network whose answer to a row does not depend on the others."""

    def build(self, rngs: Any, target: Any) -> nnx.Module:
        del target
        return Plain(rngs)


@dataclass(frozen=True)
class Labels(Task):
    scale: float = 1.0

    def terms(self, model: Any, batch: Mapping[str, Any], train: bool) -> Mapping[str, Any]:
        logits = model(batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right = logits.argmax(-1) == batch["label"]
        return {"loss": loss * self.scale * batch["weight"], "accuracy": right}


@dataclass(frozen=True)
class Spoiled(Data):
    """Arrays whose training batches of given numbers are multiplied, or cut to half the size."""

    spoil: Mapping[int, float]
    halve: tuple[int, ...] = ()
    halt_at: int = 0
    """The process is told to stop when this batch is read."""
    halt_evaluation_at: int = 0
    """The process is told to stop when this batch of a validation is read."""
    halt_in: int = -1
    """The only process that is told to; -1: every one."""

    def halts(self) -> bool:
        return self.halt_in in (-1, jax.process_index())

    def fields(self) -> Mapping[str, Field]:
        return ARRAYS.fields()

    def size(self, split: Split) -> int:
        return ARRAYS.size(split)

    def open(self, read: Read) -> Any:
        batches = ARRAYS.open(read)
        if read.split is Split.validation and self.halt_evaluation_at:
            halting = Spoiled({}, halt_at=self.halt_evaluation_at, halt_in=self.halt_in)
            return SpoiledBatches(batches, halting)
        return SpoiledBatches(batches, self) if read.split is Split.train else batches


class SpoiledBatches:
    def __init__(self, batches: Any, data: Spoiled):
        self.batches, self.data, self.number = batches, data, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self.batches)
        self.number += 1
        if self.number == self.data.halt_at and self.data.halts():
            os.kill(os.getpid(), signal.SIGTERM)
        factor = np.float32(self.data.spoil.get(self.number, 1.0))
        batch |= {name: batch[name] * factor for name in ("x", "weight")}
        if self.number in self.data.halve:
            return {name: array[: len(array) // 2] for name, array in batch.items()}
        return batch

    def get_state(self) -> bytes:
        return json.dumps([self.number, self.batches.get_state().decode()]).encode()

    def set_state(self, state: bytes) -> None:
        self.number, inner = json.loads(state)
        self.batches.set_state(inner.encode())

    def close(self) -> None:
        self.batches.close()


def load() -> Mapping[str, Mapping[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 8)).astype(np.float32)
    label = (np.abs(x[:, 0]) + x[:, 1] > 0.5).astype(np.int32) + (x[:, 2] > 1)
    parts = {"train": slice(0, 300), "validation": slice(300, 360), "test": slice(360, 400)}
    weight = np.ones(400, np.float32)
    arrays = {"x": x, "label": label, "weight": weight}
    return {name: {k: array[part] for k, array in arrays.items()} for name, part in parts.items()}


ARRAYS = Arrays.call(load)


def job(
    steps: int = 16,
    batch: int = 16,
    ema: float = 0.0,
    learning_rate: float = 1e-2,
    scale: float = 1.0,
    dropout: float = 0.1,
    width: int = 16,
    precision: Precision = Precision.auto,
    dtypes: Dtypes = Dtypes(),  # noqa: B008
    layout: Layout = Layout(),  # noqa: B008
    evaluation: Evaluation = Evaluation(every=8),  # noqa: B008
    checkpoints: Checkpoints = Checkpoints(every=4),  # noqa: B008
    guard: Guard = Guard(),  # noqa: B008
    spoil: tuple[int, ...] = (),
    factor: float = float("nan"),
    halve: tuple[int, ...] = (),
    halt_at: int = 0,
    halt_evaluation_at: int = 0,
    halt_in: int = -1,
) -> Job:
    """Sorts made-up numbers into three classes."""
    return Job(
        name="tiny",
        model=Perceptron(width, dropout),
        task=Labels(scale),
        data=Spoiled(dict.fromkeys(spoil, factor), halve, halt_at, halt_evaluation_at, halt_in),
        steps=steps,
        batch=Batch(total=batch),
        optimizer=Optimizer(learning_rate=learning_rate, ema=ema),
        schedule=Schedule(warmup=min(2, steps - 1)),
        precision=precision,
        dtypes=dtypes,
        layout=layout,
        evaluation=evaluation,
        checkpoints=checkpoints,
        guard=guard,
    )


def row_by_row(
    steps: int = 16,
    layout: Layout = Layout(),  # noqa: B008
    evaluation: Evaluation = Evaluation(every=8),  # noqa: B008
    checkpoints: Checkpoints = Checkpoints(every=4),  # noqa: B008
) -> Job:
    """Does the same without batch norm and dropout."""
    made = job(steps, layout=layout, evaluation=evaluation, checkpoints=checkpoints)
    return replace(made, model=RowByRow())
