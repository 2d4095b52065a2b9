"""Bytes that ``jax.device_put`` moves between devices and memories of the slice, outside of the program's jitted functions."""

import functools
import math

from systolic_capture import memory

KINDS = ("host", "devices", "slices")
"""Over the link between a device and its host, between the chips of a slice, and between slices."""
NONE = (0, 0, 0, 0)

_total = list(NONE)


def so_far():
    """Bytes of a device by :data:`KINDS`, and the number of moves, since the program began."""
    return tuple(_total)


def count(value, target):
    """Counts an array of the slice that is placed elsewhere on it."""
    shape = tuple(value.shape)
    itemsize = getattr(value.dtype, "itemsize", 4)
    try:
        moved = _bytes(value.sharding, target, shape, itemsize)
    except Exception:  # shardings that do not divide the array
        return
    if any(moved):
        for at, size in enumerate((*moved, 1)):
            _total[at] += size


@functools.lru_cache(maxsize=4096)
def _bytes(source, target, shape, itemsize):
    """The most bytes that one device gets or gives away, by :data:`KINDS`."""
    had = {device: _box(index, shape) for device, index in _map(source, shape)}
    on_host = [memory.is_on_host(where) for where in (source, target)]
    host = devices = slices = 0
    own_slices = {_slice(device) for device in had}
    for device, index in _map(target, shape):
        box = _box(index, shape)
        size = _size(box) * itemsize
        missing = size - (_common(box, had[device]) * itemsize if device in had else 0)
        if _slice(device) not in own_slices:
            slices = max(slices, missing)
        else:
            devices = max(devices, missing)
        if on_host[0] != on_host[1]:
            host = max(host, size)
    return host, devices, slices


def _map(sharding, shape):
    return sharding.devices_indices_map(shape).items()


def _slice(device):
    return getattr(device, "slice_index", 0) or 0


def _box(index, shape):
    """Begin and end of a part along each dim."""
    return [part.indices(dim)[:2] for part, dim in zip(index, shape, strict=True)]


def _size(box):
    return math.prod(max(0, end - begin) for begin, end in box)


def _common(left, right):
    both = zip(left, right, strict=True)
    return _size([(max(a[0], b[0]), min(a[1], b[1])) for a, b in both])
