"""Rehearsal: a few steps of a job with a slice's mesh on virtual CPU devices.

The real job is checked, traced and its memory counted; then a shrunk one with the same layout runs the
programs of training: steps, an evaluation batch, saving and restoring a checkpoint.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.chips import Slice
from systolic.core.errors import LayoutError, RunError
from systolic.core.units import duration, gibibytes
from systolic.job import Batch, Job, Split
from systolic.runs import CheckpointStore
from systolic.runs.weights import plain_parameters
from systolic.setup import Setup, set_up
from systolic.steps.machine import LocalDevices
from systolic.steps.programs import evaluation_rows, jit_evaluate, jit_train, training
from systolic.steps.step_functions import StepFunctions
from systolic.steps.target import MeshTarget
from systolic.training.evaluate import evaluate
from systolic.training.ledger import Ledger, Spent
from systolic.training.programs import CompiledStep

STEPS = 3
"""Number of steps; the last one starts from the restored checkpoint."""

WHOLE = "whole"
"""Text of the spec of an array that is whole on every device."""

NOT_CHECKED = "speed, memory in use and the slice's own compiler and kernels"

Say = Callable[[str, str], None]
"""Callback for each check that passed: its name, and its result in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedArray:
    """Array of the real job, with one device's share of it."""

    path: str
    shape: tuple[int, ...]
    spec: str
    """Mesh axes of each dim: ``fsdp, tensor``; ``-`` for a dim that is not split."""
    bytes_per_device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedArrays:
    """Placement of the arrays of the real job."""

    num_parameters: int
    parameters: Sequence[PlacedArray]
    """Arrays, largest first."""
    batch: Sequence[PlacedArray]
    bytes_per_device: Mapping[str, int]
    """Kind (parameters, optimizer, other, batch) to bytes on each device."""
    whole_share: float
    """Share of a device's parameter bytes that no mesh axis splits."""
    notes: Sequence[str]
    """Notes on kernels from tracing for the slice."""


def rehearse(job: Job, on: Slice, say: Say, workers: int = 0) -> dict[str, Any]:
    """Checks a job for a slice and runs a shrunk one on as many virtual devices; returns the record.

    Needs a process with ``on.num_devices`` CPU devices.

    Raises:
        LayoutError: an axis does not divide the slice, the batch, the model or an example, or the
            weights and optimizer state alone exceed the memory of a device.
        OptionError: the warm-up takes all steps of the job.
        DataError: the data is empty or damaged.
        RunError: a step, the evaluation or the checkpoint failed.
    """
    start = time.perf_counter()
    machine = LocalDevices(
        devices=jax.devices("cpu"),
        platform="cpu",
        kind="virtual cpu",
        peak_bf16_flops_per_second=None,
    )
    job = job.for_slice(on)
    job.schedule.check_steps(job.steps)
    shape = " x ".join(f"{name} {size}" for name, size in job.layout.mesh_shape.items() if size > 1)
    crossing = f", {job.layout.slices.value} across {on.num_slices} slices"
    say(
        "layout",
        f"{shape or 'one device'}{crossing if on.num_slices > 1 else ''}; batch {job.batch.resolve(job.layout)} divides",
    )
    # cuDNN cannot be traced without a GPU.
    platform = "cpu" if on.platform == "gpu" else on.platform
    steps = StepFunctions(job, MeshTarget.of(job, platform, machine.devices))
    spread = spread_of(steps)
    _check_memory(spread, on)
    say(
        "model",
        f"{spread.num_parameters:,} parameters, traced for {on.platform} in {job.precision.value}",
    )
    small = shrunk(job, steps)
    setup = set_up(small, machine)
    say(
        "shrunk",
        f"{setup.steps.network.num_parameters:,} parameters, batch {setup.steps.batch_size}, same layout and code",
    )
    result = _Stage(setup=setup, say=say, workers=workers).run()
    return {
        "slice": on.name,
        "devices": on.num_devices,
        "layout": job.layout.mesh_shape,
        "precision": job.precision.value,
        "batch_size": steps.batch_size,
        **asdict(spread),
        "rehearsed": result,
        "not_checked": NOT_CHECKED,
        "seconds": time.perf_counter() - start,
    }


def spread_of(steps: StepFunctions) -> PlacedArrays:
    """Placement of the real train step's arrays, from its trace; computes nothing.

    Raises:
        LayoutError: the step does not fit the layout.
    """
    state, batch = steps.abstract_state, steps.abstract_batch()
    jax.eval_shape(steps.train, state, batch)
    parameters = [_part(path, array) for path, array in state.params.items()]
    kinds = {
        "parameters": state.params,
        "optimizer": state.optimizer,
        "other": (state.model_state, state.ema, state.scale, state.rates),
        "batch": batch,
    }
    held = sum(part.bytes_per_device for part in parameters)
    whole = sum(part.bytes_per_device for part in parameters if part.spec == WHOLE)
    return PlacedArrays(
        num_parameters=steps.network.num_parameters,
        parameters=sorted(parameters, key=lambda part: -math.prod(part.shape)),
        batch=[_part(name, array) for name, array in batch.items()],
        bytes_per_device={
            kind: sum(map(_bytes, jax.tree.leaves(arrays))) for kind, arrays in kinds.items()
        },
        whole_share=whole / max(held, 1),
        notes=tuple(steps.target.notes),
    )


