"""Bytes that are moved between devices and memories of the slice outside of the program's jitted functions, and what a step has of them."""

import collections
import functools
import math

from systolic_capture import arrays, bridge, memory, report

KINDS = ("host", "devices", "slices")
"""Over the link between a device and its host, between the chips of a slice, and between slices."""
CAUSES = ("put", "spread", "read", "fed")
"""``jax.device_put``; a call on several devices of an array that is committed to none; a value that the program reads; an array of
the host, such as a batch, that is put onto the slice or given to a call."""
EACH_WAY = ("in", "out")
"""Directions of a link, which carries both at once."""
ACROSS = "across"
"""All links from one part of the slice to the other, in place of a direction."""
MOST_PAIRS = 1 << 12
"""Parts of an array that lie on one side and are wanted there, in pairs, above which all are taken as being there."""

_counts = dict.fromkeys(CAUSES, 0)


class LinkQueue:
    """Moves of one cause and kind: those over different links run beside each other, one that waits for another behind it.

    Time is counted in bytes of a link, and stands still while nothing is moved: calls take none of it.
    """

    def __init__(self):
        self.now = 0
        """End of the last move."""
        self._free = 0
        self._busy = {}

    def move(self, parts, ready):
        """Moves bytes over the links of some devices, for each direction and devices; returns when all are there."""
        ends = [ready]
        for direction, devices, size in parts:
            end = max(ready, self._until(devices, direction)) + size
            self._busy[devices, direction] = end
            ends.append(end)
        self.now = max(self.now, *ends)
        return max(ends)

    def call(self, devices, ready):
        """Begin of a call on some devices, which waits for their moves, as later moves of theirs wait for it."""
        begin = max(ready, self._until(devices))
        if all(own <= devices for own, way in self._busy if way != ACROSS):
            self._busy.clear()
            self._free = begin
        else:
            self._busy.update(dict.fromkeys([(devices, way) for way in EACH_WAY], begin))
        return begin

    def _until(self, devices, direction=""):
        ends = [
            end
            for (own, way), end in self._busy.items()
            if direction in ("", way) and not own.isdisjoint(devices)
        ]
        return max(self._free, *ends) if ends else self._free


_queues = {(cause, kind): LinkQueue() for cause in CAUSES for kind in KINDS}


def so_far():
    """By cause the bytes that were moved one after the other by :data:`KINDS`, and the number of moves, since the program began."""
    return tuple(
        (*(_queues[cause, kind].now for kind in KINDS), count) for cause, count in _counts.items()
    )


def before_call(devices, sources):
    """Ends of the moves that a call waits for, and so of the call, by cause and kind.

    Args:
        devices: The devices of the call.
        sources: Origins of its arguments.
    """
    return {
        key: begin
        for key, queue in _queues.items()
        if queue.now and (begin := queue.call(devices, sources.moves.get(key, 0)))
    }


def _move(cause, parts, sources):
    """Moves bytes, for each kind by the links; returns what the moved array comes from."""
    _counts[cause] += 1
    latest = arrays.Origins(sources.calls, sources.moves)
    latest.join(arrays.awaited())
    for kind, own in zip(KINDS, parts, strict=True):
        if own:
            queue = _queues[cause, kind]
            latest.moves[cause, kind] = queue.move(own, latest.moves.get((cause, kind), 0))
    return latest


def count_read(value, read, *, waits):
    """Counts an array of the slice whose value goes to the host: each device gives its part, but for the devices ``read``, whose
    parts are there. ``waits``: whether the host waits for it."""
    if memory.is_on_host(value.sharding):
        return
    devices = _readers(value.sharding, tuple(value.shape)) - read
    read |= devices
    size = memory.part_bytes(value.aval, value.sharding)
    if size >= memory.LEAST_BYTES and devices:
        sources = _move("read", ([("", devices, size)], (), ()), value.sources)
        if waits:
            arrays.awaited().join(sources)


@functools.lru_cache(maxsize=4096)
def _readers(sharding, shape):
    """Devices that give each part of an array once."""
    parts = {}
    for device, index in _map(sharding, shape):
        parts.setdefault(tuple(_box(index, shape)), device)
    return frozenset(parts.values())


