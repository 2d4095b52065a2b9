"""Bytes that are moved between devices and memories of the slice outside of the program's jitted functions, and what a step has of them."""

import collections
import functools
import math

from systolic_capture import bridge, memory

KINDS = ("host", "devices", "slices")
"""Over the link between a device and its host, between the chips of a slice, and between slices."""
CAUSES = ("put", "spread", "read", "fed")
"""``jax.device_put``; a call on several devices of an array that is committed to none; a value that the program reads; an array of
the host, such as a batch, that is put onto the slice or given to a call."""
NONE = (0,) * (len(KINDS) + 1)

_totals = dict.fromkeys(CAUSES, NONE)


def so_far():
    """By cause the bytes of a device by :data:`KINDS`, and the number of moves, since the program began."""
    return tuple(_totals.values())


def _add(cause, moved):
    _totals[cause] = tuple(map(sum, zip(_totals[cause], (*moved, 1), strict=True)))


def count_read(value):
    """Counts an array of the slice whose value the program reads: each device gives its part."""
    size = memory.part_bytes(value.aval, value.sharding)
    if size >= memory.LEAST_BYTES and not memory.is_on_host(value.sharding):
        _add("read", (size, 0, 0))


def count_fed(aval, where):
    """Counts an array of the host that goes to the slice: each device gets its part; ``where`` is None of an argument of jit."""
    size = aval.size * getattr(aval.dtype, "itemsize", 4)
    if where is not None:
        size = memory.part_bytes(aval, where)
    if size >= memory.LEAST_BYTES and not (where is not None and memory.is_on_host(where)):
        _add("fed", (size, 0, 0))


def of_steps(pairs):
    """Bytes that a step moves on average, by cause.

    Args:
        pairs: From :func:`so_far`, at the begin and the end of each recorded step.

    Returns:
        For each cause of any move the bytes by :data:`KINDS` and ``times``; and in ``some`` what comes with some steps alone:
        the same for one of them, how many ``steps`` they are, ``of`` how many, and how many lie from one to the next, ``every``.
    """
    answer = {}
    for number, cause in enumerate(CAUSES):
        parts = [tuple(map(int.__sub__, end[number], start[number])) for start, end in pairs]
        if any(map(any, parts)):
            answer[cause] = _mean(parts)
    return answer


def _mean(parts):
    usual = collections.Counter(parts).most_common(1)[0][0]
    rare = [number for number, part in enumerate(parts) if part != usual]
    if 2 * len(rare) > len(parts):
        return _named(sum(column) / len(parts) for column in zip(*parts, strict=True))
    if not rare:
        return _named(usual)
    each = [
        sum(column) / len(rare) - always
        for column, always in zip(zip(*(parts[n] for n in rare), strict=True), usual, strict=True)
    ]
    share = _share(rare, len(parts))
    some = {"steps": len(rare), "of": len(parts), "every": 1 / share, **_named(each)}
    return {**_named(u + share * e for u, e in zip(usual, each, strict=True)), "some": some}


def _share(rare, steps):
    """How many of the steps are rare ones: from the first to the last of them, as far as those before and after allow."""
    if len(rare) == 1:
        return 1 / steps
    between = (len(rare) - 1) / (rare[-1] - rare[0])
    return min(max(between, (len(rare) - 1) / steps), (len(rare) + 1) / steps, 1.0)


def _named(numbers):
    return dict(zip((*KINDS, "times"), numbers, strict=True))


def count(value, target, cause="put"):
    """Counts an array of the slice that is placed elsewhere on it."""
    shape = tuple(value.shape)
    itemsize = getattr(value.dtype, "itemsize", 4)
    try:
        moved = _bytes(value.sharding, target, shape, itemsize)
    except Exception:  # shardings that do not divide the array
        return
    if any(moved):
        _add(cause, moved)


@functools.lru_cache(maxsize=4096)
def _bytes(source, target, shape, itemsize):
    """The most bytes that one device gets or gives away, by :data:`KINDS`."""
    ends = [where for where in (source, target) if not bridge.is_elsewhere(where)]
    if len(ends) == 1:  # the other is the memory of this machine
        sizes = (_size(_box(index, shape)) for _, index in _map(ends[0], shape))
        return max(sizes) * itemsize, 0, 0
    had = {device: _box(index, shape) for device, index in _map(source, shape)}
    on_host = [memory.is_on_host(where) for where in (source, target)]
    host = devices = slices = 0
    lacking = {True: 0, False: 0}
    own_slices = {_slice(device) for device in had}
    for device, index in _map(target, shape):
        box = _box(index, shape)
        size = _size(box) * itemsize
        missing = size - (_common(box, had[device]) * itemsize if device in had else 0)
        lacking[_slice(device) in own_slices] += missing
        if _slice(device) not in own_slices:
            slices = max(slices, missing)
        else:
            devices = max(devices, missing)
        if on_host[0] != on_host[1]:
            host = max(host, size)
    # What is there once has to leave the devices that have it, once at least.
    whole = math.prod(shape) * itemsize
    leaving = {near: -(-min(size, whole) // max(1, len(had))) for near, size in lacking.items()}
    return host, max(devices, leaving[True]), max(slices, leaving[False])


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
