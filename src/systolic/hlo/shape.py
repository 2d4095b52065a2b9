"""Shapes as HLO prints them: dtype, dims, layout, tiles and memory space."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from systolic.core.errors import DataError

_BITS = {
    "pred": 8,
    "s1": 1,
    "u1": 1,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_NARROW = re.compile(r"f([48])e\dm\d(?:b11)?(?:fn|fnu|fnuz)?")
"""Floats of few bits: f8e4m3fn, f8e5m2, f8e8m0fnu, f4e2m1fn …"""
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"\(([^)]*)\)")

HBM, VMEM, SEMAPHORE, HOST = 0, 1, 2, 5
"""Memory spaces as libtpu numbers them: ``S(1)`` is VMEM, no ``S`` is HBM, 5 the host's pinned memory."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An array, or a tuple of shapes when ``parts`` is not None."""

    dtype: str = ""
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    """Dims from the fastest to the slowest in memory."""
    tile: tuple[int, ...] = ()
    """The outermost tile, such as (8, 128), over the fastest dims; empty when the layout has none."""
    space: int = HBM
    parts: "tuple[Shape, ...] | None" = None

    @property
    def is_tuple(self) -> bool:
        """Whether it is a tuple."""
        return self.parts is not None

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return bits_of(self.dtype)

    @property
    def elements(self) -> int:
        """Elements of an array."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; of a tuple the sum of its parts."""
        if self.parts is not None:
            return sum(part.bytes for part in self.parts)
        return -(-self.elements * self.bits // 8)

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Dims rounded up to whole tiles, as the array lies in memory."""
        if not self.tile or not self.dims:
            return self.dims
        padded = list(self.dims)
        order = self.minor_to_major or tuple(range(len(self.dims) - 1, -1, -1))
        for dim, size in zip(order, reversed(self.tile), strict=False):
            padded[dim] = -(-padded[dim] // size) * size
        return tuple(padded)

    @property
    def padded_bytes(self) -> int:
        """Bytes in memory, tiles filled up; of a tuple the sum of its parts."""
        if self.parts is not None:
            return sum(part.padded_bytes for part in self.parts)
        return -(-math.prod(self.padded_dims) * self.bits // 8)

    def arrays(self) -> "Iterator[Shape]":
        """The arrays in it, depth first."""
        if self.parts is None:
            yield self
        else:
            for part in self.parts:
                yield from part.arrays()

    def bytes_in(self, space: int) -> int:
        """Padded bytes of the arrays that lie in one memory space."""
        return sum(array.padded_bytes for array in self.arrays() if array.space == space)

    def __str__(self) -> str:
        if self.parts is not None:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def bits_of(dtype: str) -> int:
    """Bits of one element of an HLO dtype.

    Raises:
        DataError: there is no such dtype.
    """
    known = _BITS.get(dtype)
    if known is not None:
        return known
    if narrow := _NARROW.fullmatch(dtype):
        return int(narrow[1])
    raise DataError(f"{dtype!r} is not a dtype of HLO; the text may be damaged")


@lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """``bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`` or a tuple in parentheses.

    Raises:
        DataError: it is not a shape.
    """
    text = text.strip()
    if text.startswith("("):
        return Shape(parts=tuple(parse_shape(part) for part in split(text[1:-1])))
    match = _ARRAY.match(text)
    if match is None:
        raise DataError(f"{text[:60]!r} is not an HLO shape; the text may be damaged")
    dtype, dims, layout = match.groups()
    sizes = tuple(_size(dim, text) for dim in dims.split(",") if dim.strip())
    if layout is None:
        return Shape(dtype=dtype, dims=sizes)
    order, _, rest = layout.partition(":")
    tile: tuple[int, ...] = ()
    space = HBM
    if rest:
        if rest.startswith("T") and (first := _TILE.match(rest, 1)):
            tile = tuple(int(size) for size in first[1].split(",") if size.strip("*"))
        if marked := re.search(r"S\((\d+)\)", rest):
            space = int(marked[1])
    return Shape(
        dtype=dtype,
        dims=sizes,
        minor_to_major=tuple(int(dim) for dim in order.split(",") if dim),
        tile=tile,
        space=space,
    )


def _size(dim: str, text: str) -> int:
    digits = dim.strip().removeprefix("<=")
    if not digits.isdigit():
        raise DataError(
            f"{text[:60]!r} has no size for a dim; only programs of known sizes are read"
        )
    return int(digits)


def split(text: str) -> list[str]:
    """The parts of a list at its top-level commas; comments like ``/*index=5*/`` are dropped."""
    if "/*" in text:
        text = re.sub(r"/\*.*?\*/", "", text)
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    if last:
        parts.append(last)
    return parts
