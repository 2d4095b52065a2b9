"""User functions, traced on a mesh of a described slice."""

import contextlib
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from systolic.chips import Slice
from systolic.compiling.restored import is_pmapped, key_of, shape_text, standing, trace_pmapped
from systolic.compiling.traced import (
    CalledFunction,
    FunctionCall,
    ProgramFacts,
    Traced,
    is_filtered,
    name_of,
)
from systolic.core.errors import OptionError, SystolicError
from systolic.steps.target import place, slices_of

_OF_CONTEXT = "should match the mesh passed to shard_map"
_INCOMPATIBLE = "Received incompatible devices for jitted computation"
_NO_AXIS = re.compile(r"Resource axis: (\w+) of (.+?) is not found in mesh")


def trace_function(program: FunctionCall, on: Slice, devices: Sequence[Any]) -> Traced:
    """See :class:`FunctionCall`.

    Raises:
        OptionError: the function has a mesh of another number of devices than the slice, or is jitted for one device.
    """
    try:
        (traced, splits), mesh, meshes = _attempt(program, on, devices)
    except SystolicError:
        raise
    except Exception as first:
        cause = first
        for other in _others(program, first):
            try:
                return trace_function(other, on, devices)
            except SystolicError:
                raise
            except Exception as second:
                if _OF_CONTEXT in str(cause):  # which is none of the user's
                    cause = second
        raise _explained(cause, program, on) from first
    if (own := _with_own_mesh(program, traced, meshes, on)) is not None:
        return trace_function(own, on, devices)
    unit, units = program.units or ("calls", 1)
    return Traced(
        traced=traced,
        mesh=mesh,
        facts=ProgramFacts(
            name=program.name,
            verb="function",
            model_flops=program.model_flops,
            unit=unit,
            units=units,
            precision=None,
            layout={axis: int(size) for axis, size in mesh.shape.items()},
            notes=[
                *program.notes,
                *_order_notes(program, devices),
                *([] if splits or meshes else _whole_notes(devices)),
            ],
        ),
    )


def _attempt(
    program: FunctionCall, on: Slice, devices: Sequence[Any]
) -> tuple[tuple[Any, bool], Mesh, Sequence[Mesh]]:
    """The trace as :func:`_traced` has it, the program's mesh, and the meshes that the function made. Its error where it made one is that under it."""
    mesh = _mesh(program, devices)
    with standing(mesh, program.devices) as there:
        try:
            return _traced(program, mesh, on), mesh, there.meshes
        except Exception:
            if program.own_mesh or not there.meshes:
                raise
    first = there.meshes[0]
    own = replace(program, mesh=dict(first.shape), axis_types=first.axis_types)
    return _attempt(replace(own, own_mesh=True, in_context=False), on, devices)


def _others(program: FunctionCall, error: Exception) -> Iterator[FunctionCall]:
    """Other ways to trace a function that failed: without the mesh in JAX's context or in it, and with numbers as constants."""
    if program.in_context and not program.retried:
        # The function may have a mesh of its own, which JAX compares with that of its context.
        yield replace(program, in_context=False, retried=True)
    elif program.own_mesh and not program.in_context and not program.retried:
        shape = shape_text(program.mesh)
        note = f"traced under jax.set_mesh of its mesh ({shape}), without which JAX refuses it"
        yield replace(program, in_context=True, retried=True, notes=(*program.notes, note))
    decided = isinstance(error, jax.errors.JAXTypeError) or "concrete values" in str(error)
    if decided and not program.numbers_constant:
        note = "numbers of Python among the arguments are constants of the program, as static_argnums of jit has them"
        yield replace(program, numbers_constant=True, notes=(*program.notes, note))


def _explained(error: Exception, program: FunctionCall, on: Slice) -> Exception:
    """An error of JAX whose cause is the mesh, in the terms of a forecast; others as they are."""
    if not program.own_mesh and (axis := _NO_AXIS.search(str(error))) is not None:
        return OptionError(
            f'{program.name} has {axis[2]} and no mesh with an axis {axis[1]}; give the sizes of its axes, such as spread={{"{axis[1]}": {on.num_devices}}}'
        )
    if _INCOMPATIBLE in str(error):
        return OptionError(
            f"{program.name} uses {on.num_devices} devices in one place and others elsewhere; make its meshes of all {on.num_devices} devices of {on.name}, or forecast it for a slice of the size of its mesh ({' '.join(str(error).split())[:300]})"
        )
    return error


def _with_own_mesh(
    program: FunctionCall, traced: Any, meshes: Sequence[Mesh], on: Slice
) -> FunctionCall | None:
    """The program over a mesh that the function makes while it is traced; None where it makes none, or the user gave one.

    Raises:
        OptionError: that mesh has another number of devices than the slice.
    """
    inner = traced
    while not isinstance(inner, jax.stages.Traced):  # nnx.jit has its own around JAX's
        inner = inner.traced
    used = meshes_used(inner.jaxpr.jaxpr)
    for mesh in used:
        if mesh.size != on.num_devices:
            axes = shape_text(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)))
            raise OptionError(
                f"{program.name} uses a mesh of {mesh.size} device{'s' * (mesh.size > 1)} ({axes}) and {on.name} has {on.num_devices}; make it of {on.num_devices}, or forecast it for a slice of {mesh.size}"
            )
    own = [*meshes, *(mesh for mesh in used if isinstance(mesh, AbstractMesh))]
    if program.own_mesh or not own:
        return None
    axes = dict(own[0].shape)
    if not meshes and axes == dict(program.mesh):
        return None
    # The devices are in the order of that mesh then, and it is no mesh of JAX's context.
    return replace(
        program, own_mesh=True, in_context=False, mesh=axes, axis_types=own[0].axis_types
    )


