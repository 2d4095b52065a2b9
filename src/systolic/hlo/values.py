"""Values that are known before a run: ranges of scalars, and lists of them for tuples and small arrays."""

import math
import struct
from functools import lru_cache
from typing import NamedTuple

from systolic.hlo.module import Instruction

Number = int | float


class Known(NamedTuple):
    """A scalar's range, both ends included; exact where they are equal. Predicates are 0 and 1."""

    low: Number
    high: Number

    @property
    def exact(self) -> bool:
        """Whether only one value is possible."""
        return self.low == self.high


class Elements(Known):
    """An array along one dim whose elements are known; to all that looks no closer, their range."""

    elements: tuple[Known, ...]

    def __new__(cls, elements: tuple[Known, ...]) -> "Elements":
        """The array of these elements."""
        made = super().__new__(
            cls, min(one.low for one in elements), max(one.high for one in elements)
        )
        made.elements = elements
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elements) and self.elements == other.elements

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.elements)

    @property
    def range(self) -> Known:
        """Range of all elements."""
        return Known(self.low, self.high)


Value = Known | list["Value"]
"""A scalar, or the parts of a tuple."""

UNKNOWN = Known(-math.inf, math.inf)
NO, YES, MAYBE = Known(0, 0), Known(1, 1), Known(0, 1)


class Kind(NamedTuple):
    """Type of a scalar."""

    name: str
    bits: int
    signed: bool
    is_float: bool

    @property
    def lowest(self) -> int:
        """The smallest integer of the type."""
        return -(1 << (self.bits - 1)) if self.signed else 0


@lru_cache(maxsize=64)
def kind_named(dtype: str) -> Kind | None:
    """Type of a dtype; None where its scalars are not followed."""
    if dtype == "pred":
        return Kind(dtype, 1, False, False)
    if dtype[:1] in ("s", "u") and dtype[1:].isdigit():
        return Kind(dtype, int(dtype[1:]), dtype[0] == "s", False)
    if dtype in ("bf16", "f16", "f32", "f64"):
        return Kind(dtype, int(dtype.lstrip("bf")), True, True)
    return None


def kind_of(instruction: Instruction) -> Kind | None:
    """Type of an instruction's result."""
    text = instruction.shape_text
    return None if text.startswith("(") else kind_named(text.partition("[")[0])


def hull(left: Value, right: Value) -> Value:
    """The smallest value that holds both."""
    if left is right:
        return left
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [hull(one, other) for one, other in zip(left, right, strict=True)]
    if isinstance(left, list) or isinstance(right, list):
        return UNKNOWN
    return Known(min(left.low, right.low), max(left.high, right.high))


def rounded(number: float, kind: Kind) -> float:
    """A float in its type; infinite where it is too large."""
    if kind.bits == 64:
        return number
    if kind.name == "bf16":
        return _upper_half(number)
    code = "e" if kind.bits == 16 else "f"
    try:
        return struct.unpack(code, struct.pack(code, number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


def _upper_half(number: float) -> float:
    """A float in the upper 16 bits of f32, to the nearest, of two as near to the even one."""
    if not math.isfinite(number):
        return number
    try:
        (bits,) = struct.unpack("I", struct.pack("f", number))
    except OverflowError:
        return math.copysign(math.inf, number)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0]
