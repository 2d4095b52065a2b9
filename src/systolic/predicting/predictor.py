"""A model's program over rows: one executable for each bucket."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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
        self._params, self._model_state = params, model_state
        options = form.steps.target.compiler_options
        self._jitted = jax.jit(form.function(), compiler_options=options)
        self._compiled: dict[Bucket, Any] = {}

    def compile(self, bucket: Bucket) -> float:
        """Makes the program of a bucket; seconds of tracing and compiling it, 0 where it was made before."""
        if bucket in self._compiled:
            return 0.0
        start = time.perf_counter()
        lowered = self._jitted.lower(self._params, self._model_state, self.form.abstract(bucket))
        self._compiled[bucket] = lowered.compile()
        return time.perf_counter() - start

    def outputs(self, bucket: Bucket) -> dict[str, jax.ShapeDtypeStruct]:
        """Outputs of a bucket's program by name."""
        return self._jitted.eval_shape(self._params, self._model_state, self.form.abstract(bucket))

    def __call__(self, rows: Sequence[Row], bucket: Bucket) -> list[dict[str, np.ndarray]]:
        """Outputs of each row by name; compiles the bucket's program if that was not done before."""
        self.compile(bucket)
        where = self.form.steps.batch_shardings
        batch = {
            name: jax.device_put(array, where[name])
            for name, array in self.form.batch(rows, bucket).items()
        }
        made = jax.device_get(self._compiled[bucket](self._params, self._model_state, batch))
        # A copy, so that an answer does not keep the whole batch in memory.
        return [
            {name: np.array(array[index]) for name, array in made.items()}
            for index in range(len(rows))
        ]

    def up(self, rows: int) -> int:
        """The least number of rows, at least ``rows``, that the devices divide."""
        return -(-rows // self.form.ways) * self.form.ways
