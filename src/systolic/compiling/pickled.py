"""Programs and functions as bytes for the child, by cloudpickle.

A user's function refers to more than cloudpickle can send: devices and meshes of this process, functions of
``jax.jit`` with their options, transformed functions of JAX and classes that are pytrees. They are written by
their description here, and :mod:`systolic.compiling.restored` makes them again in the child, on the devices of the slice.
"""

import contextlib
import functools
import io
import sys
import sysconfig
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.compiling import restored
from systolic.core.errors import OptionError, SystolicError

_JITTED = (
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "donate_argnames",
    "keep_unused",
    "inline",
)
"""Options of ``jax.jit`` that are sent as they are."""
_DEPTH = 4
"""Levels below a module at which values are searched for devices."""


@dataclass(frozen=True, kw_only=True)
class MeshFound:
    """A mesh that a function or its arguments refer to."""

    axes: Mapping[str, int]
    axis_types: tuple[Any, ...]
    devices: tuple[restored.Key, ...] | None
    """Its devices in order; None for an ``AbstractMesh``."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return restored.size_of(self.axes.values())

    def __str__(self) -> str:
        return restored.shape_text(self.axes)


@dataclass(frozen=True, kw_only=True)
class SentValue:
    """A value as bytes, and what it refers to."""

    content: bytes
    meshes: tuple[MeshFound, ...]
    """In the order of first reference."""
    array_bytes: int
    """Size of the arrays in it."""
    maps_devices: bool
    """Whether it holds a ``jax.pmap``."""


def dumps(value: Any) -> bytes:
    """``value`` as bytes for ``pickle.loads``.

    Raises:
        OptionError: it holds something that only this process has, such as a lock or a file.
    """
    return packed(value, "the program").content


def packed(value: Any, name: str) -> SentValue:
    """``value`` as bytes, to be read under :func:`systolic.compiling.restored.standing`.

    Args:
        value: Functions and their arguments.
        name: Name of the function, for messages.

    Raises:
        OptionError: it holds something that only this process has, such as a lock or a file.
    """
    import cloudpickle

    references = _References()
    kind = _pickler()
    buffer = io.BytesIO()
    try:
        kind(buffer, references).dump(value)
    except SystolicError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise OptionError(
            f"{name} refers to something that cannot be sent to the process that compiles ({reason}); make it inside the function, or leave it out"
        ) from error
    finally:
        for module in references.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return SentValue(
        content=buffer.getvalue(),
        meshes=tuple(references.meshes),
        array_bytes=references.array_bytes,
        maps_devices=references.maps_devices,
    )


@dataclass
class _References:
    meshes: list[MeshFound] = field(default_factory=list)
    array_bytes: int = 0
    maps_devices: bool = False
    by_value: list[types.ModuleType] = field(default_factory=list)
    """Modules whose functions and classes are sent by value, since they hold devices."""
    by_reference: set[str] = field(default_factory=set)

    def note(self, mesh: MeshFound) -> None:
        if mesh not in self.meshes:
            self.meshes.append(mesh)

    def check_module(self, name: str | None) -> None:
        """Has a module of the user's that holds devices sent by value: the child would make it with other devices."""
        module = sys.modules.get(name or "")
        if module is None or name in self.by_reference or module in self.by_value:
            return
        import cloudpickle

        registered = name in cloudpickle.list_registry_pickle_by_value()
        if not registered and not is_library(module) and _holds_devices(vars(module), module):
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)
        else:
            self.by_reference.add(name or "")


