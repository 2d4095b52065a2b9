"""User functions, traced on a mesh of a described slice."""

import contextlib
import itertools
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from systolic.aot.restored import is_pmapped, key_of, standing, trace_pmapped
from systolic.aot.traced import CalledFunction, FunctionCall, Traced, is_filtered, name_of
from systolic.chips import Slice
from systolic.core.errors import OptionError
from systolic.steps.mesh import place, slices_of


def trace_function(program: FunctionCall, on: Slice, devices: Sequence[Any]) -> Traced:
    """See :class:`FunctionCall`."""
    mesh = _mesh(program, devices)
    with standing(mesh, program.devices) as there:
        try:
            traced = _traced(program, mesh, on)
        except Exception:
            if program.own_mesh:
                raise
            traced = None
    if not program.own_mesh and (there.made or traced is None):
        # The function may have made a mesh, in whose order the devices are then, and which is no mesh of JAX's context.
        own = replace(program, own_mesh=True, in_context=False)
        if there.made:
            made = there.made[0]
            own = replace(own, mesh=dict(made.shape), axis_types=made.axis_types)
        return trace_function(own, on, devices)
    unit, units = program.units or ("calls", 1)
    return Traced(
        traced=traced,
        mesh=mesh,
        facts={
            "name": program.name,
            "verb": "function",
            "model_flops": program.model_flops,
            "unit": unit,
            "units": units,
            "precision": None,
            "layout": {axis: int(size) for axis, size in mesh.shape.items()},
            "notes": [*program.notes, *_order_notes(program, devices)],
        },
    )


