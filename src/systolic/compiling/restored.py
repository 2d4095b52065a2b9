"""Meshes, devices and classes that :mod:`systolic.compiling.pickled` describes, made again in the child on the devices of the slice."""

import contextlib
import functools
import math
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from systolic.core.errors import OptionError

Key = tuple[str, int]
"""Platform and number of a device of the process that asked."""
_REGISTERING = (
    "register_dataclass",
    "register_pytree_node",
    "register_pytree_node_class",
    "register_pytree_with_keys",
    "register_pytree_with_keys_class",
    "register_static",
)
_PMAP = (
    "axis_name",
    "in_axes",
    "backend",
    "axis_size",
    "devices",
    "static_broadcasted_tuple",
    "donate_tuple",
    "out_axes_flat",
    "out_axes_tree",
)


@dataclass(kw_only=True)
class Standing:
    """The slice's devices in the place of those of the process that asked."""

    mesh: Any
    """The mesh of the program, whose order all other meshes follow."""
    ranks: Mapping[Key, int]
    """Devices of the process that asked to places in the program's mesh."""
    meshes: list[Any] = field(default_factory=list)
    """Meshes of all devices that the function made while it was traced."""

    @property
    def devices(self) -> list[Any]:
        """Devices in the order of the mesh."""
        return list(self.mesh.devices.flat)

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the program's mesh and their sizes."""
        return dict(zip(self.mesh.axis_names, self.mesh.devices.shape, strict=True))


_now: list[Standing] = []


@contextlib.contextmanager
def standing(mesh: Any, devices: Sequence[Key]) -> Generator[Standing]:
    """Restores devices and meshes to those of ``mesh``, and has JAX's public functions name its devices.

    Args:
        mesh: The mesh of the program.
        devices: Devices of the process that asked, in the order of ``mesh``; may be empty.
    """
    there = Standing(mesh=mesh, ranks={key: rank for rank, key in enumerate(devices)})
    _now.append(there)
    try:
        with _public_functions(there):
            yield there
    finally:
        _now.pop()


def _there() -> Standing:
    if not _now:
        raise OptionError(
            "a part of the job holds a device, a mesh or a sharding of this machine, and a Job's mesh is made from its layout; leave them out, or forecast the step as a function"
        )
    return _now[-1]


def size_of(sizes: Iterable[int]) -> int:
    """Number of devices of a mesh."""
    return math.prod(sizes)


def shape_text(axes: Mapping[str, int]) -> str:
    """A mesh's shape in a message."""
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def key_of(device: Any) -> Key:
    """Platform and number of a device."""
    return device.platform, device.id


def device(key: Key) -> Any:
    """The slice's device in the place of another process's."""
    there = _there()
    flat = there.devices
    rank = there.ranks.get(key, key[1])
    if rank >= len(flat):
        raise OptionError(
            f"the function uses {key[0]} device {key[1]}, and the slice has {len(flat)}; forecast it for a larger slice, or use fewer devices"
        )
    return flat[rank]


def mesh(axes: Mapping[str, int], axis_types: tuple[Any, ...], keys: Sequence[Key]) -> Any:
    """A mesh of the slice's devices with the axes of another process's."""
    from jax.sharding import Mesh

    there = _there()
    axis_types = _types_there(axes, axis_types, there)
    axes = _axes_there(axes, there.axes)
    if size_of(axes.values()) == len(keys):
        placed = _array([device(key) for key in keys])
    elif set(axes) == set(there.axes):
        placed = there.mesh.devices.transpose([there.mesh.axis_names.index(axis) for axis in axes])
    else:
        placed = there.mesh.devices
    return Mesh(placed.reshape(tuple(axes.values())), tuple(axes), axis_types=axis_types)


def abstract_mesh(axes: Mapping[str, int], axis_types: tuple[Any, ...]) -> Any:
    """An abstract mesh; that of the program where it has the same axes."""
    from jax.sharding import AbstractMesh

    there = _there()
    axis_types = _types_there(axes, axis_types, there)
    axes = _axes_there(axes, there.axes)
    whole = there.mesh.abstract_mesh
    if tuple(axes.items()) == tuple(there.axes.items()) and axis_types == whole.axis_types:
        return whole
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=axis_types)


