"""Whether a sound file has its end: libsndfile reads what is there of WAV, AIFF and Ogg, and says nothing."""

from typing import BinaryIO

BYTE_ORDERS = {b"RIFF": "little", b"FORM": "big"}
"""Byte order of the sizes in files of chunks, by their first bytes."""
SAMPLES = (b"data", b"SSND")
"""Names of the chunk of samples."""
UNKNOWN = 0x7FFF_0000
"""Sizes from here on stand for one that was not known, as when a pipe was written to."""
SLACK = 64
"""Bytes by which headers are wrong that count themselves."""
PAGE = 27
"""Bytes of an Ogg page before its table of segments, whose size is the last of them."""


def lacks_end(file: BinaryIO) -> bool:
    """Whether the file says that it is longer than it is."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(4)
    if first == b"OggS":
        return _page_lacks_end(file, size)
    return first in BYTE_ORDERS and _chunk_lacks_end(file, size, BYTE_ORDERS[first] == "little")


def _chunk_lacks_end(file: BinaryIO, size: int, little: bool) -> bool:
    """Whether the chunk of samples goes on after the file's end."""
    at = 12
    while at + 8 <= size:
        file.seek(at)
        name, length = file.read(4), int.from_bytes(file.read(4), "little" if little else "big")
        at += 8
        if name in SAMPLES:
            return length < UNKNOWN and at + length > size + SLACK
        at += length + length % 2
    return False


def _page_lacks_end(file: BinaryIO, size: int) -> bool:
    """Whether the last page goes on after the file's end."""
    at = 0
    while at < size:
        file.seek(at)
        page = file.read(PAGE)
        if not page.startswith(b"OggS"):
            return b"OggS".startswith(page)  # else a tag
        segments = file.read(page[-1]) if len(page) == PAGE else b""
        at += PAGE + page[-1] + sum(segments)
    return at > size
