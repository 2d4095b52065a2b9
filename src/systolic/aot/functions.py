"""User functions, traced on a mesh of a described slice."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from systolic.aot.traced import FunctionCall, Traced, is_filtered, name_of
from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.steps.mesh import place, slices_of


def trace_function(program: FunctionCall, on: Slice, devices: Sequence[Any]) -> Traced:
    """See :class:`FunctionCall`."""
    mesh = _mesh(program.mesh, devices)
    leaves, tree = jax.tree.flatten((program.args, dict(program.kwargs)))
    placed = [_placed(leaf, spec, mesh) for leaf, spec in zip(leaves, program.specs, strict=True)]
    args, kwargs = jax.tree.unflatten(tree, placed)
    function: Any = program.function
    with jax.set_mesh(mesh):
        if is_filtered(function):
            traced = _filtered(function, args, kwargs)
        else:
            if not isinstance(function, jax.stages.Wrapped):
                function = _jitted(program, mesh)
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


def _jitted(program: FunctionCall, mesh: Mesh) -> Any:
    out: dict[str, Any] = {}
    if program.out_specs is not None:
        out["out_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            program.out_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    return jax.jit(
        program.function,
        static_argnums=program.static_argnums or None,
        donate_argnums=program.donate_argnums or None,
        **out,
    )


def _filtered(function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Trace of the function in an ``equinox.filter_jit``, which itself would treat a ShapeDtypeStruct as static."""
    equinox = sys.modules["equinox"]  # loaded with the function; not a dependency
    first, static_first = equinox.partition(args[:1], _is_abstract)
    rest, static_rest = equinox.partition((args[1:], kwargs), _is_abstract)

    def call(first: Any, rest: Any) -> Any:
        others, named = equinox.combine(rest, static_rest)
        made = function.__wrapped__(*equinox.combine(first, static_first), *others, **named)
        return equinox.filter(made, equinox.is_array)

    call.__name__ = call.__qualname__ = name_of(function)
    donated = [n for n, given in enumerate((function.donate_first, function.donate_rest)) if given]
    return jax.jit(call, donate_argnums=donated).trace(first, rest)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _mesh(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    names, sizes = tuple(axes), tuple(axes.values())
    grid = place(sizes, _across(axes, slices_of(devices)), devices)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _across(axes: Mapping[str, int], num_slices: int) -> list[int]:
    """Number of slices that each mesh axis crosses: all for the first axis that their number divides, else 1."""
    for crossing, size in axes.items():
        if size % num_slices == 0:
            return [num_slices if name == crossing else 1 for name in axes]
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    raise OptionError(
        f"no axis of the mesh ({shape}) is a multiple of the {num_slices} slices, which one axis must cross; change the mesh"
    )


def _placed(leaf: Any, spec: Any, mesh: Mesh) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    where = NamedSharding(mesh, spec if spec is not None else PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
