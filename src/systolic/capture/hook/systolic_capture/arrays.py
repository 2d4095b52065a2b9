"""An array on the slice: shape, dtype and sharding, and no data. Who reads it gets zeros."""

import importlib
import itertools
import weakref
from typing import Any

LARGE_BYTES = 1 << 16

_class: list[Any] = []
_on_host: dict[int, tuple[Any, str]] = {}
_count = itertools.count()


def array_class():
    """The class of arrays on the slice."""
    if not _class:
        from systolic_capture.slice_array import SliceArray

        _class.append(SliceArray)
    return _class[0]


def is_slice_array(value):
    """Whether a value stands for an array on the slice."""
    return bool(_class) and isinstance(value, _class[0])


def serials(values):
    """Numbers and bytes of the large arrays among some values: another array has another number.

    Keys of random numbers have no ``nbytes`` in jax 0.5.
    """
    import jax

    placed = (array for array in values if is_slice_array(array) or isinstance(array, jax.Array))
    sizes = ((array, array.size * array.dtype.itemsize) for array in placed)
    return [
        (array.serial if is_slice_array(array) else _serial_on_host(array), size)
        for array, size in sizes
        if size > LARGE_BYTES
    ]


def _serial_on_host(array):
    """The number of an array that was never placed, such as weights that are given to jit from the host."""
    known = _on_host.get(id(array))
    if known is None or known[0]() is not array:
        known = _on_host[id(array)] = (weakref.ref(array), f"host {next(_count)}")
    return known[1]


def links(values):
    """Links of a call to those before it: numbers of the arrays that it takes, and of the calls that they come from.

    Keys of random numbers and counters don't: what makes one array after the other shares them.
    """
    taken = [
        array for array in values if is_slice_array(array) and array.size > 1 and _is_inexact(array)
    ]
    return frozenset(array.serial for array in taken), frozenset(array.born for array in taken)


def _is_inexact(array):
    import numpy as np
    from jax._src import dtypes

    return dtypes.issubdtype(array.dtype, np.inexact)


def donate(values, results, places):
    """Frees the memory of arguments that a call donates; the program may not use those that became a result again.

    Args:
        values: Arguments, each with whether it is donated.
        results: Results of the call, with shape and dtype.
        places: The sharding of each, or that and more: an argument that is like no result is only warned of by jax.
    """
    left = []
    for result, where in zip(results, places, strict=True):
        aval = getattr(result, "aval", result)
        if hasattr(aval, "shape"):
            left.append(_kind(aval, where[0] if isinstance(where, tuple) else where))
    for value, gone in values:
        if not (gone and is_slice_array(value)):
            continue
        if value.buffer:
            value.buffer.free()
        kind = _kind(value, value.sharding)
        if kind in left:
            left.remove(kind)
            value.donated()


def _kind(aval, sharding):
    """Key that an argument shares with the result that takes its memory."""
    return tuple(aval.shape), str(aval.dtype), getattr(sharding, "memory_kind", None) or "device"


def check(values):
    """Refuses donated and deleted arrays, as jax does."""
    for array in filter(is_slice_array, values):
        array.use()


def latest(values):
    """Number of the latest recorded call that some values come from; -1 where they come from none."""
    return max((value.born for value in values if is_slice_array(value)), default=-1)


def register():
    """Makes jax take the class for an array."""
    from jax._src import api_util, core, dtypes
    from jax._src.interpreters import mlir, pxla
    from jax._src.numpy import array_methods

    try:
        xla: Any = importlib.import_module("jax._src.interpreters.xla")
    except ImportError:  # its handlers are in dtypes since jax 0.7
        xla = dtypes

    kind = array_class()
    own = set(vars(kind))
    included = [
        *(f"__{name}__" for name in array_methods._array_operators),
        *array_methods._array_methods,
        *array_methods._array_properties,
        "__getitem__",
    ]
    array_methods._set_array_base_attributes(
        kind, include=[name for name in included if name not in own]
    )
    core.pytype_aval_mappings[kind] = lambda array: array.aval
    if hasattr(dtypes, "register_canonicalize_value_handler"):
        dtypes.register_canonicalize_value_handler(kind, None)
    for module, name in (
        (xla, "canonicalize_dtype_handlers"),
        (dtypes, "canonicalize_value_handlers"),
    ):
        if hasattr(module, name):
            getattr(module, name)[kind] = lambda array: array
    if hasattr(api_util, "_shaped_abstractify_handlers"):
        api_util._shaped_abstractify_handlers[kind] = lambda array: array.aval
    if hasattr(core, "shaped_abstractify_handlers"):
        core.shaped_abstractify_handlers[kind] = lambda array: array.aval

    mlir.register_constant_handler(kind, _constant)  # ty: ignore[invalid-argument-type]

    def shard(arrays, *_):
        raise RuntimeError("an array on the slice was given to a program on the CPU")

    pxla.shard_arg_handlers[kind] = shard


def _constant(val, *rest):
    """Zeros, in a program that the program under capture lowers itself."""
    import numpy as np
    from jax._src.interpreters import mlir

    base = val.physical
    zeros = np.broadcast_to(
        np.zeros((), base.dtype), base.shape
    )  # one number in the text, however large
    return mlir.get_constant_handler(np.ndarray)(zeros, *rest)
