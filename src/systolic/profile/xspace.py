"""The parts of a serialized XSpace that ``jax.profiler.ProfileData`` does not show.

A TPU's figures of an op (FLOPs, bytes, its place in the model) and the compiled modules are stats of
an event's metadata, which ``ProfileData`` leaves out. The messages are XSpace, XPlane, XEventMetadata
and XStat of tsl/profiler/protobuf/xplane.proto and HloProto of xla/service/hlo.proto; the wire format:
https://protobuf.dev/programming-guides/encoding
"""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from systolic.core.errors import DataError

METADATA = "/host:metadata"
_PROGRAM = re.compile(r"\((-?\d+)\)$")

# Fields of the messages
PLANES = 1
NAME, EVENT_METADATA, STAT_METADATA = 2, 4, 5
KEY, VALUE = 1, 2
STATS = 5
STAT, DOUBLE, SIGNED, TEXT, BYTES, REFERENCE = 1, 2, 4, 5, 6, 7
MODULE = 1
SPACE, ACCESSED, HBM = 2, 3, 1

Stats = Mapping[str, Any]


def metadata(content: bytes) -> dict[str, dict[str, Stats]]:
    """Plane to name of an event to the stats of its metadata: int, float, str or bytes.

    Args:
        content: A serialized XSpace.

    Raises:
        DataError: a message ends too early.
    """
    return {
        _text(plane, NAME): _events(plane)
        for number, plane in _fields(memoryview(content))
        if number == PLANES and not isinstance(plane, int)
    }


def modules(planes: Mapping[str, Mapping[str, Stats]]) -> dict[int, tuple[str, bytes]]:
    """Program id to name and serialized HloModuleProto of what :func:`metadata` found.

    Raises:
        DataError: a message ends too early.
    """
    protos = {}
    for event, stats in planes.get(METADATA, {}).items():
        program = _PROGRAM.search(event)
        proto = next((value for value in stats.values() if isinstance(value, bytes)), None)
        if program is None or proto is None:
            continue
        module = dict(_fields(memoryview(proto))).get(MODULE)
        if module is not None:
            protos[int(program[1])] = (event[: program.start()], bytes(module))
    return protos


def device_memory(breakdown: bytes) -> float | None:
    """Bytes read from and written to device memory by a MemoryAccessBreakdown; None where it lists nothing.

    The message is that of xprof's op_metrics.proto: entries of operation, memory space (1 is HBM) and bytes.

    Raises:
        DataError: it ends too early.
    """
    entries = [dict(_fields(value)) for _, value in _fields(memoryview(breakdown))]
    accessed = [entry.get(ACCESSED, 0) for entry in entries if entry.get(SPACE) == HBM]
    return float(sum(accessed)) if entries else None


def _events(plane: Any) -> dict[str, Stats]:
    parts = defaultdict(list)
    for key, value in _fields(plane):
        if key in (EVENT_METADATA, STAT_METADATA):
            parts[key].append(dict(_fields(value)))
    names = {
        entry.get(KEY, 0): _text(entry[VALUE], NAME)
        for entry in parts[STAT_METADATA]
        if VALUE in entry
    }
    events: dict[str, Stats] = {}
    for entry in parts[EVENT_METADATA]:
        if VALUE in entry:
            stats = [value for key, value in _fields(entry[VALUE]) if key == STATS]
            if stats:
                events.setdefault(_text(entry[VALUE], NAME), _stats(stats, names))
    return events


def _stats(messages: list[Any], names: Mapping[int, str]) -> Stats:
    stats: dict[str, Any] = {}
    for message in messages:
        fields = dict(_fields(message))
        name = names.get(fields.pop(STAT, 0))
        for number, value in fields.items():
            if name is not None:
                stats[name] = _value(number, value, names)
    return stats


def _value(number: int, value: Any, names: Mapping[int, str]) -> Any:
    if number == DOUBLE:
        return struct.unpack("<d", value)[0]
    if number == SIGNED:
        return value - (1 << 64) if value >> 63 else value
    if number == TEXT:
        return bytes(value).decode(errors="replace")
    if number == REFERENCE:
        return names.get(value, "")
    return bytes(value) if number == BYTES else value


def _text(message: Any, number: int) -> str:
    text = next((value for key, value in _fields(message) if key == number), b"")
    return bytes(text).decode(errors="replace")


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Number and value of a message's fields: an int, or the bytes of what is longer."""
    at, end = 0, len(message)
    try:
        while at < end:
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            if kind == 0:
                value, at = _varint(message, at)
                yield number, value
                continue
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
    except IndexError as error:
        raise DataError("the profile ends in the middle of a message; record it again") from error


def _varint(message: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
