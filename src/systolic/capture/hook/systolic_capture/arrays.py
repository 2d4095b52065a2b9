"""An array on the slice: shape, dtype and sharding, and no data. Who reads it gets zeros."""

import importlib
from typing import Any

LARGE_BYTES = 1 << 16

_class: list[Any] = []


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
    """Numbers and bytes of the large arrays among some values: another array has another number."""
    large = (one for one in values if is_slice_array(one) and one.nbytes > LARGE_BYTES)
    return [(one.serial, one.nbytes) for one in large]


def register():
    """Makes jax take the class for an array."""
    from jax._src import api_util, core, dtypes
    from jax._src.interpreters import pxla
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

    def shard(arrays, *_):
        raise RuntimeError("an array on the slice was given to a program on the CPU")

    pxla.shard_arg_handlers[kind] = shard
