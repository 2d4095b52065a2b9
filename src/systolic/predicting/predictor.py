"""A model's program over rows: one executable for each bucket."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from systolic.predicting.folding import FoldedProgram
from systolic.predicting.forms import Arrays, Form
from systolic.predicting.rows import Bucket, Row


class Predictor:
    """Weights with the programs that turn rows into outputs.

    Args:
        form: How rows make a batch.
        params: Weights.
        model_state: Other variables.
    """

    def __init__(self, form: Form, params: Arrays, model_state: Arrays) -> None:
        self.form = form
        self._weights = (params, model_state)
        target = form.steps.target
        self._options = target.compiler_options
        self._jitted = jax.jit(form.function(), compiler_options=self._options)
        self._folds = target.platform == "cpu" and target.mesh.size == 1
        self._constants: dict[str, list[jax.Array]] = {}
        self._compiled: dict[Bucket, Callable[[Arrays], Any]] = {}

    def compile(self, bucket: Bucket) -> float:
        """Makes the program of a bucket; seconds of tracing and compiling it, 0 where it was made before."""
        if bucket in self._compiled:
            return 0.0
        start = time.perf_counter()
        batch = self.form.abstract(bucket)
        if self._folds:
            folded = FoldedProgram(self.form.function(), self._weights, batch)
            if folded.key not in self._constants:
                self._constants[folded.key] = folded.constants(self._weights)
            given: Any = (self._constants[folded.key],)
            lowered = jax.jit(folded, compiler_options=self._options).lower(*given, batch)
        else:
            given = self._weights
            lowered = self._jitted.lower(*given, batch)
        self._compiled[bucket] = partial(lowered.compile(), *given)
        return time.perf_counter() - start

    def outputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Outputs of a bucket's program by name."""
        return self._jitted.eval_shape(*self._weights, self.form.abstract(bucket))

    def __call__(self, rows: Sequence[Row], bucket: Bucket) -> list[dict[str, np.ndarray]]:
        """Outputs of each row by name; compiles the bucket's program if that was not done before."""
        self.compile(bucket)
        where = self.form.steps.batch_shardings
        batch = {
            name: jax.device_put(array, where[name])
            for name, array in self.form.batch(rows, bucket).items()
        }
        made = jax.device_get(self._compiled[bucket](batch))
        # A copy, so that an answer does not keep the whole batch in memory.
        return [
            {name: np.array(array[index]) for name, array in made.items()}
            for index in range(len(rows))
        ]

    def up(self, rows: int) -> int:
        """The least number of rows, at least ``rows``, that the devices divide."""
        return -(-rows // self.form.ways) * self.form.ways
