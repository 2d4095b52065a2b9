"""An array on the slice: shape, dtype and sharding, and no data. Who reads it gets zeros."""

import functools
import importlib
import itertools
import threading
import weakref
from typing import Any

LARGE_BYTES = 1 << 16
MOST_CONSTANT = 1 << 26
"""Bytes that are written into a program: for 64 MiB a compile takes 13 s and 1.5 GiB, for 256 MiB 69 s and 5.2 GiB."""
PERIOD = 4099
"""Numbers after which those of a constant repeat."""

_class: list[Any] = []
_on_host: dict[int, tuple[Any, str]] = {}
_count = itertools.count()
_host = threading.local()
REF_MAKERS = ("new_ref", "ref", "mutable_array")
"""Operation that makes a mutable reference, by version of jax."""


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
    sizes = ((array, bytes_of(array)) for array in placed)
    return [
        (array.serial if is_slice_array(array) else _serial_on_host(array), size)
        for array, size in sizes
        if size > LARGE_BYTES
    ]


def bytes_of(array):
    """Bytes of an array; of keys of random numbers, too, which have no ``nbytes`` before jax 0.6."""
    return array.size * array.dtype.itemsize


def _serial_on_host(array):
    """The number of an array that was never placed, such as weights that are given to jit from the host."""
    known = _on_host.get(id(array))
    if known is None or known[0]() is not array:
        known = _on_host[id(array)] = (weakref.ref(array), f"host {next(_count)}")
    return known[1]


def links(values):
    """Signs of whether calls are of one step: numbers of the arrays that a call takes, and of the calls that they come from.

    Keys of random numbers and counters don't tell: what makes one array after the other shares them.
    """
    taken = [
        array
        for array in values
        if is_slice_array(array) and array.size > 1 and not _may_be_keys(array)
    ]
    return frozenset(array.serial for array in taken), frozenset(array.born for array in taken)


def _is_inexact(array):
    import numpy as np
    from jax._src import dtypes

    return dtypes.issubdtype(array.dtype, np.inexact)


def _may_be_keys(array):
    """Whether an array may be keys of random numbers: typed ones, or two or four words of 32 bits each."""
    import numpy as np
    from jax._src import dtypes

    if dtypes.issubdtype(array.dtype, dtypes.extended):
        return True
    return array.dtype == np.uint32 and array.shape[-1] in (2, 4)


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


class Origins:
    """Calls and moves that a value comes from."""

    def __init__(self, calls=(), moves=()):
        self.calls = dict(calls)
        """Number of the latest recorded call of each kind."""
        self.moves = dict(moves)
        """Ends of the last moves, by cause and kind."""

    def join(self, more):
        """Adds others, the later of each kind."""
        for own, other in ((self.calls, more.calls), (self.moves, more.moves)):
            for kind, number in other.items():
                own[kind] = max(number, own.get(kind, number))


def sources(values):
    """Origins of some values, whatever their dtype; none of values of the host."""
    latest = Origins()
    for value in values:
        if is_slice_array(value):
            latest.join(value.sources)
    return latest


def wait(array):
    """Notes that the host waits for an array: what this thread calls from now on begins after the calls that it comes from."""
    awaited().join(array.sources)


def awaited():
    """Origins of the values that this thread has waited for."""
    if not hasattr(_host, "awaited"):
        _host.awaited = Origins()
    return _host.awaited


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


def can_be_written(values):
    """Whether arrays that a function refers to can be written into its program: they are not too large, and none of them is a
    whole number that nobody knows, of which the trips of a loop may come."""
    small = sum(value.nbytes for value in values) <= MOST_CONSTANT
    return small and not any(
        value.size == 1 and value.known is None and not _is_inexact(value) for value in values
    )


def _constant(val, *rest):
    """Numbers that a compiler can't leave out, as it does zeros, in place of an array that a function refers to."""
    import numpy as np
    from jax._src.interpreters import mlir

    base = val.physical
    if val.known is not None:
        values = np.full(base.shape, val.known, base.dtype)
    elif can_be_written([val]):
        several = np.random.default_rng(0).uniform(0.5, 1.5, PERIOD)
        values = np.resize(several.astype(base.dtype), base.shape)
    else:  # one number in the text, however large
        values = np.broadcast_to(np.zeros((), base.dtype), base.shape)
    return mlir.get_constant_handler(np.ndarray)(values, *rest)


# mutable references of jax.new_ref: a call takes their arrays, and gives each that it may change anew


@functools.cache
def _ref_kind():
    """The class of mutable references, by version of jax; None where there is none."""
    from jax._src import core

    names = ("Ref", "ArrayRef", "MutableArray")
    return next((getattr(core, name) for name in names if hasattr(core, name)), None)


def is_ref(value):
    """Whether a value is a reference, rather than a traced one."""
    return type(value) is _ref_kind()


def refs_on_slice(values):
    """Whether the array of a reference among some values lies on the slice."""
    return any(is_slice_array(_holder(value)._buf) for value in values if is_ref(value))


def _holder(ref):
    return getattr(ref, "_refs", ref)


def uses_refs(jaxpr, args):
    """Whether a call takes a reference or refers to one."""
    return any(map(is_ref, args)) or any(map(is_ref, getattr(jaxpr, "consts", ())))


class DischargedCall:
    """A call with the arrays of its references as arguments that it donates, and as results behind its own."""

    def __init__(self, args, params, first_device):
        from jax._src.interpreters import pxla
        from jax._src.sharding_impls import UNSPECIFIED

        jaxpr, _, mutation = pxla._discharge_refs(params["jaxpr"])
        self._refs = [*args, *mutation.in_mut]
        self._changed = mutation.out_mut
        self.args = [_array_of_ref(value, first_device) for value in self._refs]
        more = len(mutation.in_mut)
        self.params: dict[str, Any] = {**params, "jaxpr": jaxpr}
        fillers = (("in_shardings", UNSPECIFIED), ("in_layouts", None), ("donated_invars", False))
        for name, filler in fillers:
            if name in params:
                self.params[name] = (*params[name], *[filler] * more)
        donated = self.params["donated_invars"]
        self.params["donated_invars"] = tuple(
            gone or is_ref(value) for gone, value in zip(donated, self._refs, strict=True)
        )
        self._place("out_shardings", lambda array: array.sharding)
        self._place("out_layouts", lambda _: None)

    def _place(self, name, of_array):
        """Gives each changed array a place among those of the results."""
        if name in self.params:
            own = iter(self.params[name])
            self.params[name] = tuple(
                next(own) if index is None else of_array(self.args[index])
                for index in self._changed
            )

    def results(self, outs):
        """The call's own results, once each reference has its array."""
        own = []
        for index, out in zip(self._changed, outs, strict=True):
            if index is None:
                own.append(out)
            else:
                _holder(self._refs[index])._buf = out
        return own


def _array_of_ref(value, first_device):
    """The array of a reference, committed as jax has it; another value as it is."""
    if not is_ref(value):
        return value
    array = _holder(value)._buf
    if not is_slice_array(array):
        from systolic_capture import counters

        known = counters.of(array)
        array = array_class()(array.aval, first_device())
        array.known = known
    array._committed = bool(getattr(value, "_committed", True))
    return array
