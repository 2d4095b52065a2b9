"""Forecasts of anyone's function."""

import functools
import inspect
import math
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from systolic.chips import Slice
from systolic.chips import slice as slice_named
from systolic.chips.flags import NONE
from systolic.compiling import Compiler, FunctionProgram
from systolic.compiling.pickled import MeshFound, SentValue, packed
from systolic.compiling.restored import Key, is_pmapped, key_of, shape_text
from systolic.compiling.traced import CalledFunction, is_filtered, name_of
from systolic.core.arguments import Wording, with_types
from systolic.core.errors import OptionError, nearest
from systolic.core.reporter import reporter
from systolic.core.units import gibibytes, with_article
from systolic.forecasting.calibrations import given_with
from systolic.forecasting.forecast import Forecast
from systolic.forecasting.run import forecast_program
from systolic.sim.calibration import Calibration
from systolic.sim.incomplete import Costs, Trips

MANY_CONSTANT_BYTES = 2**24
"""Arrays that a function refers to, above which a note says so."""
MOST_CONSTANT_BYTES = 2**30
"""Arrays that a function refers to, above which it is refused: XLA reads no program of 2 GiB."""
FLAGS = "--name=value, a list of them or one text with spaces between"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Layout of a function's arguments on a mesh, and the work of a call."""

    mesh: Mapping[str, int] | Any = None
    """Axis name to size, or a mesh of JAX; by default the mesh of the function or its arguments, else one axis
    ``devices`` over all of them."""
    in_specs: Any = None
    """One entry a positional argument: a PartitionSpec, None (whole on every device) or a tree of
    them like that argument, whose own ``None`` leaves have no spec. One PartitionSpec alone is
    that of every argument."""
    out_specs: Any = None
    """PartitionSpecs of the result; left to the compiler by default. For plain functions."""
    donate_argnums: Sequence[int] = ()
    """Arguments whose memory the result may take. For plain functions; a jitted one says so itself."""


@with_types
def forecast_function(  # noqa: PLR0913
    function: Callable[..., Any],
    *args: Any,
    on: str | Slice,
    spread: Any = None,
    model_flops: float | None = None,
    units: tuple[str, float] | None = None,
    flags: Annotated[str | Sequence[str], Wording(FLAGS)] = (),
    quick: bool = False,
    trips: Trips = (),
    costs: Costs = (),
    calibration: Calibration | Path | str | None = None,
    **kwargs: Any,
) -> Forecast:
    """Forecasts ``function(*args, **kwargs)`` on a slice that need not be there.

    Args:
        function: Jitted, made by ``equinox.filter_jit``, or plain; a plain one is jitted. It is
            compiled under the settings of ``jax.config`` that this thread has.
        *args: Arrays or ShapeDtypeStructs. A NamedSharding, or ``Spread.in_specs``, says how
            each is spread over the mesh; what says nothing is whole on every device.
        on: The slice, or its name.
        spread: The mesh (axis name to size, or a mesh of JAX), or a :class:`Spread`. By default the mesh
            that the function or its arguments refer to, else one axis ``devices``.
        model_flops: FLOPs that the mathematics needs, for the MFU.
        units: What a call works off, ``("tokens", 1 << 20)``.
        flags: libtpu's, such as ``--xla_tpu_scoped_vmem_limit_kib=65536``: a list, or one text. By
            default ``none``, XLA's defaults, as your own program has them.
        quick: Stop at the schedule: memory exactly and a rougher time, in seconds. For TPUs;
            elsewhere the compile is no longer than that.
        trips: Trips of loops that depend on data: ``{"while.5": 100}``, by the loop's name in the forecast's notes or
            by ``file.py:line``.
        costs: Time of one call of a kernel, a custom call or a callback: ``{"my_kernel": 1.2e-3}`` in seconds, or ``"1.2ms"``.
        calibration: Corrections of the simulator from profiles of this chip: a name that ``systolic calibrations`` lists, or
            the path of a calibration's file.
        **kwargs: As ``args``.

    Meshes, devices and shardings of this process, wherever the function has them (closures, globals, attributes,
    ``jax.set_mesh``), stand for those of the slice: a mesh of all its devices follows its torus, with the same axes, as one of
    ``jax.make_mesh`` does there; where its devices are in an order of their own, they are the slice's devices in that order.
    A mesh of another size is taken with the sizes that ``spread`` has for its axes. While the function is traced,
    ``jax.devices()``, ``jax.device_count()``, ``jax.default_backend()`` and ``jax.make_mesh()`` answer for the slice.

    Of a plain function, arguments that no array holds (text, enums, functions, None) are constants. Numbers are arguments,
    and constants where the function can't be traced otherwise, such as one that it reshapes by.

    Raises:
        OptionError: the mesh does not fit the slice, ``in_specs`` not the arguments or the mesh, a
            flag is none, ``spread`` asks of a jitted function what only jit can say, or the program has nothing of a
            name in ``trips`` or ``costs``; or the calibration is of another chip.
        NotFoundError: there is no such calibration.
        RunError: the compiler failed.
    """
    target = slice_named(on) if isinstance(on, str) else on
    known = given_with(trips, costs, calibration, target)
    how = spread if isinstance(spread, Spread) else Spread(mesh=spread)
    _check_keywords(function, kwargs)
    program = function_program(function, args, kwargs, target, how)
    program = replace(
        program,
        model_flops=None if model_flops is None else float(model_flops),
        units=None if units is None else (str(units[0]), float(units[1])),
    )
    compiler = Compiler(flags=_flags(flags))
    return forecast_program(
        program,
        name_of(function),
        target,
        compiler=compiler.quick() if quick else compiler,
        say=reporter().stage,
        given=known,
    )


