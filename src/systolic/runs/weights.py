"""The weights of a run, without its optimizer."""

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from systolic.core.errors import NotFoundError, OptionError, RunError
from systolic.core.files import digest
from systolic.job import Job, Mode
from systolic.runs import manifest as manifests
from systolic.runs.access import Access
from systolic.runs.checkpoint import CheckpointStore
from systolic.runs.job_record import JobRecord, check_revision, read_record
from systolic.runs.manifest import DamagedError, Leaf, Manifest
from systolic.runs.run import JOB, Run
from systolic.steps.step_functions import StepFunctions

BESIDE = ("/scales", "/inputs")
"""Ends of the paths of the scales of a matrix in fewer bits, and of the factors of its inputs."""
BITS = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}
"""Bits of an element of the dtypes of less than a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights for evaluation and generation."""

    step: int
    params: dict[str, Any]
    """The moving average where the job keeps one, else the weights."""
    model_state: dict[str, Any]
    """Other variables; those of a checkpoint are without frozen weights."""
    skipped: list[str]
    """Damaged checkpoints that were skipped, a line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Elements and bytes of arrays."""

    elements: int
    """Scales of matrices in fewer bits and factors left out: they stand for no parameter."""
    bytes_by_dtype: Mapping[str, int]


def sizes_of(variables: Mapping[str, Any]) -> WeightSizes:
    """Sizes of arrays by path."""
    elements, sizes = 0, dict[str, int]()
    for path, array in variables.items():
        elements += 0 if path.endswith(BESIDE) else array.size
        name = array.dtype.name
        bits = BITS.get(name, 8 * array.dtype.itemsize)
        sizes[name] = sizes.get(name, 0) + -(-array.size * bits // 8)
    return WeightSizes(elements=elements, bytes_by_dtype=sizes)


def plain_parameters(steps: StepFunctions) -> int:
    """Parameters of a job's model without adapters: those that train, or those that are frozen beside them."""
    network = steps.network
    frozen = {path: network.model_state[path] for path in network.frozen}
    return sizes_of(frozen).elements if steps.job.adapter else sizes_of(network.params).elements


def load(run: Run, steps: StepFunctions, which: str = "best") -> Weights:
    """Reads a checkpoint's weights onto the mesh of ``steps``.

    Args:
        run: The run.
        steps: The programs of its job on any mesh.
        which: ``best`` (the newest where none was ranked), ``last`` or a step's number. A damaged
            best or last gives way to another intact checkpoint; ``skipped`` names it.

    Raises:
        NotFoundError: no such checkpoint.
        RunError: none of them is intact.
    """
    evaluation = steps.job.evaluation
    with CheckpointStore(
        run.checkpoints, metric=evaluation.metric, mode=evaluation.mode, access=Access.read
    ) as store:
        step = _chosen(store, run, which)
        averaged = steps.shapes.ema is not None
        only = ("ema", "rest") if averaged else ("params", "rest")
        restored = store.restore(steps.saved(steps.abstract_state), step=step, only=only)
        return Weights(
            step=restored.step,
            params=restored.state.ema if averaged else restored.state.params,
            model_state=restored.state.model_state,
            skipped=[
                f"checkpoint {step} is damaged ({reason})" for step, reason in restored.skipped
            ],
        )


def _chosen(store: CheckpointStore, run: Run, which: str) -> int | str | None:
    """Checkpoint that ``which`` names, as :meth:`CheckpointStore.restore` takes it; errors as :func:`load`."""
    if store.latest_step() is None:
        raise NotFoundError(
            f"{run.path} has no checkpoint yet; train it with systolic train --resume {shlex.quote(str(run.path))}"
        )
    if which == "best":
        return "best" if store.best_step() is not None else None
    if which == "last":
        return None
    if which.isdigit():
        return int(which)
    raise OptionError(
        f"checkpoint {which!r} is neither best, last nor the number of a step; {run.path} has {', '.join(map(str, store.steps()))}"
    )


def fingerprint(path: Path, which: str = "best") -> str:
    """Digest of the weights that :func:`load` would read, by the checkpoint's own sums; reads no array.

    Raises: as :func:`load`.
    """
    record, step, manifest = _described(path, which)
    # Reading the weights says that they are damaged, and what is read in their place.
    files = {} if manifest is None else dict(manifest.files)
    return digest({"model": record.job.get("model"), "step": step, "files": files})


def step_of(path: Path, which: str = "best") -> int:
    """Training step of the checkpoint that :func:`load` would read if it is intact; errors as :func:`load`."""
    return _described(path, which)[1]


def weight_bytes(path: Path, which: str = "best") -> int:
    """Bytes of the parameters that :func:`load` would read; 0 where the checkpoint is damaged.

    Raises: as :func:`load`.
    """
    import ml_dtypes  # noqa: F401 (names dtypes for NumPy)
    import numpy as np

    _, _, manifest = _described(path, which)
    leaves = {} if manifest is None else manifest.leaves
    name = "ema" if any(leaf[0] == "ema" for leaf in leaves) else "params"
    sizes = [
        np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape)
        for at, leaf in leaves.items()
        if at[0] == name
    ]
    return sum(sizes)


