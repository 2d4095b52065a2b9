"""A source's weights on the mesh of a job's programs."""

from typing import Any

import jax

from systolic.artifact.weights import Weights
from systolic.core.errors import DataError
from systolic.formats.source import Source
from systolic.steps.steps import StepFunctions


def weights_of(source: Source, steps: StepFunctions) -> Weights:
    """Weights in the dtypes and shardings of the programs' state; the step is 0.

    Variables that are no parameters and that the files lack, such as counters, are those of a new model.

    Raises:
        DataError: a parameter is missing or has another shape than the model's.
    """
    state: Any = steps.abstract_state
    arrays = source.arrays({**state.params, **state.model_state})
    needed = [*state.params, *steps.network.frozen]
    missing = next((path for path in needed if path not in arrays), None)
    if missing is not None:
        raise DataError(f"{source.path} lacks {missing}; import the model again")
    rest = {path: arrays[path] for path in state.model_state if path in arrays}
    if new := sorted(set(state.model_state) - set(rest)):
        init = jax.jit(lambda key: {path: steps.network.init(key)[1][path] for path in new})
        rest |= init(jax.random.key(0))
    params = {path: arrays[path] for path in state.params}
    return Weights(step=0, params=params, model_state=rest, skipped=[])
