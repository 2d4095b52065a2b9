"""Replay of the train step on the batch of a bad step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.core.errors import DataError
from systolic.runs import CheckpointStore, Run
from systolic.runs.access import Access
from systolic.setup import Setup


def replay(setup: Setup, run: Run, path: Path) -> dict[str, Any]:
    """Loads ``bad/step-N.npz`` and makes one train step on it; the run does not change.

    The weights are those of the newest checkpoint before the step, or the initial ones, so the loss
    is near the run's, and equal where the step came right after the checkpoint.

    Returns:
        step, weights (the step they are of), metrics (of the train step), arrays (name to a
        description) and not_finite (batch arrays and metrics with NaN or infinity).

    Raises:
        DataError: the file is no batch of this job.
    """
    batch = _load(setup, path)
    number = path.stem.rpartition("-")[2]
    step = int(number) if number.isdigit() else setup.job.steps
    with CheckpointStore(run.checkpoints, access=Access.read) as store:
        before = [saved for saved in store.steps() if saved < step]
        if before:
            wanted = setup.steps.saved(setup.steps.abstract_state)
            restored = store.restore(wanted, step=before[-1])
            weights, state = restored.step, setup.whole(restored.state)
        else:
            weights, state = 0, setup.first_state()
    placed = {
        name: jax.device_put(array, setup.steps.batch_shardings[name])
        for name, array in batch.items()
    }
    _, outputs = setup.jitted_train(state, placed)
    metrics = {name: float(value) for name, value in jax.device_get(outputs).items()}
    broken = [f"batch {name}" for name, array in batch.items() if not np.isfinite(array).all()]
    broken += [name for name, value in metrics.items() if not np.isfinite(value)]
    return {
        "step": step,
        "weights": weights,
        "metrics": metrics,
        "arrays": {name: _text(array) for name, array in batch.items()},
        "not_finite": broken,
    }


def _load(setup: Setup, path: Path) -> dict[str, np.ndarray]:
    wanted = setup.steps.abstract_batch()
    try:
        with np.load(path) as file:
            batch = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a batch that systolic train kept: {error}") from error
    shapes = {name: array.shape for name, array in batch.items()}
    if shapes != {name: array.shape for name, array in wanted.items()}:
        raise DataError(f"{path} is not a batch of {setup.job.name}; give one of its own run")
    return batch


def _text(array: np.ndarray) -> str:
    shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
    finite = array[np.isfinite(array)]
    missing = array.size - finite.size
    spread = f"{finite.min():g} to {finite.max():g}" if finite.size else "no number"
    return f"{shape} {spread}" + (f", {missing} not finite" if missing else "")