def _traced(program: FunctionCall, mesh: Mesh, on: Slice) -> Any:
    import cloudpickle

    call: CalledFunction = cloudpickle.loads(program.content)
    function: Any = call.function
    if is_pmapped(function):
        return trace_pmapped(function, call.args, call.kwargs)
    _check_single(function, on)
    own = _has_in_shardings(function)
    leaves, tree = jax.tree.flatten((call.args, dict(call.kwargs)))
    placed = [
        _placed(leaf, spec, None if own else mesh, mesh)
        for leaf, spec in zip(leaves, program.specs, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(tree, placed)
    with _context(program, call, mesh):
        if is_filtered(function):
            return _filtered(function, args, kwargs)
        if not isinstance(function, jax.stages.Wrapped):
            function = _jitted(program, function, mesh)
        return function.trace(*args, **kwargs)


def _context(program: FunctionCall, call: CalledFunction, mesh: Mesh) -> Any:
    """JAX's mesh of the trace: the user's where one is set, else the program's."""
    if call.context is None:
        return jax.set_mesh(mesh) if program.in_context else contextlib.nullcontext()
    if isinstance(call.context, AbstractMesh):
        return jax.sharding.use_abstract_mesh(call.context)
    if not call.entered:
        return jax.set_mesh(call.context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the user's choice
        stack = contextlib.ExitStack()
        stack.enter_context(call.context)
    return stack


def _has_in_shardings(function: Any) -> bool:
    info = vars(function).get("_jit_info") if isinstance(function, jax.stages.Wrapped) else None
    return info is not None and info.user_specified_in_shardings


def _check_single(function: Any, on: Slice) -> None:
    """Raises OptionError for a function that is jitted for one device, of a slice of several."""
    if not _has_in_shardings(function) or on.num_devices == 1:
        return
    if any(isinstance(one, SingleDeviceSharding) for one in function._jit_info.in_shardings_leaves):
        raise OptionError(
            f"{name_of(function)} is jitted for a single device and {on.name} has {on.num_devices}; give in_shardings over a mesh of {on.num_devices}, or forecast it for one device"
        )


def _jitted(program: FunctionCall, function: Any, mesh: Mesh) -> Any:
    out: dict[str, Any] = {}
    if program.out_specs is not None:
        out["out_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            program.out_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    return jax.jit(
        _hashable(function),
        static_argnums=program.static_argnums or None,
        donate_argnums=program.donate_argnums or None,
        **out,
    )


def _hashable(function: Any) -> Any:
    """A function that ``jax.jit`` takes: a module whose fields are arrays has no hash."""
    try:
        hash(function)
    except TypeError:
        return lambda *args, **kwargs: function(*args, **kwargs)
    return function


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


def _mesh(program: FunctionCall, devices: Sequence[Any]) -> Mesh:
    axes = program.mesh
    names, sizes = tuple(axes), tuple(axes.values())
    types = program.axis_types or (AxisType.Auto,) * len(names)
    by_key = {key_of(device): device for device in devices}
    if set(program.devices) == set(by_key):
        # A mesh of described devices has its order from the user.
        grid = _array([by_key[key] for key in program.devices]).reshape(sizes)
    elif (own := _own_order(program)) is not None:
        grid = _array([devices[rank] for rank in own]).reshape(sizes)
    else:
        grid = _along_torus(program, devices)
    return Mesh(grid, names, axis_types=types)


def _own_order(program: FunctionCall) -> tuple[int, ...] | None:
    """Ranks of the user's devices in the order of their mesh; None where JAX's functions would choose the order.

    A mesh of devices in ascending order is what ``jax.make_mesh`` makes on virtual devices, and one whose axes
    were swapped afterwards is still that mesh.
    """
    ranks = {key: rank for rank, key in enumerate(sorted(program.devices))}
    order = tuple(ranks[key] for key in program.devices)
    return None if not order or _swapped(program, order) is not None else order


def _swapped(program: FunctionCall, order: Sequence[int]) -> tuple[int, ...] | None:
    """The order of axes in which devices ascend; None where they ascend in none, or are not as many as the mesh has."""
    sizes = tuple(program.mesh.values())
    if math.prod(sizes) != len(order):
        return None
    grid = np.array(order).reshape(sizes)
    ascending = sorted(order)
    for axes in itertools.permutations(range(grid.ndim)):
        if grid.transpose(axes).ravel().tolist() == ascending:
            return axes
    return None


def _along_torus(program: FunctionCall, devices: Sequence[Any]) -> np.ndarray:
    """Devices in the order in which the mesh's axes follow the torus, as the user swapped these."""
    keys = {key: rank for rank, key in enumerate(sorted(program.devices))}
    order = [keys[key] for key in program.devices] or range(len(devices))
    axes = _swapped(program, order) or tuple(range(len(program.mesh)))
    names = list(program.mesh)
    made = {names[axis]: program.mesh[names[axis]] for axis in axes}
    grid = place(tuple(made.values()), _across(made, slices_of(devices)), devices)
    return grid.transpose(np.argsort(axes))


def _array(devices: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(devices), dtype=object)
    found[:] = devices
    return found


def _order_notes(program: FunctionCall, devices: Sequence[Any]) -> list[str]:
    """A note on a mesh whose devices the user arranged."""
    described = set(program.devices) == set(map(key_of, devices))
    order = None if described or len(devices) == 1 else _own_order(program)
    if order is None:
        return []
    shown = ", ".join(map(str, order[:16])) + (", …" if len(order) > 16 else "")
    return [
        f"the mesh has an order of devices of its own: jax.devices() number {shown} of the slice; collectives are priced in that order, not along the torus as jax.make_mesh would lay it"
    ]


def _across(axes: Mapping[str, int], num_slices: int) -> list[int]:
    """Number of slices that each mesh axis crosses: all for the first axis that their number divides, else 1."""
    for crossing, size in axes.items():
        if size % num_slices == 0:
            return [num_slices if name == crossing else 1 for name in axes]
    shape = " x ".join(f"{name} {size}" for name, size in axes.items())
    raise OptionError(
        f"no axis of the mesh ({shape}) is a multiple of the {num_slices} slices, which one axis must cross; change the mesh"
    )


def _placed(leaf: Any, spec: Any, whole: Mesh | None, mesh: Mesh) -> Any:
    """A leaf with its own sharding, that of its spec, or whole on all devices of ``whole``."""
    if not hasattr(leaf, "shape"):
        return leaf
    where = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    if spec is not None:
        where = NamedSharding(mesh, spec, memory_kind=where.memory_kind if where else None)
    elif where is None and whole is not None:
        where = NamedSharding(whole, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