@functools.cache
def _pickler() -> Any:
    """The pickler's class; made once, since cloudpickle is imported where it is needed."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def __init__(self, file: Any, references: _References) -> None:
            super().__init__(file)
            self.references = references

        def reducer_override(self, obj: Any) -> Any:
            if (reduced := _of_jax(obj, self.references)) is not None:
                return reduced
            if isinstance(obj, type):
                self.references.check_module(obj.__module__)
                return _with_registration(obj, super().reducer_override(obj))
            if (reduced := _of_standard(obj)) is not None:
                return reduced
            if isinstance(obj, types.CodeType):
                # cloudpickle leaves out the file, by which costs and errors name their source.
                return restored.code, (*self.dispatch_table[types.CodeType](obj), obj.co_filename)
            if isinstance(obj, types.FunctionType):
                self.references.check_module(obj.__module__)
                if (reduced := _of_library(obj)) is not None:
                    return reduced
            return super().reducer_override(obj)

    return Pickler


def _of_standard(obj: Any) -> tuple[Any, ...] | None:
    """Maker and arguments of what ``functools.lru_cache`` and ``contextlib.contextmanager`` made; None for others."""
    if isinstance(obj, functools._lru_cache_wrapper):
        return (
            None
            if _importable(obj)
            else (restored.cached, (obj.__wrapped__, obj.cache_parameters()))
        )
    if isinstance(obj, contextlib._GeneratorContextManager):
        # As a decorator it makes itself anew at each call, from these.
        return restored.context, (obj.func, obj.args, obj.kwds)
    return None


def _of_jax(obj: Any, references: _References) -> tuple[Any, ...] | None:
    """Maker and arguments of an object of JAX; None for others."""
    jax = sys.modules.get("jax")
    if jax is None or isinstance(
        obj, types.MethodType
    ):  # a method has the attributes of its function
        return None
    sharding = jax.sharding
    reduced = None
    match obj:
        case sharding.Mesh():
            names, keys = tuple(obj.axis_names), tuple(map(restored.key_of, obj.devices.flat))
            axes = dict(zip(names, obj.devices.shape, strict=True))
            references.note(MeshFound(axes=axes, axis_types=tuple(obj.axis_types), devices=keys))
            reduced = restored.mesh, (axes, tuple(obj.axis_types), keys)
        case sharding.AbstractMesh():
            axes = dict(zip(obj.axis_names, obj.axis_sizes, strict=True))
            references.note(MeshFound(axes=axes, axis_types=tuple(obj.axis_types), devices=None))
            reduced = restored.abstract_mesh, (axes, tuple(obj.axis_types))
        case jax.Device():
            reduced = restored.device, (restored.key_of(obj),)
        case sharding.NamedSharding():
            reduced = restored.named_sharding, (obj.mesh, obj.spec, _memory_of(obj))
        case sharding.SingleDeviceSharding():
            (device,) = obj.device_set
            reduced = restored.single_device, (device, _memory_of(obj))
        case jax.custom_vjp():
            reduced = restored.bare, (type(obj),), dict(vars(obj))
        case types.FunctionType() if restored.is_pmapped(obj):
            references.maps_devices = True
            reduced = restored.pmapped, (obj.__wrapped__, restored.pmap_options(obj))
        case jax.stages.Lowered() | jax.stages.Compiled() | jax.stages.Traced():
            raise restored.made_here(obj)
        case jax.stages.Wrapped():
            info = vars(obj).get("_jit_info")
            if info is not None:
                reduced = restored.jitted, (obj.__wrapped__, _options(info))
        case _ if type(obj).__name__ == "Exported" and type(obj).__module__.startswith("jax."):
            reduced = restored.exported, (bytes(obj.serialize()),)
        case jax.Array():
            references.array_bytes += obj.size * obj.dtype.itemsize
        case _ if type(obj).__module__ == "numpy" and type(obj).__name__ == "ndarray":
            references.array_bytes += obj.nbytes
    return reduced


def _memory_of(sharding: Any) -> str | None:
    """Kind of memory; None for the default of its devices, which another platform names otherwise."""
    jax = sys.modules["jax"]
    kind = sharding.memory_kind
    named = isinstance(sharding, jax.sharding.NamedSharding)
    if kind is None or (named and isinstance(sharding.mesh, jax.sharding.AbstractMesh)):
        return kind
    device = next(iter(sharding.device_set))
    return None if kind == device.default_memory().kind else kind


def _options(info: Any) -> dict[str, Any]:
    """Options of a ``jax.jit`` function, its shardings among them."""
    options: dict[str, Any] = {name: getattr(info, name) for name in _JITTED}
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    if info.user_specified_in_shardings:
        options["in_shardings"] = _tree(info.in_shardings_treedef, info.in_shardings_leaves)
    if not all(map(_unspecified, info.out_shardings_leaves)):
        options["out_shardings"] = _tree(info.out_shardings_treedef, info.out_shardings_leaves)
    return options


def _tree(treedef: Any, leaves: Any) -> Any:
    return treedef.unflatten([None if _unspecified(leaf) else leaf for leaf in leaves])


def _unspecified(leaf: Any) -> bool:
    return leaf is None or type(leaf).__name__ == "UnspecifiedValue"


def _of_library(function: types.FunctionType) -> tuple[Any, ...] | None:
    """A function inside one of an installed package, with that module's globals by reference; None for others.

    Transformations such as ``jax.checkpoint`` return such functions, and their modules hold caches that
    cannot be pickled.
    """
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name or "")
    if module is None or vars(module) is not function.__globals__ or not is_library(module):
        return None
    if _importable(function):
        return None
    empty = tuple(types.CellType() for _ in function.__closure__ or ())
    state = {
        "closure": function.__closure__ or (),
        "attributes": dict(vars(function)),
        "slots": {
            slot: getattr(function, slot)
            for slot in ("__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")
        },
    }
    arguments = (function.__code__, name, function.__name__, empty)
    return restored.function_of_library, arguments, state, None, None, restored.fill_function


def _importable(obj: Any) -> bool:
    """Whether an object is what its module and qualified name say."""
    named: Any = sys.modules.get(obj.__module__ or "")
    for part in obj.__qualname__.split("."):
        named = vars(named).get(part) if isinstance(named, types.ModuleType | type) else None
    return named is obj


def _with_registration(obj: type, reduced: Any) -> Any:
    """A class that is sent by value, with its entry among JAX's pytrees."""
    if not isinstance(reduced, tuple) or len(reduced) != 6 or "jax" not in sys.modules:
        return reduced
    maker, arguments, state, *nothing, fill = reduced
    entry = (fill, state, restored.registration(obj))
    return restored.skeleton, (maker, *arguments), entry, *nothing, restored.fill_class


@functools.cache
def is_library(module: types.ModuleType) -> bool:
    """Whether a module belongs to Python, an installed package or Systolic, so that the child imports the same."""
    if module.__name__ == "__main__":
        return False
    if module.__name__.partition(".")[0] in ("systolic", *sys.stdlib_module_names):
        return True
    file = vars(module).get("__file__")
    if file is None:
        return True
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return any(Path(file).is_relative_to(folder) for folder in folders if folder)


def _holds_devices(value: Any, module: types.ModuleType, depth: int = _DEPTH) -> bool:
    """Whether a value of a module, or one inside it, is a device, a mesh or a sharding of this process."""
    jax = sys.modules.get("jax")
    if jax is None or depth < 0:
        return False
    kinds = (jax.sharding.Mesh, jax.sharding.Sharding, jax.Device)
    if isinstance(value, kinds):
        return True
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    elif isinstance(value, jax.stages.Wrapped):
        info = vars(value).get("_jit_info")
        inside = [value.__wrapped__, *(info.in_shardings_leaves if info else ())]
    elif type(value).__module__ == module.__name__ and type(value).__dictoffset__:
        inside = list(vars(value).values())
    return any(_holds_devices(inner, module, depth - 1) for inner in inside)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # an empty cell
        return False
