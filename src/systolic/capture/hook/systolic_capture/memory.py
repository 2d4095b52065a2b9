"""Memory of the slice that the program's arrays hold: what is alive beside the arguments of a call, and outside of calls."""

import collections
import contextlib
import functools
import gc
import itertools
import math
import threading

from systolic_capture import bridge, report

HOST = ("pinned_host", "unpinned_host")
LEAST_BYTES = 1 << 16
"""Bytes below which what is held is left out: the metrics of the step before."""
MOST_CHANGES = 10_000
"""Arrays that are made and dropped before they are added up."""
WATCHED_BYTES = 1 << 20
"""Bytes of a device's part of an array, from which its creation may be a peak."""
GROWTH = 0.05
"""Share of a device's memory by which what is held grows before garbage is collected, since it may be that."""
LARGEST = 12
"""Arrays that are named."""

_count = itertools.count()
_changes = collections.deque()
_totals = {}
_small = {}
_alive = {}
_lock = threading.RLock()
_here = threading.local()
_collected = [0.0, 0.0]
_peak = {"bytes": 0, "line": "", "arrays": [], "over": False}


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
        if self.part_bytes >= WATCHED_BYTES:
            look()

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
    size = itemsize * math.prod(map(int, part))
    kind = "unpinned_host" if is_on_host(sharding) else "device"
    return (devices, kind), -(-size // divided)


def is_on_host(sharding):
    """Whether a sharding's arrays lie in the memory of hosts, as those of the CPU's device do."""
    kind = getattr(sharding, "memory_kind", None) or "device"
    return kind in HOST or bridge.is_elsewhere(sharding)


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


def _without_garbage():
    """Bytes that are held, by place; garbage is collected where they are clearly more than the last time."""
    held = _added_up()
    least = GROWTH * (report.request().device_bytes or 1 << 34)
    measures = _measures(held)
    if any(
        now > before + max(least, GROWTH * before)
        for now, before in zip(measures, _collected, strict=True)
    ):
        gc.collect()
        held = _added_up()
        _collected[:] = map(max, _collected, _measures(held))
    return held


def _measures(held):
    """The most bytes of a place, and those of all on the mean device."""
    sizes = [(len(ids), size) for (ids, kind), size in held.items() if kind not in HOST]
    total = sum(number * size for number, size in sizes) / max(1, len(bridge.slice_devices()))
    return max((size for _, size in sizes), default=0), total


def _most(held):
    """The most bytes on a device."""
    every, apart = 0, {}
    for (ids, kind), size in held.items():
        if kind in HOST:
            continue
        if len(ids) == len(bridge.slice_devices()):
            every += size
            continue
        for device in ids:
            apart[device] = apart.get(device, 0) + size
    return every + max(apart.values(), default=0)


@contextlib.contextmanager
def inside_call():
    """A recorded call, in which what is held is the compiler's to say."""
    _here.calls = getattr(_here, "calls", 0) + 1
    try:
        yield
    finally:
        _here.calls -= 1
    look()


def look():
    """Notes what a device holds outside of the recorded calls where it is the most yet, until it is more than a device has."""
    if getattr(_here, "calls", 0) or _peak["over"] or _most(_added_up()) <= _peak["bytes"]:
        return
    most = _most(_without_garbage())
    if most <= _peak["bytes"]:
        return
    _peak["bytes"], _peak["line"] = most, report.line()
    if most > report.request().device_bytes > 0:
        _peak["over"] = True
        _peak["arrays"] = largest(LARGEST, ())


def outside():
    """The most that a device held outside of the recorded calls: bytes, the program's line, and the largest arrays where they are more than it has."""
    return {name: _peak[name] for name in ("bytes", "line", "arrays")}


def beside(values):
    """Bytes that arrays hold on a device beside some, by place; views of one array count once."""
    held = _without_garbage()
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
    """The largest arrays that are alive, as number, shape, dtype, bytes on a device, kind of memory and the call that made them.

    Args:
        number: How many.
        excepted: Numbers of buffers that are left out.
    """
    arrays = [(at, *facts) for at, facts in list(_alive.items()) if at not in excepted]
    arrays.sort(key=lambda facts: -facts[2])
    return [
        {
            "number": at,
            "shape": list(shape),
            "dtype": dtype,
            "bytes": size,
            "memory": place[1],
            "born": born,
        }
        for at, place, size, shape, dtype, born in arrays[:number]
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
                host = host_of.get(device, 0)  # of this machine's CPU: of the first
                on_host[host] = on_host.get(host, 0) + size
            else:
                on_device[device] = on_device.get(device, 0) + size
    most = {
        "bytes": max((on_device.get(device, 0) for device in devices), default=0),
        "other_bytes": max((on_device.get(device, 0) for device in others), default=0),
        "host_bytes": max(on_host.values(), default=0),
    }
    return {name: size if size >= LEAST_BYTES else 0 for name, size in most.items()}