def shrunk(job: Job, steps: StepFunctions) -> Job:
    """The job in the smallest sizes that its layout divides."""
    layout = job.layout
    batch = layout.batch_ways * layout.accumulate
    if layout.pipeline > 1:
        batch *= layout.num_microbatches(steps.batch_size // layout.accumulate)
    return replace(
        job,
        model=job.model.shrink(layout),
        data=job.data.shrink(layout),
        batch=Batch(total=batch),
        steps=STEPS,
        schedule=replace(job.schedule, warmup=job.schedule.warms(STEPS)),
    )


@dataclass(kw_only=True)
class _Stage:
    """The shrunk job on the virtual devices."""

    setup: Setup
    say: Say
    workers: int

    def run(self) -> dict[str, Any]:
        """Runs steps, a checkpoint, a step from it, and an evaluation batch."""
        steps, ledger = self.setup.steps, Ledger()
        program = CompiledStep("train", jit_train(steps), ledger, lambda *_: None)
        feed = training(self.setup.job, steps, self.workers)
        try:
            init = jax.jit(steps.init, out_shardings=steps.shardings)
            state = init(jax.random.key(self.setup.job.seed))
            losses = []
            for _ in range(STEPS - 1):
                state, loss = self._step(program, state, feed, len(losses) + 1)
                losses.append(loss)
            state = self._save_and_restore(state, feed)
            state, loss = self._step(program, state, feed, STEPS)
            losses.append(loss)
        finally:
            feed.close()
        if program.recompiles:
            raise RunError(
                f"the train step was compiled {1 + program.recompiles} times in {STEPS} steps; give every batch the same shapes"
            )
        text = ", ".join(f"{loss:.4g}" for loss in losses)
        self.say("steps", f"loss {text}; compiled once, in {duration(ledger.spent(Spent.compile))}")
        metrics = self._evaluate(state)
        return {
            "num_parameters": steps.network.num_parameters,
            "total_parameters": plain_parameters(steps),
            "batch_size": steps.batch_size,
            "losses": losses,
            "metrics": metrics,
        }

    def _step(self, program: CompiledStep, state: Any, feed: Any, number: int) -> tuple[Any, float]:
        state, metrics = program(state, next(feed))
        loss = float(metrics["loss"])
        if not math.isfinite(loss) or not math.isfinite(float(metrics["grad_norm"])):
            raise RunError(
                f"step {number} of the rehearsal has loss {loss:.4g} and gradient norm {float(metrics['grad_norm']):.4g}; check the data and the loss of the recipe"
            )
        return state, loss

    def _save_and_restore(self, state: Any, feed: Any) -> Any:
        """Saves and restores a checkpoint; returns the restored state, with the data at its position."""
        with tempfile.TemporaryDirectory(prefix="systolic-rehearsal-") as folder:
            with CheckpointStore(Path(folder)) as store:
                kept = self.setup.steps.saved(state)
                store.save(STEPS - 1, kept, extra={"data": feed.get_state()})
                saved = store.wait()
                steps = self.setup.steps
                restored = store.restore(steps.saved(steps.abstract_state))
            if not same(kept, restored.state):
                raise RunError(
                    "the restored checkpoint differs from the saved state; please report this with the recipe"
                )
            feed.set_states([extra["data"] for extra in restored.extras])
            size = gibibytes(saved.num_bytes) if saved is not None else "nothing"
            self.say("checkpoint", f"{size} saved and restored, every bit the same")
        frozen = {p: state.model_state[p] for p in self.setup.steps.network.frozen}
        whole = {**restored.state.model_state, **frozen}
        return self.setup.steps.with_rates(replace(restored.state, model_state=whole))

    def _evaluate(self, state: Any) -> dict[str, float]:
        job, steps = self.setup.job, self.setup.steps
        split = next((s for s in (Split.validation, Split.test) if job.data.size(s) != 0), None)
        if split is None:
            self.say("evaluation", "none: the data has no validation or test split")
            return {}
        arguments = (job, steps, jit_evaluate(steps), state.evaluated, state.model_state)
        metrics = evaluate(*arguments, split, evaluation_rows(job, steps))
        wanted = job.evaluation.metric
        if wanted not in metrics:
            raise RunError(
                f"evaluation.metric {wanted!r} is not reported; choose one of {', '.join(sorted(metrics))}"
            )
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say("evaluation", f"one {split.value} batch: {text}")
        return metrics


def same(left: Any, right: Any) -> bool:
    """Whether two trees of arrays hold the same bits."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(_raw(a) == _raw(b) for a, b in pairs)


def _raw(array: Any) -> bytes:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _check_memory(spread: PlacedArrays, on: Slice) -> None:
    memory, devices = on.chip.hbm_bytes, on.chip.devices_per_chip or 1
    kinds = ("parameters", "optimizer", "other")
    needed = sum(spread.bytes_per_device[kind] for kind in kinds)
    if memory is not None and needed > memory // devices:
        raise LayoutError(
            f"weights and optimizer state need {gibibytes(needed)} on each device and {on.name} has {gibibytes(memory // devices)}; split more ways with layout.fsdp or layout.tensor, or take a larger slice"
        )


def _part(path: str, array: Any) -> PlacedArray:
    """Placement of a ShapeDtypeStruct that carries its sharding."""
    spec = array.sharding.spec
    padded = list(spec) + [None] * (len(array.shape) - len(spec))
    dims = ["-" if a is None else a if isinstance(a, str) else "+".join(a) for a in padded]
    return PlacedArray(
        path=path,
        shape=array.shape,
        spec=", ".join(dims) if any(dim != "-" for dim in dims) else WHOLE,
        bytes_per_device=_bytes(array),
    )


def _bytes(array: Any) -> int:
    """Bytes of one device's share of an array."""
    held = array.sharding.shard_shape(array.shape)
    return math.prod(held) * array.dtype.itemsize