def _flags(words: str | Sequence[str]) -> tuple[str, ...]:
    flags = tuple(shlex.split(words) if isinstance(words, str) else words)
    flags = tuple(flag for flag in flags if flag != NONE)
    for flag in flags:
        if not flag.startswith("--"):
            raise OptionError(f"{flag!r} is no flag of the compiler; write {FLAGS}")
    return flags


def _check_keywords(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses keywords that neither the forecast nor the function has; those of a :class:`Spread` are given in one."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    name = name_of(function)
    for unknown in kwargs.keys() - parameters.keys():
        if unknown in Spread.__dataclass_fields__:
            raise OptionError(
                f"{name} takes no argument {unknown}; its mesh and partitions are given as spread=systolic.Spread({unknown}=…)"
            )
        options = inspect.signature(forecast_function).parameters.values()
        known = [option.name for option in options if option.kind is option.KEYWORD_ONLY]
        raise OptionError(
            f"{name} takes no argument {unknown}{nearest(unknown, known)}; options of the forecast are {', '.join(known)}"
        )


def function_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    on: Slice,
    spread: Spread,
) -> FunctionProgram:
    """A function with abstract arguments and their partitions; see :func:`forecast_function`."""
    import jax

    function, bound, kwargs = _unbound(function, kwargs)
    jitted = isinstance(function, jax.stages.Wrapped) or is_filtered(function)
    if jitted and (spread.out_specs is not None or spread.donate_argnums):
        raise OptionError(
            f"{name_of(function)} is jitted already, so Spread.out_specs and donate_argnums would be ignored; give them to its jit, or give the plain function"
        )
    context, entered = _context()
    abstract, named = jax.tree.map(_abstract, ((*bound, *args), dict(kwargs)))
    call = CalledFunction(
        context=context, entered=entered, args=abstract, kwargs=named, function=function
    )
    name = name_of(function)
    content = packed(call, name)
    _check_arrays(content.array_bytes, name)
    place = _place(spread, content, name, on, in_context=context is not None)
    leaves = jax.tree.leaves((abstract, named))
    _check_memory(leaves, on)
    specs = [_spec_of(leaf) for leaf in leaves]
    if spread.in_specs is not None:
        leaf_specs = _leaf_specs(spread.in_specs, args, place.axes)
        first = len(jax.tree.leaves(abstract[: len(bound)]))
        specs[first : first + len(leaf_specs)] = leaf_specs
    return FunctionProgram(
        content=content.content,
        name=name,
        mesh=place.axes,
        axis_types=place.axis_types,
        devices=place.devices,
        in_context=place.in_context,
        own_mesh=place.own_mesh,
        specs=tuple(specs),
        out_specs=spread.out_specs,
        donate_argnums=tuple(spread.donate_argnums),
        notes=_array_notes(content.array_bytes, name),
    )


