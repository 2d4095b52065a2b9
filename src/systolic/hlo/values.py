"""Values that are known before a run: ranges of scalars, and lists of them for tuples and small arrays.

Elements of small arrays as values, one by one: a loop may count in an array of one element, or in one of several.

An array along one dim is a list of its elements, in their order, or one value where all are the same; a longer one,
such as what a scan is over, a table that only keeps its elements while it is passed on, sliced or computed as a whole.
"""

import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from systolic.hlo.module import Instruction
from systolic.hlo.shape import Shape, parse_shape

Number = int | float
MOST_ELEMENTS = 16
"""Elements of the largest array of which they are followed one by one."""
LONGEST = 16_384
"""Elements of the longest table: a turn of an outer loop for each."""
_SLICES = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")
MOVES = frozenset(
    ("slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "iota", "reverse")
)
"""Opcodes that arrange elements."""


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
        array = super().__new__(
            cls, min(element.low for element in elements), max(element.high for element in elements)
        )
        array.elements = elements
        return array

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
        return [
            hull(left_part, right_part) for left_part, right_part in zip(left, right, strict=True)
        ]
    if isinstance(left, list) or isinstance(right, list):
        return UNKNOWN
    return Known(min(left.low, right.low), max(left.high, right.high))


def rounded(number: float, kind: Kind) -> float:
    """A float in its type; infinite where it is too large."""
    if kind.bits == 64:
        return number
    if kind.name == "bf16":
        # A float in the upper 16 bits of f32, to the nearest, of two as near to the even one.
        if not math.isfinite(number):
            return number
        try:
            (bits,) = struct.unpack("I", struct.pack("f", number))
        except OverflowError:
            return math.copysign(math.inf, number)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0]
    code = "e" if kind.bits == 16 else "f"
    try:
        return struct.unpack(code, struct.pack(code, number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)


_WORDS = {"true": YES, "false": NO}


def small(shape: Shape) -> bool:
    """Whether elements are followed one by one."""
    return shape.elements <= MOST_ELEMENTS and sum(dim > 1 for dim in shape.dims) <= 1


def is_line(shape: Shape) -> bool:
    """Whether a table may be of that shape: along one dim."""
    return shape.elements <= LONGEST and sum(dim > 1 for dim in shape.dims) <= 1


def one_value(elements: Sequence[Value]) -> Value:
    """A list or a table, or the value where all elements are the same one."""
    if not elements:
        return UNKNOWN
    first = elements[0]
    same = (
        isinstance(first, Known) and first.exact and all(element == first for element in elements)
    )
    if same or len(elements) == 1:
        return first
    known = tuple(element for element in elements if isinstance(element, Known))
    return Elements(known) if MOST_ELEMENTS < len(known) == len(elements) else list(elements)


def spread(value: Value, size: int) -> list[Known]:
    """An array's value by element; all unknown where it is another's."""
    if isinstance(value, Elements):
        return list(value.elements) if len(value.elements) == size else [value.range] * size
    if isinstance(value, Known):
        return [value] * size
    elements = [element for element in value if isinstance(element, Known)]
    return elements if len(elements) == size == len(value) else [UNKNOWN] * size


@lru_cache(maxsize=4096)
def constant(literal: str, shape_text: str) -> Value:
    """Value of a constant: one number, or an array of few or of equal numbers."""
    if shape_text.startswith("("):
        return UNKNOWN
    shape = parse_shape(shape_text)
    kind = kind_named(shape.dtype)
    if kind is None:
        return UNKNOWN
    words = literal.replace("{", " ").replace("}", " ").replace(",", " ").split()
    if len(words) != shape.elements or not words:
        return UNKNOWN
    if len(set(words)) > 1 and not is_line(shape):
        return UNKNOWN
    return one_value([_number(word, kind) for word in words])


@lru_cache(maxsize=64)
def _counting(size: int) -> Value:
    return one_value([Known(n, n) for n in range(size)])


def _number(word: str, kind: Kind) -> Known:
    if word in _WORDS:
        return _WORDS[word]
    try:
        number = rounded(float(word), kind) if kind.is_float else int(word)
    except ValueError:
        return UNKNOWN
    return Known(number, number) if abs(number) != float("inf") and number == number else UNKNOWN


def moved(
    instruction: Instruction,
    values: Sequence[Value],
    shapes: Sequence[Shape],
    decides: Callable[..., None],
) -> Value:
    """Result of an op that arranges elements.

    Args:
        instruction: The op.
        values: Values of its operands.
        shapes: Their shapes.
        decides: Called with the indices that were followed.
    """
    target, opcode = parse_shape(instruction.shape_text), instruction.opcode
    if opcode == "iota":
        along = int(instruction.attribute("iota_dimension") or 0)
        if is_line(target) and along == _long(target):
            return _counting(target.elements)
        return Known(0, target.dims[along] - 1) if target.elements else UNKNOWN
    if opcode == "dynamic-update-slice":
        return _updated(values, shapes, decides)
    first = values[0]
    if isinstance(first, Known) and not isinstance(first, Elements) and opcode != "concatenate":
        return first
    if not all(is_line(shape) for shape in (target, shapes[0])):
        return UNKNOWN
    elements = spread(values[0], shapes[0].elements)
    if opcode == "concatenate":
        parts = [spread(v, shape.elements) for v, shape in zip(values, shapes, strict=True)]
        return one_value([element for part in parts for element in part])
    if opcode == "reverse":
        return one_value(elements[::-1])
    if opcode == "slice":
        dim = _long(shapes[0])
        bounds = _SLICES.findall(instruction.attribute("slice") or "")
        if dim >= len(bounds):
            return UNKNOWN
        start, stop, step = bounds[dim]
        return one_value(elements[int(start) : int(stop) : int(step or 1)])
    starts = _starts(values[1:], shapes[0], target.elements, decides)
    if isinstance(first, Elements) and len(starts) > MOST_ELEMENTS:
        return first.range
    windows = [elements[at : at + target.elements] for at in starts]
    return one_value([_any(column) for column in zip(*windows, strict=True)])


def _updated(
    values: Sequence[Value], shapes: Sequence[Shape], decides: Callable[..., None]
) -> Value:
    buffer, update = shapes[:2]
    if not (small(buffer) and small(update)):
        flat = [*_flat(values[0]), *_flat(values[1])]
        return _any(flat)
    old, new = spread(values[0], buffer.elements), spread(values[1], update.elements)
    starts = _starts(values[2:], buffer, update.elements, decides)
    arrays = [[*old[:at], *new, *old[at + len(new) :]] for at in starts]
    return one_value([_any(column) for column in zip(*arrays, strict=True)])


def _starts(
    indices: Sequence[Value], shape: Shape, size: int, decides: Callable[..., None]
) -> list[int]:
    """Places where a slice may begin along the array's one long dim: indices are held within it."""
    last = shape.elements - size
    index = indices[_long(shape)] if shape.dims else Known(0, 0)
    if not isinstance(index, Known):
        index = UNKNOWN
    decides(*index)

    def held(number: Number) -> int:
        return int(min(max(number, 0), last))

    return list(range(held(index.low), held(index.high) + 1))


def _long(shape: Shape) -> int:
    """The dim that has more than one element; the first where none has."""
    return next((n for n, dim in enumerate(shape.dims) if dim > 1), 0)


def _flat(value: Value) -> list[Value]:
    return [value] if isinstance(value, Known) else value


def _any(values: Sequence[Value]) -> Value:
    joined = values[0]
    for other in values[1:]:
        joined = hull(joined, other)
    return joined
