"""Memory of the slice that the program's arrays hold: what is alive beside the arguments of a call."""

import collections
import functools
import itertools
import threading

HOST = ("pinned_host", "unpinned_host")
LEAST_BYTES = 1 << 16
"""Bytes below which what is held is left out: the metrics of the step before."""
MOST_CHANGES = 10_000
"""Arrays that are made and dropped before they are added up."""

_count = itertools.count()
_changes = collections.deque()
_totals = {}
_small = {}
_alive = {}
_lock = threading.RLock()


class ArrayMemory:
    """Memory of one array. Views share it, and it is free when the last of them is gone."""

    __slots__ = ("number", "part_bytes", "place")

    def __init__(self, aval, sharding, born):
        shape, itemsize = tuple(aval.shape), getattr(aval.dtype, "itemsize", 4)
        self.number = next(_count)
        self.place, self.part_bytes = _lies(sharding, shape, itemsize)
        _alive[self.number] = (self.place, self.part_bytes, shape, str(aval.dtype), born)
        _changes.append((self.place, self.part_bytes))
        if len(_changes) > MOST_CHANGES:
            _added_up()

    def free(self, alive=_alive, changes=_changes):
        """Frees it, once: a donated or deleted array may still have its name in the program."""
        # The collector may run this at any place, at the end of Python too: it takes no lock and no name of the module.
        if alive.pop(self.number, None) is not None:
            changes.append((self.place, -self.part_bytes))

    def __del__(self):
        self.free()

    @property
    def is_free(self):
        """Whether it was donated or deleted."""
        return self.number not in _alive


@functools.lru_cache(maxsize=4096)
def _lies(sharding, shape, itemsize):
    """Devices and kind of memory that a sharding names, and the bytes of a device's part, without padding."""
    devices = frozenset(device.id for device in sharding.device_set)
    try:
        part = sharding.shard_shape(shape)
        divided = 1
    except Exception:  # it does not divide the array
        part, divided = shape, len(devices)
    size = itemsize
    for dim in part:
        size *= int(dim)
    kind = getattr(sharding, "memory_kind", None) or "device"
    return (devices, kind), -(-size // divided)


def is_on_host(sharding):
    """Whether a sharding's arrays lie in the memory of hosts."""
    return (getattr(sharding, "memory_kind", None) or "device") in HOST


def part_bytes(aval, sharding):
    """Bytes of a device's part of an array."""
    if not hasattr(aval, "shape"):
        return 0
    return _lies(sharding, tuple(aval.shape), getattr(aval.dtype, "itemsize", 4))[1]


def _added_up():
    """Bytes that are held, by place."""
    with _lock:
        while _changes:
            place, size = _changes.popleft()
            _totals[place] = _totals.get(place, 0) + size
            if not _totals[place]:
                del _totals[place]
        return dict(_totals)


def beside(values):
    """Bytes that arrays hold on a device beside some, by place; views of one array count once."""
    held = _added_up()
    buffers = {value.buffer.number: value.buffer for value in values if value.buffer}
    for buffer in buffers.values():
        if not buffer.is_free:
            held[buffer.place] = held.get(buffer.place, 0) - buffer.part_bytes
    for place, size in _small.items():
        held[place] = held.get(place, 0) + size
    return {place: size for place, size in held.items() if size > 0}


def count_small(excepted):
    """Counts the arrays that were computed since they are small, which would lie on the first device of the slice.

    Args:
        excepted: Ids of the objects that a call takes, which are no part of what is beside it.
    """
    import jax

    from systolic_capture import bridge

    sizes = [
        array.nbytes
        for array in jax.live_arrays("cpu")
        if id(array) not in excepted
        and not array.is_deleted()
        and not getattr(array, "_committed", True)
    ]
    first = bridge.slice_devices()[0]
    _small[frozenset((first.id,)), "device"] = sum(sizes)


def made_by(buffer, call):
    """Notes the number of the recorded call that made an array."""
    facts = _alive.get(buffer.number) if buffer else None
    if facts is not None:
        _alive[buffer.number] = (*facts[:-1], call)


def joined(parts):
    """The buffer of an array that is made of parts, which become it: the one that all are views of; None of one of its own."""
    buffers = {part.buffer.number: part.buffer for part in parts if getattr(part, "buffer", None)}
    if len(buffers) == 1:
        return next(iter(buffers.values()))
    for buffer in buffers.values():
        if len(buffer.place[0]) == 1:
            buffer.free()
    return None


def largest(number, excepted):
    """The largest arrays that are alive, as shape, dtype, bytes on a device, kind of memory and the call that made them.

    Args:
        number: How many.
        excepted: Numbers of buffers that are left out.
    """
    arrays = [facts for at, facts in list(_alive.items()) if at not in excepted]
    arrays.sort(key=lambda facts: -facts[1])
    return [
        {"shape": list(shape), "dtype": dtype, "bytes": size, "memory": place[1], "born": born}
        for place, size, shape, dtype, born in arrays[:number]
    ]


def on_devices(held, devices, others, host_of):
    """Bytes that are held on a device.

    Args:
        held: From :func:`beside`.
        devices: Ids of the devices of a program.
        others: Ids of the other devices of the slice.
        host_of: The host of a device, by its id.

    Returns:
        ``bytes``: the most on one of ``devices``; ``other_bytes``: the most on one of ``others``; ``host_bytes``: the most
        in the memory of one host. Less than :data:`LEAST_BYTES` is 0.
    """
    on_device, on_host = {}, {}
    for (ids, kind), size in held.items():
        for device in ids:
            if kind in HOST:
                on_host[host_of[device]] = on_host.get(host_of[device], 0) + size
            else:
                on_device[device] = on_device.get(device, 0) + size
    most = {
        "bytes": max((on_device.get(device, 0) for device in devices), default=0),
        "other_bytes": max((on_device.get(device, 0) for device in others), default=0),
        "host_bytes": max(on_host.values(), default=0),
    }
    return {name: size if size >= LEAST_BYTES else 0 for name, size in most.items()}