def _unbound(
    function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """A function of ``jax.jit`` without what a method or ``functools.partial`` binds, and the bound arguments.

    Jitted again with them inside it would lose what its own jit says, such as donated arguments.
    """
    import jax

    bound: tuple[Any, ...] = ()
    inner: Any = function
    while True:
        if isinstance(inner, types.MethodType):
            bound, inner = (inner.__self__, *bound), inner.__func__
        elif isinstance(inner, functools.partial):
            bound, kwargs = (*inner.args, *bound), {**inner.keywords, **kwargs}
            inner = inner.func
        else:
            break
    if isinstance(inner, jax.stages.Wrapped) or is_pmapped(inner):
        return inner, bound, kwargs
    return function, (), kwargs


def _abstract(leaf: Any) -> Any:
    """Shape, dtype and sharding of an array; other values as they are.

    Raises:
        OptionError: its shape or its sharding says nothing of a slice, or it holds arrays and is no pytree.
    """
    import jax

    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        _check_no_arrays(leaf)
        return leaf
    if not all(isinstance(size, int | np.integer) for size in leaf.shape):
        shape = ", ".join(map(str, leaf.shape))
        raise OptionError(
            f"an argument has the shape ({shape}), with a size that is no number; give the number that the forecast is of"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_abstract_sharding(leaf))


def _abstract_sharding(leaf: Any) -> Any:
    """A sharding over a mesh, or a single device's where its memory is another than the device's own; None for whole on every device."""
    from jax.sharding import NamedSharding, SingleDeviceSharding

    where = leaf.sharding
    if where is None or isinstance(where, NamedSharding):
        return where
    if isinstance(where, SingleDeviceSharding):
        (device,) = where.device_set
        own = where.memory_kind in (None, device.default_memory().kind)
        return None if own else where
    if where.is_fully_replicated:
        return None
    raise OptionError(
        f"an argument {leaf.dtype}{list(leaf.shape)} has a {type(where).__name__}, which has no mesh that the slice could have; give it a NamedSharding"
    )


def _check_no_arrays(leaf: Any) -> None:
    """Raises OptionError for an object that holds ShapeDtypeStructs and that JAX does not take apart."""
    import jax

    if isinstance(leaf, type) or not type(leaf).__dictoffset__:
        return
    inside = jax.tree.leaves(list(vars(leaf).values()))
    if any(isinstance(part, jax.ShapeDtypeStruct) for part in inside):
        kind = type(leaf).__name__
        raise OptionError(
            f"an argument is {with_article(kind)}, which holds arrays and is no pytree of JAX; register {kind} with jax.tree_util.register_dataclass or register_pytree_node"
        )


def _check_memory(leaves: Sequence[Any], on: Slice) -> None:
    """Raises OptionError for arguments in a memory that programs of TPUs do not read."""
    import jax

    placed = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if on.platform == "tpu" and "unpinned_host" in {
        sharding.memory_kind for sharding in placed if sharding
    }:
        raise OptionError(
            "an argument is in unpinned_host memory, and programs of a TPU take device or pinned_host; give it memory_kind='pinned_host'"
        )


def _spec_of(leaf: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding

    where = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return where.spec if isinstance(where, NamedSharding) else None


def _context() -> tuple[Any, bool]:
    """The mesh that JAX has set in this thread or None, and whether it was entered with ``with mesh``."""
    import jax
    from jax._src import mesh as meshes

    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return mesh, False
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        return abstract, False
    entered = meshes.thread_resources.env.physical_mesh
    return (None, False) if entered.empty else (entered, True)


@dataclass(frozen=True, kw_only=True)
class _MeshPlace:
    """The mesh of a program; see :class:`~systolic.compiling.traced.FunctionCall`."""

    axes: Mapping[str, int]
    axis_types: tuple[Any, ...] | None = None
    devices: tuple[tuple[str, int], ...] = ()
    in_context: bool = True
    own_mesh: bool = True


def _place(
    spread: Spread, content: SentValue, name: str, on: Slice, *, in_context: bool
) -> _MeshPlace:
    """The mesh of ``spread``, else that of the user's meshes which has the slice's size, else one axis over all devices.

    Args:
        spread: What the user says of the mesh.
        content: The function and its arguments, with the meshes that they refer to.
        name: Name of the function.
        on: The slice.
        in_context: Whether the first of these meshes is the one that JAX has set.

    Raises:
        OptionError: the mesh has another number of devices than the slice.
    """
    meshes, axes = content.meshes, _axes_of(spread.mesh)
    by_user = bool(axes)
    if by_user:
        if math.prod(axes.values()) != on.num_devices:
            raise OptionError(
                f"the mesh ({shape_text(axes)}) has {math.prod(axes.values())} devices but {on.name} has {on.num_devices}; choose axes whose product is {on.num_devices}"
            )
        same = [mesh for mesh in meshes if set(mesh.axes) == set(axes)]
        if same and not _devices_of(spread.mesh):
            axes = {axis: axes[axis] for axis in same[0].axes}
    else:
        same = [mesh for mesh in meshes if mesh.size == on.num_devices]
        if not in_context:
            # A mesh over one axis is often beside the one that the program is made for.
            same.sort(key=lambda mesh: -sum(size > 1 for size in mesh.axes.values()))
        axes = dict(same[0].axes) if same else {"devices": on.num_devices}
    odd = [mesh for mesh in meshes if mesh.size > on.num_devices or not (same or by_user)]
    odd = [mesh for mesh in odd if not set(mesh.axes) <= set(axes)]
    if odd:
        sizes = ", ".join(f'"{axis}": …' for axis in odd[0].axes)
        raise OptionError(
            f"{name} has a mesh of {odd[0].size} device{'s' * (odd[0].size > 1)} ({odd[0]}) but {on.name} has {on.num_devices}; {_remade(odd[0], on)}, or give its sizes there as spread={{{sizes}}}"
        )
    like = [mesh for mesh in same if mesh.axes == axes]
    ordered = _devices_of(spread.mesh)
    ordered += [mesh.devices for mesh in like if mesh.devices is not None]
    ordered += [mesh.devices for mesh in same if mesh.devices is not None]
    types = _types(same, axes)
    plain = types is None or all(str(axis_type).endswith("Auto") for axis_type in types)
    return _MeshPlace(
        axes=axes,
        axis_types=types,
        devices=ordered[0] if ordered and len(ordered[0]) == on.num_devices else (),
        in_context=plain
        and not content.maps_devices
        and all(tuple(mesh.axes) == tuple(axes) for mesh in meshes),
        own_mesh=by_user or bool(meshes),
    )


def _remade(mesh: MeshFound, on: Slice) -> str:
    """How to make a mesh of the size of a slice."""
    if mesh.devices is None:
        return f"make the AbstractMesh of {on.num_devices}"
    if mesh.devices[0][0] == "tpu":
        return f"describe the topology of {on.name}"
    return f"make it of {on.num_devices} virtual devices (jax.config.update('jax_num_cpu_devices', {on.num_devices}) before JAX starts)"


def _devices_of(mesh: Any) -> list[tuple[Key, ...]]:
    """Devices of a mesh of JAX in its order; none of a mapping."""
    from jax.sharding import Mesh

    return [tuple(map(key_of, mesh.devices.flat))] if isinstance(mesh, Mesh) else []


def _axes_of(mesh: Any) -> dict[str, int]:
    """Axis names to sizes of a mapping, of a mesh of JAX, or of none."""
    from jax.sharding import AbstractMesh, Mesh

    if isinstance(mesh, Mesh | AbstractMesh):
        return dict(mesh.shape)
    sizes = dict(mesh) if isinstance(mesh, Mapping) else {None: mesh}
    if mesh is not None and not all(
        isinstance(name, str) and isinstance(size, int) and size > 0 for name, size in sizes.items()
    ):
        raise OptionError(
            f"spread is {mesh!r}; it takes axis names with sizes, such as {{'data': 4, 'model': 2}}, a mesh of JAX or a systolic.Spread"
        )
    return {} if mesh is None else sizes


def _types(meshes: Sequence[MeshFound], axes: Mapping[str, int]) -> tuple[Any, ...] | None:
    """Types of the axes as the first mesh with the same names has them."""
    for mesh in meshes:
        if set(mesh.axes) == set(axes):
            by_name = dict(zip(mesh.axes, mesh.axis_types, strict=True))
            return tuple(by_name[axis] for axis in axes)
    return None


def _check_arrays(array_bytes: int, name: str) -> None:
    if array_bytes > MOST_CONSTANT_BYTES:
        raise OptionError(
            f"{name} refers to {gibibytes(array_bytes)} of arrays, which would be constants of its program, and the limit is {gibibytes(MOST_CONSTANT_BYTES)}; pass them as arguments, as jax.ShapeDtypeStruct"
        )


def _array_notes(array_bytes: int, name: str) -> tuple[str, ...]:
    if array_bytes < MANY_CONSTANT_BYTES:
        return ()
    return (
        f"{name} refers to {gibibytes(array_bytes)} of arrays, constants of the program that are whole on every device and that its memory does not count; pass them as arguments",
    )


def _leaf_specs(in_specs: Any, args: Sequence[Any], axes: Mapping[str, int]) -> list[Any]:
    """The spec of each leaf of the positional arguments, in their order."""
    import jax
    from jax.sharding import PartitionSpec

    if isinstance(in_specs, PartitionSpec):
        in_specs = (in_specs,) * len(args)
    if len(in_specs) != len(args):
        raise OptionError(
            f"in_specs has {len(in_specs)} entries and the function {len(args)} positional arguments; give one for each, None for an argument that is whole on every device"
        )
    specs: list[Any] = []

    def give(spec: Any, part: Any) -> None:
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise OptionError(f"in_specs holds {spec!r}; give a PartitionSpec or None")
        named = [name for entry in spec or () for name in _names(entry)]
        if odd := [name for name in named if name not in axes]:
            raise OptionError(
                f"{spec} names the axis {odd[0]}; the mesh has {', '.join(axes)}: choose one of these, or name the mesh's axes in Spread.mesh"
            )
        specs.extend([spec] * len(jax.tree.leaves(part)))

    def is_spec(leaf: Any) -> bool:
        return isinstance(leaf, PartitionSpec) or leaf is None

    for number, (arg, spec) in enumerate(zip(args, in_specs, strict=True)):
        try:
            jax.tree.map(give, spec, arg, is_leaf=is_spec)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise OptionError(
                f"in_specs[{number}] is not of the form of argument {number} ({reason}); give one PartitionSpec for all of it, or a tree like it"
            ) from error
    return specs


def _names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one dim's entry in a PartitionSpec."""
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()