def _described(path: Path, which: str) -> tuple[JobRecord, int, Manifest | None]:
    """A run's job.json, the step that ``which`` names, and its manifest unless that is damaged; errors as :func:`load`."""
    with Run.open(path) as run:
        record = read_record(run)
        rule = record.outline.evaluation
        with CheckpointStore(
            run.checkpoints, metric=rule.metric, mode=rule.mode, access=Access.read
        ) as store:
            step = _chosen(store, run, which)
            if not isinstance(step, int):
                step = store.latest_step() if step is None else store.best_step()
            assert step is not None
            try:
                return record, step, manifests.read(store.path(step))
            except DamagedError:
                return record, step, None


def begin_with(path: Path, steps: StepFunctions) -> Weights:
    """Final weights of another run, as the start of a training.

    No code of that run is executed: its arrays are read by their names and shapes.

    Args:
        path: A run, whose best checkpoint counts (the newest where none was ranked), or one of its
            checkpoints: ``RUN/checkpoints/STEP``.
        steps: The programs of the job that begins, on its mesh.

    Raises:
        NotFoundError: it is neither.
        RunError: it is of another kind of model, or of a version that read its weights differently; or the arrays have other names or shapes than the job's; names the first. Or all are damaged.
    """
    folder, step, metric, mode = _source(path, steps.job)
    with CheckpointStore(folder, metric=metric, mode=mode, access=Access.read) as store:
        if step is None and metric is not None and store.best_step() is not None:
            step = "best"
        if store.latest_step() is None:
            raise NotFoundError(f"{path} has no checkpoint yet; train it first")
        leaves = _leaves(store, [step] if isinstance(step, int) else store.steps()[::-1])
        # A moving average is what such a run is evaluated with.
        name = "ema" if any(leaf[0] == "ema" for leaf in leaves) else "params"
        ours = steps.abstract_state
        held = _as_held(
            ours.params, {path[-1]: leaf for path, leaf in leaves.items() if path[0] == name}
        )
        try:
            restored = store.restore(
                replace(ours, params=held, ema=held), step=step, only=(name, "rest")
            )
        except RunError as error:
            raise RunError(f"{path} can't begin {steps.job.name}: {error}") from error
        weights = restored.state.ema if name == "ema" else restored.state.params
        return Weights(
            step=restored.step,
            params={path: p.astype(ours.params[path].dtype) for path, p in weights.items()},
            model_state=restored.state.model_state,
            skipped=[f"checkpoint {n} is damaged ({reason})" for n, reason in restored.skipped],
        )


def _leaves(store: CheckpointStore, steps: Sequence[int]) -> Mapping[tuple[str, ...], Leaf]:
    """Leaves of the first checkpoint with an intact manifest; {} if there is none."""
    for step in steps:
        with contextlib.suppress(DamagedError):  # restoring names it
            return manifests.read(store.path(step)).leaves
    return {}


def _as_held(params: Mapping[str, Any], held: Mapping[str, Leaf]) -> dict[str, Any]:
    """Abstract weights in the dtypes of a checkpoint, which may differ from the run's."""
    import jax

    def of(path: str, leaf: Any) -> Any:
        known = held[path].dtype if path in held else ""
        dtype = known if known in ("float32", "bfloat16") else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return {path: of(path, leaf) for path, leaf in params.items()}


def _source(path: Path, job: Job) -> tuple[Path, int | str | None, str | None, Mode]:
    """Folder of checkpoints, requested step, and the metric that ranks them."""
    if (path / JOB).is_file():
        with Run.open(path) as run:
            record = read_record(run)
            _check(path, record, job)
            rule = record.outline.evaluation
            return run.checkpoints, None, rule.metric, rule.mode
    if (path / manifests.NAME).is_file() and path.name.isdigit():
        if (path.parents[1] / JOB).is_file():
            with Run.open(path.parents[1]) as run:
                _check(path, read_record(run), job)
        return path.parent, int(path.name), None, Mode.min
    what = "no file or folder"
    if path.exists():
        what = "a file" if path.is_file() else "a folder of another kind"
    raise NotFoundError(
        f"--init-from {path} is {what}; it takes a run (a directory that systolic train made) or one of its checkpoints, RUN/checkpoints/STEP, and no other format such as safetensors"
    )


def _check(path: Path, record: JobRecord, job: Job) -> None:
    """Checks from a run's job.json that its weights can start a job.

    Raises:
        RunError: they are of another kind of model, of another base width, or of a version that read them differently.
    """
    check_revision(path, record)
    model = record.outline.model
    theirs, ours = model.kind, type(job.model).__name__
    if theirs and theirs != ours:
        raise RunError(
            f"--init-from {path} holds the weights of a {theirs}, and {job.name} trains a {ours}; give a run of the same kind of model"
        )
    for name, value in job.to_json()["model"].get("mup", {}).items():
        before = (model.mup or {}).get(name, 0)
        if before != value:
            option = f"model.mup.{name.replace('_', '-')}"
            raise RunError(
                f"--init-from {path} was trained with {option} {before}, and with {value} its weights would mean something else; give --{option} {before}"
            )