def count_fed(aval, where):
    """Counts an array of the host that goes to the slice: each device gets its part, over a link of its own."""
    size = memory.part_bytes(aval, where)
    if size >= memory.LEAST_BYTES and not memory.is_on_host(where):
        _move("fed", ([("", frozenset(where.device_set), size)], (), ()), arrays.Origins())


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
    """Counts an array of the slice that is placed elsewhere on it; returns what the array there comes from."""
    shape = tuple(value.shape)
    itemsize = getattr(value.dtype, "itemsize", 4)
    try:
        host, near, far = _parts(value.sharding, target, shape, itemsize)
        across = _across(value.sharding, target, shape, itemsize) if near else ()
    except Exception:  # shardings that do not divide the array
        return value.sources
    parts = (host, (*near, *across), far)
    return _move(cause, parts, value.sources) if any(parts) else value.sources


@functools.lru_cache(maxsize=4096)
def _parts(source, target, shape, itemsize):
    """For each of :data:`KINDS` the direction, devices and bytes of what their links carry."""
    ends = [where for where in (source, target) if not bridge.is_elsewhere(where)]
    if len(ends) == 1:  # the other is the memory of this machine
        sizes = {device: _size(_box(index, shape)) for device, index in _map(ends[0], shape)}
        return _by_size("", {device: size * itemsize for device, size in sizes.items()}), (), ()
    had = {device: _box(index, shape) for device, index in _map(source, shape)}
    is_host_link = memory.is_on_host(source) != memory.is_on_host(target)
    host, near, far = {}, {}, {}
    own_slices = {_slice(device) for device in had}
    for device, index in _map(target, shape):
        box = _box(index, shape)
        size = _size(box) * itemsize
        missing = size - (_common(box, had[device]) * itemsize if device in had else 0)
        (near if _slice(device) in own_slices else far)[device] = missing
        if is_host_link:
            host[device] = size
    # What is there once has to leave the devices that have it, once at least.
    whole = math.prod(shape) * itemsize
    both = []
    for lacking in (near, far):
        leaving = -(-min(sum(lacking.values()), whole) // max(1, len(had)))
        gone = _by_size("out", dict.fromkeys(had, leaving))
        both.append((*_by_size("in", lacking), *gone))
    return _by_size("", host), *both


@functools.lru_cache(maxsize=4096)
def _across(source, target, shape, itemsize):
    """Bytes that have to cross each cut of the torus, once at least: its links share them, in bytes of all links of a device."""
    had = [(device, _box(index, shape)) for device, index in _map(source, shape)]
    wanted = [(device, _box(index, shape)) for device, index in _map(target, shape)]
    if len({_slice(device) for device, _ in (*had, *wanted)}) > 1:
        return ()
    if report.request().gpu:  # NVSwitch joins each with each
        return ()
    torus = report.request().torus
    own_links = sum((2 if closed and size > 2 else 1) for size, closed in torus if size > 1)
    chips = math.prod(size for size, _ in torus)
    parts = []
    for axis, (size, closed) in enumerate(torus):
        for inside in _sides(size, closed and size > 2):
            there = {tuple(box) for device, box in had if device.coords[axis] in inside}
            lacking = {tuple(box) for device, box in wanted if device.coords[axis] in inside}
            lacking -= there
            if len(there) * len(lacking) > MOST_PAIRS:
                continue
            crossing = sum(
                max(0, _size(box) - sum(_common(box, other) for other in there)) for box in lacking
            )
            links = chips // size * (2 if closed and size > 2 else 1)
            if crossing:
                cut = frozenset([(axis, inside)])
                parts.append((ACROSS, cut, -(-crossing * itemsize * own_links // links)))
    return tuple(parts)


def _sides(size, closed):
    """The parts into which cuts divide an axis: of a ring its halves."""
    if closed:
        return [frozenset((begin + n) % size for n in range(size // 2)) for begin in range(size)]
    ends = range(1, size)
    return [frozenset(range(*side)) for end in ends for side in ((0, end), (end, size))]


def _by_size(direction, sizes):
    """Direction, devices and bytes: the devices of as many bytes together, and none of none."""
    devices = {}
    for device, size in sizes.items():
        devices.setdefault(size, []).append(device)
    return tuple((direction, frozenset(own), size) for size, own in devices.items() if size)


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
