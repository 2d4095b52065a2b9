"""Digits with a fault to be found in a profile: batches that are late, a batch of another shape."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from systolic.data.digits import Digits
from systolic.models.cnn.config import CNN

from systolic.job import Data, Field, Job, Read, Split
from systolic.recipes.digits import PIXELS, digits


@dataclass(frozen=True, kw_only=True)
class Faulty(Data):
    """Digits whose training batches come ``late`` by so many seconds; the batch numbered ``odd`` is short."""

    late: float = 0.0
    odd: int | None = None
    good: Digits = field(default_factory=Digits)

    def fields(self) -> Mapping[str, Field]:
        return self.good.fields()

    def size(self, split: Split) -> int | None:
        return self.good.size(split)

    def open(self, read: Read) -> Any:
        batches = self.good.open(read)
        return Faults(batches, self) if read.split is Split.train else batches


class Faults:
    """Batches with their faults."""

    def __init__(self, batches: Any, data: Faulty):
        self.batches, self.data, self.number = batches, data, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self.batches)
        self.number += 1
        time.sleep(self.data.late)
        if self.number == self.data.odd:
            batch = {name: array[: len(array) // 2] for name, array in batch.items()}
        return batch

    def get_state(self) -> bytes:
        return json.dumps([self.number, self.batches.get_state().decode()]).encode()

    def set_state(self, state: bytes) -> None:
        self.number, inner = json.loads(state)
        self.batches.set_state(inner.encode())

    def close(self) -> None:
        self.batches.close()


def small(data: Data) -> Job:
    """A network so small that its profile is."""
    return replace(digits(steps=20), model=CNN(channels=(4,), pixels=PIXELS), data=data)


def late() -> Job:
    """Every batch takes 0.3 seconds more than it must."""
    return small(Faulty(late=0.3))


def odd() -> Job:
    """A step with half a batch in the middle of the trace."""
    return small(Faulty(odd=13))
