"""Answers of models of arrays for the rows of tables."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, NotFoundError, OptionError
from systolic.data.arrays import Arrays
from systolic.data.audio.recordings import Recordings
from systolic.data.input_files import InputFiles
from systolic.data.tables import TableInputs
from systolic.data.text.sentences import Sentences
from systolic.data.text.text_data import TextData
from systolic.inference.files import named
from systolic.inference.forms import Arrays as Given
from systolic.inference.forms import FixedForm
from systolic.inference.predictor import Predictor
from systolic.inference.rows import Bucket, Row
from systolic.job import Task
from systolic.job.data import MASK, Data
from systolic.runs.weights import Weights
from systolic.steps.steps import StepFunctions
from systolic.steps.tasks.arrays import ArrayClassification

ROWS = 256
"""Most rows of a call."""


def are_rows(data: Data) -> bool:
    """Whether a job's examples come from no files of their own, so that new ones are rows of tables."""
    others = TextData | Recordings | InputFiles | Sentences
    return type(data).load is Data.load and not isinstance(data, others)


class TableForm(FixedForm):
    """The task's outputs of rows; of a task that defines none, what its model returns when the loss is computed."""

    def function(self) -> Callable[[Given, Given, Given], dict[str, jax.Array]]:
        """See :class:`~systolic.inference.forms.Form`."""
        task = self.steps.job.task
        return self.steps.predict if type(task).outputs is not Task.outputs else self._returned

    def _returned(self, params: Given, model_state: Given, batch: Given) -> dict[str, jax.Array]:
        network = self.steps.network
        module = network.module(network.cast(params), model_state, train=False)
        watched = _Watched(module)
        task: Any = self.steps.job.task
        task.terms(watched, batch, False)
        size, found = batch[MASK].shape[0], dict[str, jax.Array]()
        for path, value in jax.tree_util.tree_leaves_with_path(watched.returned):
            if isinstance(value, jax.Array) and value.ndim and value.shape[0] == size:
                keys = [one for one in path if isinstance(one, jax.tree_util.DictKey)]
                name = "_".join(str(one.key) for one in keys)
                found.setdefault(name or ("output" if not found else f"output_{len(found)}"), value)
        if not found:
            name = type(self.steps.job.task).__name__
            raise OptionError(
                f"the task {name} calls its model in a way of its own, so its answers are not known; give it a method outputs(self, model, batch) that returns arrays by name"
            )
        return found

    def inputs(self, weights: Weights) -> TableInputs:
        """The fields that the outputs depend on; others, such as labels, are not read."""
        data = self.steps.job.data
        batch = self.abstract(Bucket(rows=self.ways))
        given = weights.params, weights.model_state
        closed = jax.make_jaxpr(self.function())(*given, batch)
        from jax.interpreters.partial_eval import dce_jaxpr

        _, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        names = sorted(batch)  # in which order a dict is flattened
        read = {name for name, one in zip(names, used[-len(names) :], strict=True) if one} - {MASK}
        fields = data.fields()
        return TableInputs(
            fields={name: field for name, field in fields.items() if name in read},
            unread=tuple(name for name in fields if name not in read),
            columns=dict(data.columns) if isinstance(data, Arrays) else None,
        )


class _Watched:
    """A module that remembers what its calls returned."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.returned: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._module(*args, **kwargs)
        self.returned.append(made)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def rows_of(
    steps: StepFunctions, weights: Weights, files: list[Path]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """``rows``, the answers for each row of a file as plain values, or for a file that is no table of the model's inputs ``error``, one line.

    Raises:
        OptionError: the task's outputs are not known.
    """
    form = TableForm(steps)
    inputs = form.inputs(weights)
    run = Predictor(form, weights.params, weights.model_state)
    for file in files:
        try:
            yield file, {"rows": list(_answers(steps, run, inputs.rows(file)))}
        except (DataError, NotFoundError) as error:
            yield file, {"error": str(error)}


def _answers(
    steps: StepFunctions, run: Predictor, rows: Iterator[dict[str, np.ndarray]]
) -> Iterator[dict[str, Any]]:
    while group := [Row(arrays=one) for one in islice(rows, ROWS)]:
        size = run.up(min(ROWS, 1 << max(len(group) - 1, 0).bit_length()))
        for made in run(group, Bucket(rows=size)):
            yield _plain(steps, made)


def _plain(steps: StepFunctions, output: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Plain values; of a classification with the class and its probability."""
    task, names = steps.job.task, steps.job.data.labels()
    made: dict[str, Any] = {}
    if isinstance(task, ArrayClassification) and (logits := output[task.output]).ndim == 1:
        best = int(logits.argmax())
        chances = np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float32)))
        made = {
            "label": names[best] if best < len(names) else best,
            "probability": float(chances[best]),
        }
    wide = {
        name: one.astype(np.float32) if one.dtype == jnp.bfloat16 else one
        for name, one in output.items()
    }
    return made | named(wide, names)