def meshes_used(jaxpr: Any) -> list[Any]:
    """Meshes of the ``shard_map`` calls and sharding constraints of a jaxpr, each once, in their order."""
    meshes: dict[Any, None] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            meshes[equation.params["mesh"]] = None
            continue  # those inside are parts of it
        where = equation.params.get("sharding")
        if isinstance(where, NamedSharding) and not where.mesh.empty:
            meshes[where.mesh] = None
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                part = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if isinstance(part, Jaxpr):
                    meshes |= dict.fromkeys(meshes_used(part))
    return list(meshes)


def _traced(program: FunctionCall, mesh: Mesh, on: Slice) -> tuple[Any, bool]:
    """The trace, and whether the program or its user says how arguments are split."""
    import cloudpickle

    call: CalledFunction = cloudpickle.loads(program.content)
    function: Any = call.function
    if is_pmapped(function):
        return trace_pmapped(function, call.args, call.kwargs), True
    _check_single(function, on)
    own = _has_in_shardings(function)
    splits = own or program.own_mesh or any(spec is not None for spec in program.specs)
    leaves, tree = jax.tree.flatten((call.args, dict(call.kwargs)))
    placed = [
        _placed(leaf, spec, None if own else mesh, mesh)
        for leaf, spec in zip(leaves, program.specs, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(tree, placed)
    with _context(program, call, mesh):
        if is_filtered(function):
            return _filtered(function, args, kwargs), splits
        if not isinstance(function, jax.stages.Wrapped):
            args, kwargs = _with_constants((args, kwargs), numbers=program.numbers_constant)
            function = _jitted(program, function, mesh)
        return function.trace(*args, **kwargs), splits


def _context(program: FunctionCall, call: CalledFunction, mesh: Mesh) -> Any:
    """JAX's mesh of the trace: the user's where one is set, else the program's."""
    if call.context is None:
        return jax.set_mesh(mesh) if program.in_context else contextlib.nullcontext()
    if isinstance(call.context, AbstractMesh):
        # What it stands for where the program runs: PartitionSpecs in a jit's shardings need its devices.
        same = mesh.abstract_mesh == call.context
        return jax.set_mesh(mesh) if same else jax.sharding.use_abstract_mesh(call.context)
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
    if any(
        isinstance(sharding, SingleDeviceSharding)
        for sharding in function._jit_info.in_shardings_leaves
    ):
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
        _filled(_hashable(function)),
        static_argnums=program.static_argnums or None,
        donate_argnums=program.donate_argnums or None,
        **out,
    )


@jax.tree_util.register_pytree_node_class
class _Constant:
    """A value of a call that is no argument of the program; a pytree without leaves."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], "_Constant"]:
        return (), self

    @classmethod
    def tree_unflatten(cls, same: "_Constant", _: Any) -> "_Constant":
        return same


def _is_constant(leaf: Any) -> bool:
    return isinstance(leaf, _Constant)


def _with_constants(values: Any, *, numbers: bool) -> Any:
    """Arguments of a plain function, of which those that no array can hold are constants, and ``numbers`` of Python too."""

    def constant(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
            return _Constant(leaf) if numbers else leaf
        arrays = (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)
        return leaf if isinstance(leaf, arrays) else _Constant(leaf)

    return jax.tree.map(constant, values)


def _filled(function: Any) -> Any:
    """A function that is called with what :func:`_with_constants` made of its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(
            lambda leaf: leaf.value if _is_constant(leaf) else leaf,
            (args, kwargs),
            is_leaf=_is_constant,
        )
        return function(*args, **kwargs)

    return call


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
        outputs = function.__wrapped__(*equinox.combine(first, static_first), *others, **named)
        return equinox.filter(outputs, equinox.is_array)

    call.__name__ = call.__qualname__ = name_of(function)
    donated = [
        n for n, donates in enumerate((function.donate_first, function.donate_rest)) if donates
    ]
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
    ordered = {names[axis]: program.mesh[names[axis]] for axis in axes}
    grid = place(tuple(ordered.values()), _across(ordered, slices_of(devices)), devices)
    return grid.transpose(np.argsort(axes))


def _array(devices: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


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


def _whole_notes(devices: Sequence[Any]) -> list[str]:
    """A note on several devices of which each does all of the work."""
    if len(devices) == 1:
        return []
    return [
        f"none of the arguments is split, so each of the {len(devices)} devices does the same work: split them with spread=systolic.Spread(mesh=…, in_specs=…), or choose a slice of one device"
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
    if isinstance(where, SingleDeviceSharding):
        spec = PartitionSpec() if spec is None else spec
    if spec is not None:
        where = NamedSharding(mesh, spec, memory_kind=where.memory_kind if where else None)
    elif where is None and whole is not None:
        where = NamedSharding(whole, PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
