"""Anyone's function, traced on a mesh of a slice that is not there."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from systolic.aot.program import FunctionProgram, Traced, name_of
from systolic.chips import Slice


def trace_function(program: FunctionProgram, on: Slice, devices: Sequence[Any]) -> Traced:
    """See :class:`FunctionProgram`."""
    mesh = _mesh(program.mesh, devices)
    leaves, tree = jax.tree.flatten((program.args, dict(program.kwargs)))
    placed = [_placed(leaf, spec, mesh) for leaf, spec in zip(leaves, program.specs, strict=True)]
    args, kwargs = jax.tree.unflatten(tree, placed)
    function: Any = program.function
    with jax.set_mesh(mesh):
        if not callable(getattr(function, "trace", None)):
            out: dict[str, Any] = {}
            if program.out_specs is not None:
                out["out_shardings"] = jax.tree.map(
                    lambda spec: NamedSharding(mesh, spec),
                    program.out_specs,
                    is_leaf=lambda x: isinstance(x, PartitionSpec),
                )
            function = jax.jit(
                function,
                static_argnums=program.static_argnums or None,
                donate_argnums=program.donate_argnums or None,
                **out,
            )
        traced = function.trace(*args, **kwargs)
    unit, units = program.units or ("calls", 1)
    return Traced(
        traced=traced,
        mesh=mesh,
        facts={
            "name": name_of(program.function),
            "verb": "function",
            "model_flops": program.model_flops,
            "unit": unit,
            "units": units,
            "precision": None,
            "layout": {axis: int(size) for axis, size in mesh.shape.items()},
            "notes": [],
        },
    )


def _mesh(axes: Any, devices: Sequence[Any]) -> Mesh:
    from jax.experimental import mesh_utils

    names, sizes = tuple(axes), tuple(axes.values())
    if devices[0].platform == "tpu" and len(devices) > 1:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(list(devices)).reshape(sizes)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _placed(leaf: Any, spec: Any, mesh: Mesh) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    where = NamedSharding(mesh, spec if spec is not None else PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