def _axes_there(axes: Mapping[str, int], there: Mapping[str, int]) -> dict[str, int]:
    """Axes of a mesh with the sizes that the program's mesh has for these names."""
    if set(axes) == set(there):
        return {name: there[name] for name in axes}
    if set(axes) < set(there) and size_of(axes.values()) < size_of(there.values()):
        return dict(there)
    return dict(axes)


def _types_there(axes: Mapping[str, int], types: Sequence[Any], there: Standing) -> tuple[Any, ...]:
    """Types of the axes that :func:`_axes_there` gives; those that the mesh lacks are as in the program's."""
    own = dict(zip(axes, types, strict=True))
    whole = dict(zip(there.axes, there.mesh.axis_types, strict=True))
    return tuple(own.get(name, whole.get(name)) for name in _axes_there(axes, there.axes))


def named_sharding(mesh: Any, spec: Any, memory_kind: str | None) -> Any:
    """A NamedSharding over a restored mesh."""
    from jax.sharding import NamedSharding

    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def single_device(device: Any, memory_kind: str | None) -> Any:
    """A SingleDeviceSharding on a restored device."""
    from jax.sharding import SingleDeviceSharding

    return SingleDeviceSharding(device, memory_kind=memory_kind)


def jitted(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """A ``jax.jit`` function; pickled directly it could be called but not traced."""
    import jax

    return jax.jit(function, **options)


def bare(kind: type) -> Any:
    """An object whose constructor takes more than its state, such as a ``jax.custom_vjp``."""
    return object.__new__(kind)


def made_here(stage: Any) -> OptionError:
    """The error of a function that is lowered or compiled already."""
    return OptionError(
        f"a jax.stages.{type(stage).__name__} is given, which is made for the devices of this machine; give the function that it was made of, and its arguments"
    )


def exported(content: bytes) -> Any:
    """A ``jax.export.Exported``."""
    from jax import export

    return export.deserialize(bytearray(content))


def cached(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """A function of ``functools.lru_cache``, empty."""
    return functools.lru_cache(**options)(function)


def context(maker: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """A manager of ``contextlib.contextmanager``, not entered."""
    return contextlib._GeneratorContextManager(maker, args, dict(options))


def code(maker: Callable[..., Any], arguments: tuple[Any, ...], file: str) -> types.CodeType:
    """The code of a function with the file that it was written in."""
    return maker(*arguments).replace(co_filename=file)


def function_of_library(code: Any, module: str, name: str, closure: tuple[Any, ...]) -> Any:
    """A function inside one of an installed package, with the globals of its module there."""
    from importlib import import_module

    return types.FunctionType(code, vars(import_module(module)), name, None, closure)


def fill_function(function: Any, state: Mapping[str, Any]) -> None:
    """Fills the closure and attributes of a :func:`function_of_library`."""
    for cell, filled in zip(function.__closure__ or (), state["closure"], strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents = filled.cell_contents
    vars(function).update(state["attributes"])
    for name, value in state["slots"].items():
        setattr(function, name, value)


# ---- pytrees


def registration(kind: type) -> tuple[str, Any, Any] | None:
    """How a class is a pytree of JAX: its fields, or how it is taken apart and put together; None where it is none."""
    from jax._src import tree_util

    entry = vars(tree_util).get("_registry", {}).get(kind)
    if entry is None:
        return None
    free: dict[str, types.CellType] = {}
    if isinstance(entry.to_iter, types.FunctionType):
        cells = entry.to_iter.__closure__ or ()
        free = dict(zip(entry.to_iter.__code__.co_freevars, cells, strict=True))
    if {"data_fields", "meta_fields"} <= set(free):
        return "fields", free["data_fields"].cell_contents, free["meta_fields"].cell_contents
    if "flatten_with_keys" in free:
        return "keys", free["flatten_with_keys"].cell_contents, entry.from_iter
    return "node", entry.to_iter, entry.from_iter


def skeleton(maker: Callable[..., type], *arguments: Any) -> type:
    """An empty class, not yet a pytree: hooks of its base would register it before it has fields."""
    import jax

    own = {name: vars(jax.tree_util)[name] for name in _REGISTERING if name in vars(jax.tree_util)}
    vars(jax.tree_util).update(dict.fromkeys(own, lambda kind, *_, **__: kind))
    try:
        return maker(*arguments)
    finally:
        vars(jax.tree_util).update(own)


def fill_class(kind: type, state: tuple[Any, Any, tuple[str, Any, Any] | None]) -> type:
    """Fills a :func:`skeleton` and registers it as it was registered."""
    import jax
    from jax._src import tree_util

    fill, own, entry = state
    fill(kind, own)
    if entry is None or kind in tree_util._registry:
        return kind
    way, first, second = entry
    match way:
        case "fields":
            gone = {name for name in _init_fields(kind) if name not in (*first, *second)}
            jax.tree_util.register_dataclass(kind, first, second, tuple(gone))
        case "keys":
            jax.tree_util.register_pytree_with_keys(kind, first, second)
        case _:
            jax.tree_util.register_pytree_node(kind, first, second)
    return kind


def _init_fields(kind: type) -> list[str]:
    from dataclasses import fields, is_dataclass

    return (
        [attribute.name for attribute in fields(kind) if attribute.init]
        if is_dataclass(kind)
        else []
    )


# ---- pmap


def is_pmapped(function: Any) -> bool:
    """Whether a function is one that ``jax.pmap`` returned."""
    pmap = sys.modules.get("jax._src.pmap")
    if pmap is None or not isinstance(function, types.FunctionType):
        return False
    lower = vars(function).get("lower")
    return isinstance(lower, types.FunctionType) and lower.__globals__ is vars(pmap)


def _inferring(function: Any) -> tuple[Any, dict[str, Any]]:
    """The inner function of a ``jax.pmap`` that makes its jitted function, and its options."""
    lower = function.lower
    free = dict(zip(lower.__code__.co_freevars, lower.__closure__ or (), strict=True))
    infer = free["infer_params"].cell_contents
    names = zip(infer.__code__.co_freevars, infer.__closure__ or (), strict=True)
    return infer, {name: cell.cell_contents for name, cell in names}


def pmap_options(function: Any) -> dict[str, Any]:
    """Options of a ``jax.pmap``.

    Raises:
        OptionError: this version of JAX keeps them elsewhere.
    """
    try:
        _, own = _inferring(function)
        own = {name: own[name] for name in _PMAP}
    except (KeyError, AttributeError, ValueError) as error:
        raise OptionError(
            f"{function.__name__} is a jax.pmap of a version of JAX whose options can't be read; forecast it as a jax.shard_map"
        ) from error
    statics = sorted(own.pop("static_broadcasted_tuple"))
    out_axes = own["out_axes_tree"].unflatten(own.pop("out_axes_flat"))
    donated = own.pop("donate_tuple")
    del own["out_axes_tree"]
    for static in statics:
        # JAX counts donated arguments without the static ones before them.
        donated = tuple(number + (number >= static) for number in donated)
    named = own["axis_name"]
    return {
        **own,
        "axis_name": None if named == "_internal_pmap_axis_name" else named,
        "out_axes": out_axes,
        "static_broadcasted_argnums": tuple(statics),
        "donate_argnums": donated,
    }


def pmapped(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """A ``jax.pmap`` over the devices of the slice."""
    import jax

    chosen = options["devices"]
    devices = _there().devices if chosen is None else chosen
    placed: dict[str, Any] = {**options, "devices": devices, "backend": None}
    return jax.pmap(function, **placed)


def trace_pmapped(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Trace of a :func:`pmapped` function.

    Raises:
        OptionError: it maps over more or fewer rows than there are devices.
    """
    infer, own = _inferring(function)
    num_devices = len(own["devices"])
    rows = _mapped_rows(own["in_axes"], args, kwargs)
    if rows is not None and rows != num_devices:
        raise OptionError(
            f"{function.__name__} is a jax.pmap over {rows} rows and the slice has {num_devices} devices; give arguments whose mapped axis is {num_devices}"
        )
    _, inner, flat, *_ = infer(*args, **kwargs)
    return inner.trace(*flat)


def _mapped_rows(in_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Size of the mapped axis by the first argument that has it; None where its place is not a plain number."""
    import jax
    import numpy as np

    each = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    for axis, arg in (*zip(each, args, strict=False), *((0, arg) for arg in kwargs.values())):
        for leaf in jax.tree.leaves(arg):
            if isinstance(axis, int) and len(shape := np.shape(leaf)) > axis:
                return int(shape[axis])
    return None


# ---- JAX's public functions


@contextlib.contextmanager
def _public_functions(there: Standing) -> Generator[None]:
    """Has ``jax.devices``, ``jax.make_mesh`` and others answer for the slice, as they will where the program runs."""
    import jax
    from jax.experimental import mesh_utils

    own_create = mesh_utils.create_device_mesh

    def create_device_mesh(mesh_shape: Any, devices: Any = None, **options: Any) -> Any:
        if devices is not None and list(devices) != there.devices:
            return own_create(mesh_shape, devices, **options)
        return _array(there.devices).reshape(tuple(mesh_shape))

    changed = {**_counts(there.devices), **_placing(there)}
    before = {name: vars(jax)[name] for name in changed}
    vars(jax).update(changed)
    vars(mesh_utils)["create_device_mesh"] = create_device_mesh
    try:
        yield
    finally:
        vars(jax).update(before)
        vars(mesh_utils)["create_device_mesh"] = own_create


def _counts(flat: list[Any]) -> dict[str, Callable[..., Any]]:
    """JAX's functions that list and count devices; those of another backend are its own."""
    import jax

    platform, own_local = flat[0].platform, jax.local_devices
    local = [peer for peer in flat if peer.process_index == flat[0].process_index]

    def answer(own: Any, value: Callable[[], Any]) -> Any:
        @functools.wraps(own)
        def answered(backend: Any = None) -> Any:
            return value() if backend in (None, platform) else own(backend)

        return answered

    def local_devices(process_index: Any = None, backend: Any = None, host_id: Any = None) -> Any:
        if backend not in (None, platform):
            return own_local(process_index, backend, host_id)
        host = host_id if process_index is None else process_index
        return local if host is None else [peer for peer in flat if peer.process_index == host]

    return {
        "devices": answer(jax.devices, lambda: list(flat)),
        "device_count": answer(jax.device_count, lambda: len(flat)),
        "local_device_count": answer(jax.local_device_count, lambda: len(local)),
        "local_devices": local_devices,
        "default_backend": lambda: platform,
    }


def _placing(there: Standing) -> dict[str, Callable[..., Any]]:
    """JAX's functions that place programs on devices."""
    import jax

    flat, own_make, own_pmap = there.devices, jax.make_mesh, jax.pmap

    def make_mesh(axis_shapes: Any, axis_names: Any, *more: Any, **options: Any) -> Any:
        chosen = options.get("devices")
        if chosen is not None and list(chosen) != flat:
            return own_make(axis_shapes, axis_names, *more, **options)
        own = own_make(axis_shapes, axis_names, *more, **{**options, "devices": flat})
        placed = _array(flat[: own.devices.size]).reshape(own.devices.shape)
        whole = jax.sharding.Mesh(placed, own.axis_names, axis_types=own.axis_types)
        if whole.devices.size == len(flat):
            there.meshes.append(whole)
        return whole

    def pmap(function: Any, *more: Any, devices: Any = None, **options: Any) -> Any:
        return own_pmap(function, *more, devices=flat if devices is None else devices, **options)

    return {"make_mesh": make_mesh, "pmap": pmap}


def _array(devices: Sequence[Any]) -> Any:
    import numpy as np

    placed = np.empty(len(devices), dtype=object)
    placed[:] = devices
    return placed
