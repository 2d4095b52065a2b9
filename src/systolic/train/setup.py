"""From a job and the devices at hand to the programs that train it; every check before any compile."""

from dataclasses import dataclass
from typing import Any

import jax

from systolic.core.errors import DataError
from systolic.job import Job, Split
from systolic.steps.mesh import make_mesh
from systolic.steps.steps import Steps
from systolic.steps.target import MeshTarget
from systolic.train.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A job made definite for the machine."""

    job: Job
    machine: Machine
    steps: Steps

    @property
    def unit(self) -> str:
        """What throughput counts: ``tokens`` or ``examples``."""
        return "tokens" if "tokens" in self.job.data.fields() else "examples"

    @property
    def units_per_step(self) -> int:
        """Tokens or examples in a step's batch, padding included."""
        fields = self.job.data.fields()
        return self.steps.batch_size * (fields["tokens"].shape[0] if "tokens" in fields else 1)

    def mfu(self, step_seconds: float) -> float | None:
        """Model FLOPs over the published bf16 peak; ``None`` where no peak is published."""
        peak = self.machine.peak_bf16_flops_per_second
        return self.steps.step_flops / (step_seconds * peak) if peak else None


def set_up(job: Job, machine: Machine | None = None) -> Setup:
    """Fits the layout to the devices and checks batch, model and data against it.

    Raises:
        LayoutError: an axis does not divide the devices, the batch or the model.
        DataError: the training split is empty.
    """
    machine = machine or Machine.here()
    job = job.on(len(machine.devices))
    precision = job.precision.resolve(machine.platform)
    if job.data.size(Split.train) == 0:
        raise DataError(f"the training split of {job.name} is empty; give the recipe other data")
    target = MeshTarget(
        platform=machine.platform,
        layout=job.layout,
        dtype=precision.dtype,
        mesh=make_mesh(job.layout, machine.devices),
    )
    return Setup(job=job, machine=machine, steps=Steps(job, target))


def jit_train(steps: Steps) -> Any:
    """The train step, jitted: (state, batch) -> (state, metrics); the state's memory is reused."""
    return jax.jit(
        steps.train,
        donate_argnums=0,
        in_shardings=(steps.shardings, steps.batch_shardings),
        out_shardings=(steps.shardings, None),
    )


def jit_evaluate(steps: Steps) -> Any:
    """The eval step, jitted: (params, rest, batch) -> sums."""
    return jax.jit(steps.evaluate)
