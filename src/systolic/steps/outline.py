"""Parameters and FLOPs of a job from a trace over no devices."""

from dataclasses import replace

from jax.sharding import AbstractMesh, AxisType

from systolic.job import Batch, Job, Layout
from systolic.steps.steps import StepFunctions
from systolic.steps.target import MeshTarget


def count(job: Job) -> tuple[int, float]:
    """Elements of all parameters and matmul FLOPs of one example's forward pass, on one device."""
    layout = Layout(fsdp=1)
    names = tuple(layout.mesh_shape)
    mesh = AbstractMesh(
        tuple(layout.mesh_shape.values()), names, axis_types=(AxisType.Auto,) * len(names)
    )
    alone = replace(job, layout=layout, batch=Batch(total=1))
    target = MeshTarget(platform="tpu", layout=layout, dtype="bfloat16", mesh=mesh)
    steps = StepFunctions(alone, target)
    return steps.network.num_parameters, float(steps.forward_flops)
