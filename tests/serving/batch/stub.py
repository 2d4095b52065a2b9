"""A model of numbers: twice each number, with calls that wait, fail or die when they are told to."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from systolic.compiling.program_store import ReadyProgram
from systolic.core.errors import DataError
from systolic.inference.predictor import Example, Output
from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.buckets import BatchOptions, InputLimits
from systolic.serving.batch.intake import Intake
from systolic.serving.batch.model import DynamicBatches
from systolic.serving.facts import AnswerFacts, BatchFacts, CompileFacts
from systolic.serving.request import ANY, BYTES, ArraySpec, ModelKind


class Numbers(Intake):
    """Texts of numbers; one has as many positions as its number says."""

    kind = ModelKind.tensors

    def __init__(self, longest: int | None = None) -> None:
        super().__init__(InputLimits())
        self.form: Any = SimpleNamespace(longest=longest, ways=1, steady=False, linear=False)
        self.inputs = (ArraySpec(name="number", dtype=BYTES, shape=(ANY,)),)

    def parts(self, inputs: Mapping[str, np.ndarray]) -> Sequence[Callable[[], Sequence[Example]]]:
        return [lambda value=value: [self._read(value)] for value in inputs["number"]]

    def _read(self, value: Any) -> Example:
        if value == b"slow":
            time.sleep(0.2)
            value = b"1"
        if value == b"bad":
            raise DataError("the number is bad; send a good one")
        number = int(value)
        return Example(rows=[Row(arrays={"number": np.array(number)}, length=number)])

    def outputs(self, of: Mapping[str, Any]) -> Sequence[ArraySpec]:
        return [ArraySpec(name="twice", dtype="int64", shape=(ANY,))]

    def answer(self, example: Example, outputs: Sequence[Output]) -> dict[str, Any]:
        return dict(outputs[0])


class Twice:
    """A predictor."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.going = threading.Event()
        self.going.set()
        self.does: Callable[[list[int]], None] = lambda numbers: None

    def compile(self, bucket: Bucket) -> ReadyProgram:
        return ReadyProgram(compiled=None, cached=False, seconds={"trace": 0.1, "compile": 0.4})

    def outputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        return {"twice": jax.ShapeDtypeStruct((bucket.rows,), "int32")}

    def __call__(self, rows: Sequence[Row], bucket: Bucket) -> list[dict[str, np.ndarray]]:
        numbers = [int(row.arrays["number"]) for row in rows]
        if numbers:
            self.calls.append((str(bucket), numbers))
            assert self.going.wait(10)
            self.does(numbers)
        return [{"twice": np.array(2 * number)} for number in numbers]


@dataclass
class Told:
    """A watcher that remembers."""

    compiles: list[CompileFacts] = field(default_factory=list)
    batches: list[BatchFacts] = field(default_factory=list)
    answers: list[AnswerFacts] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    waiting: Callable[[], int] = lambda: 0

    def compiled(self, facts: CompileFacts) -> None:
        self.compiles.append(facts)

    def opened(self, waiting: Callable[[], int]) -> None:
        self.waiting = waiting

    def died(self, reason: str) -> None:
        self.deaths.append(reason)

    def ran(self, facts: BatchFacts) -> None:
        self.batches.append(facts)

    def answered(self, facts: AnswerFacts) -> None:
        self.answers.append(facts)


def numbers(*values: int | str) -> dict[str, np.ndarray]:
    """A request."""
    made = np.empty(len(values), object)
    made[:] = [str(value).encode() for value in values]
    return {"number": made}


def model(
    predictor: Any, told: Told | None = None, longest: int | None = None, **options: Any
) -> DynamicBatches:
    """A started model with one worker."""
    chosen = BatchOptions(**{"workers": 1, **options})
    made = DynamicBatches("numbers", Numbers(longest), predictor, chosen, told)
    made.start()
    return made
