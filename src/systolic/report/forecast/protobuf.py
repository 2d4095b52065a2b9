"""The few encodings of protocol buffers that a profile needs: varints, doubles, text, messages.

The wire format: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterable

VARINT, FIXED64, BYTES = 0, 1, 2


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def integer(field: int, value: int) -> bytes:
    """An int64, uint64 or bool field."""
    return varint(field << 3 | VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    """A double field."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def message(field: int, *parts: bytes) -> bytes:
    """A field that holds a message of these fields, or raw bytes."""
    body = b"".join(parts)
    return varint(field << 3 | BYTES) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """A string field."""
    return message(field, value.encode())


def table(field: int, entries: Iterable[tuple[int, bytes]]) -> bytes:
    """A map field from int64 to messages."""
    return b"".join(message(field, integer(1, key), message(2, value)) for key, value in entries)
