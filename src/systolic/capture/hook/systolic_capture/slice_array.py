"""The class of arrays on the slice; imported once jax is there."""

import itertools
import math
from typing import Any

import jax
import numpy as np
from jax._src import basearray, core, dtypes

from systolic_capture import arrays, bridge, memory, moves, report

_Array: Any = basearray.Array
_serials = itertools.count()


class SliceArray(_Array):
    """Stands for an array on the slice: who reads it gets zeros, and of a counter its number."""

    def __init__(self, aval, sharding, committed=True, sources=None, buffer=None):
        self.aval = aval
        self.sources = sources or arrays.Origins()
        self.buffer = memory.ArrayMemory(aval, sharding, self.born) if buffer is None else buffer
        """Its memory; False of one that stands for no array of the program."""
        self.serial = next(_serials)
        self.known = None
        """The number of a counter, where it is known."""
        self._sharding = sharding
        self._committed = committed
        self._deleted = False
        self._read = set()
        """Devices whose parts are on the host, of the whole and its parts at once."""

    @property
    def born(self):
        """Number of the latest recorded call that it comes from; -1 of one from none."""
        return max(self.sources.calls.values(), default=-1)

    __array_priority__ = 100
    """That of jax's arrays: numpy leaves operations with one to it, where it stands at the right as well."""

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: len(self.aval.shape))
    size = property(lambda self: math.prod(self.aval.shape))
    weak_type = property(lambda self: getattr(self.aval, "weak_type", False))
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    sharding = property(lambda self: self._sharding)
    committed = property(lambda self: self._committed)
    is_fully_addressable = property(lambda self: self._sharding.is_fully_addressable)
    is_fully_replicated = property(lambda self: self._sharding.is_fully_replicated)
    format = property(lambda self: _format(self._sharding))
    layout = property(lambda self: _format(self._sharding))
    traceback = property(lambda self: None)

    @property
    def device(self):
        """Its device, or its sharding where it has several."""
        devices = self._sharding.device_set
        return next(iter(devices)) if len(devices) == 1 else self._sharding

    def devices(self):
        """Its devices."""
        return set(self._sharding.device_set)

    @property
    def addressable_shards(self):
        """Parts of this process's devices."""
        return [shard for shard in self.global_shards if bridge.is_local(shard.device)]

    @property
    def global_shards(self):
        """Parts of all devices."""
        indices = self._sharding.devices_indices_map(self.shape)
        return [_Shard(self, device, index) for device, index in indices.items()]

    def addressable_data(self, index):
        """A device's part."""
        return self.addressable_shards[index].data

    @property
    def physical(self):
        """Shape and dtype in memory, which those of keys of random numbers are not."""
        if dtypes.issubdtype(self.dtype, dtypes.extended):
            return core.physical_aval(self.aval)
        return self.aval

    def donated(self):
        """Notes that a call took its memory for a result."""
        self._deleted = True

    def use(self):
        """Refuses a donated or deleted array, as jax does."""
        if self._deleted:
            error: Any = RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}.")
            error.is_of_program = True
            raise error

    @property
    def _value(self):
        self.use()
        arrays.wait(self)
        if self.known is None:
            report.warn_of_read(self)
        moves.count_read(self, self._read, waits=True)
        known = 0 if self.known is None else self.known
        return np.full(self.physical.shape, known, self.physical.dtype)

    def __array__(self, dtype=None, context=None, copy=None):
        value = self._value
        return value if dtype is None else value.astype(dtype)

    def _scalar(self):
        if self.size != 1:
            raise TypeError("Only scalar arrays can be converted to Python scalars")
        return self._value.reshape(()).item()

    def __bool__(self):
        return bool(self._scalar())

    def __int__(self):
        return int(self._scalar())

    def __index__(self):
        return int(self._scalar())

    def __float__(self):
        return float(self._scalar())

    def __complex__(self):
        return complex(self._scalar())

    def item(self, *args):
        """Zero."""
        return self._value.item(*args)

    def tolist(self):
        """Zeros."""
        return self._value.tolist()

    def tobytes(self, order="C"):
        """Bytes of zeros."""
        return self._value.tobytes(order)

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __reversed__(self):
        return (self[index] for index in reversed(range(len(self))))

    def __format__(self, spec):
        return format(self._value[()] if self.ndim == 0 else self._value, spec)

    def __repr__(self):
        arrays.wait(self)
        return f"Array(shape={self.shape}, dtype={self.dtype}, on the slice)"

    __str__ = __repr__

    def __copy__(self):
        self.use()
        copy = type(self)(self.aval, self._sharding, self._committed, self.sources)
        copy.known = self.known
        return copy

    def __deepcopy__(self, memo):
        return self.__copy__()

    def copy(self):
        """Another like it."""
        return self.__copy__()

    def __reduce__(self):
        report.warn_of_save()
        return (np.asarray, (self._value,))

    def block_until_ready(self):
        """Itself: nothing is computed, and the host waits for it."""
        self.use()
        arrays.wait(self)
        return self

    def copy_to_host_async(self):
        """Counts the copy."""
        moves.count_read(self, self._read, waits=False)

    def without_memory(self):
        """The same, of no memory: what is kept of an argument holds none of the program's."""
        bare = type(self)(self.aval, self._sharding, self._committed, self.sources, buffer=False)
        bare.serial, bare.known = self.serial, self.known
        return bare

    def is_deleted(self):
        """Whether the program deleted or donated it."""
        return self._deleted

    def delete(self):
        """Frees its memory."""
        self._deleted = True
        if self.buffer:
            self.buffer.free()

    def is_ready(self):
        """Nothing is computed."""
        return True

    def on_device_size_in_bytes(self):
        """Bytes over all devices."""
        return self.nbytes

    def unsafe_buffer_pointer(self):
        """Any number."""
        return id(self)


class _Shard:
    """A device's part of an array."""

    def __init__(self, whole, device, index):
        self.device, self.index, self._whole = device, index, whole
        self.replica_id = 0

    @property
    def data(self):
        """The part, as an array of one device."""
        whole = self._whole
        shape = whole.sharding.shard_shape(whole.shape)
        part = SliceArray(
            core.ShapedArray(shape, whole.dtype),
            jax.sharding.SingleDeviceSharding(self.device),
            sources=whole.sources,
            buffer=whole.buffer,
        )
        part.known = whole.known
        part._read = whole._read
        return part


def _format(sharding):
    from jax.experimental import layout

    kind: Any = getattr(layout, "Format", None) or layout.Layout
    return kind(None, sharding)
