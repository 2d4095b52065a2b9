"""The weights that a job begins with, streamed from a model in files into the shards of the job's state."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from systolic.artifact.run import JOB
from systolic.artifact.weights import Weights, begin_with
from systolic.core.errors import OptionError, RunError
from systolic.interop.source import open_source
from systolic.models.adapters import BASE, CODES, SCALES, compact_base
from systolic.steps.steps import StepFunctions


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOrigin:
    """Where a job's first weights are from, as its run keeps it."""

    path: str
    kind: str
    """Format: ``hugging-face``, ``gguf``, ``bundle`` or ``run``."""
    fingerprint: str | None
    """Of the files; None for a run, whose checkpoints hold all weights."""

    def require(self, before: Mapping[str, str | None], run: Path) -> None:
        """Refuses other files than those that a run began with, as its job.json has them.

        Raises:
            RunError: their fingerprints differ.
        """
        if self.fingerprint != before["fingerprint"]:
            raise RunError(
                f"{run} began with the weights of {before['path']} ({before['fingerprint']}), and {self.path} has others ({self.fingerprint}); restore that model, or train a new run"
            )


def starting_weights(path: Path, steps: StepFunctions) -> tuple[Weights, StartOrigin]:
    """The weights at a path for a job: all that train, or all that are frozen.

    Args:
        path: A Hugging Face folder, a Bundle, a GGUF file, or a run.
        steps: The programs of the job, on its mesh.

    Raises:
        NotFoundError: nothing is there.
        OptionError: its model is another than the job's.
        DataError: a file is damaged, or a tensor has another shape than the job's.
    """
    if (path / JOB).is_file():
        return _of_run(path, steps)
    source = open_source(path)
    if source.model != steps.job.model:
        raise OptionError(
            f"{path} holds another model than {steps.job.name} trains; give the job the model of its config.json"
        )
    origin = StartOrigin(path=str(path), kind=source.kind, fingerprint=source.fingerprint())
    return _weights(source.arrays(_like(steps)), steps), origin


def _of_run(path: Path, steps: StepFunctions) -> tuple[Weights, StartOrigin]:
    if steps.job.adapter:
        raise OptionError(
            f"adapters begin with a model in files, and {path} is a run; write it first with systolic export {path} --to bundle --out DIR, then give --from DIR"
        )
    return begin_with(path, steps), StartOrigin(path=str(path), kind="run", fingerprint=None)


def _like(steps: StepFunctions) -> dict[str, Any]:
    """Shape, dtype and sharding of each of the plain model's variables, as the job keeps or first reads it."""
    state = steps.abstract_state
    found: dict[str, Any] = {**state.params, **state.model_state}
    if not steps.job.adapter:
        return found
    plain: dict[str, Any] = {}
    for path, leaf in state.model_state.items():
        home, _, last = path.rpartition("/")
        beside = steps.is_adapted(home)
        if not beside:
            plain[path] = leaf
        elif last == BASE:
            plain[home] = leaf
        elif last == CODES:
            scales = state.model_state[f"{home}/{SCALES}"]
            plain[home] = jax.ShapeDtypeStruct(leaf.shape, scales.dtype, sharding=leaf.sharding)
    return plain


def _weights(arrays: Mapping[str, jax.Array], steps: StepFunctions) -> Weights:
    """Arrays of the plain model by their places in the job's state."""
    params, rest = {}, {}
    left = dict(arrays)
    for path in arrays:
        value = left.pop(path)  # so that a matrix is freed once its 4 bits are there
        if steps.is_adapted(path):
            rest |= _beside(path, value, steps)
        elif path in steps.network.params:
            params[path] = value
        else:
            rest[path] = value
    return Weights(step=0, params=params, model_state=rest, skipped=[])


def _beside(path: str, value: jax.Array, steps: StepFunctions) -> dict[str, jax.Array]:
    """A frozen matrix as its adapter has it."""
    if f"{path}/{BASE}" in steps.network.model_state:
        return {f"{path}/{BASE}": value}
    placed = steps.shardings.model_state
    names = (f"{path}/{CODES}", f"{path}/{SCALES}")
    axes = steps.network.frozen[names[0]]
    assert axes is not None  # only matrices with named dims have adapters
    pack = jax.jit(
        partial(compact_base, axes=axes), out_shardings=tuple(placed[name] for name in names)
    )
    return dict(zip(names, pack(value), strict=True))
