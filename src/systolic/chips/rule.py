"""The rule by which a TPU generation names and shapes its slices.

A name counts TensorCores (v2 to v5p, TPU7x) or chips (v5e, v6e). The number of chips gives the
shape: the factors nearest to each other, in units of one chip (two axes) or of a cube of 4x4x4
chips (three axes). The rule agrees with every row of MaxText's table of slices.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

Shape = tuple[int, ...]

_PARTS_OF_A_CUBE: dict[int, Shape] = {
    1: (1, 1, 1),
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
}
"""One chip, one host (2x2x1), then hosts doubled along z, z and y up to half a cube."""


class Counts(enum.Enum):
    """Unit of the number in a slice's name."""

    cores = "cores"
    chips = "chips"


class Sizes(enum.Enum):
    """Which numbers of chips have a name."""

    powers_of_two = "powers of two"
    cubes = "cubes"
    listed = "listed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRule:
    """Names, shapes and wiring of one generation's slices."""

    dims: int
    counts: Counts
    sizes: Sizes
    largest_chips: int
    """Chips of the largest shape, named or not: the pod."""
    longest_axis: int
    topology_prefix: str
    """Name that libtpu has for the generation: ``v5`` for v5p."""
    chip_config_name: str = "default"
    smallest_chips: int = 4
    without_chips: tuple[int, ...] = ()
    listed_chips: tuple[int, ...] = ()
    extra_chips: tuple[int, ...] = ()
    largest_cubes: int = 0
    wrap_full_axis: int | None = None
    """Two axes: an axis wraps around when it has this length."""
    wrap_cube: int | None = None
    """Three axes: all wrap when each is a multiple of this."""
    note: str = ""
    sources: tuple[str, ...] = ()

    def named_chips(self) -> tuple[int, ...]:
        """The numbers of chips that have a name, ascending."""
        return _named_chips(self)

    def shape(self, chips: int) -> Shape:
        """The shape of a named number of chips, axes ascending (one host is 2x2x1)."""
        if self.dims == 3 and chips in _PARTS_OF_A_CUBE:
            return _PARTS_OF_A_CUBE[chips]
        return self._factors(chips)

    def _factors(self, chips: int) -> Shape:
        """The factorisation with the smallest sum; empty when an axis would be too long."""
        unit = 4 if self.dims == 3 else 1
        longest = self.longest_axis // unit
        shapes = [
            s for s in factorisations(chips // unit**self.dims, self.dims) if max(s) <= longest
        ]
        return tuple(unit * axis for axis in min(shapes, key=sum)) if shapes else ()

    def problem(self, shape: Shape) -> str:
        """Reason why a shape does not exist, in a few words; empty when it does."""
        if len(shape) != self.dims:
            return f"a topology here has {self.dims} axes"
        if prod(shape) > self.largest_chips:
            return f"a pod ends at {self.largest_chips} chips"
        if max(shape) > self.longest_axis:
            return f"an axis ends at {self.longest_axis} chips"
        if prod(shape) == 1 and self.smallest_chips == 1:
            return ""
        if self.dims == 2:
            even = all(axis >= 2 and axis % 2 == 0 for axis in shape)
            return "" if even else "each axis is even, since a host has 2x2 chips"
        whole = all(axis >= 4 and axis % 4 == 0 for axis in shape)
        if whole or (prod(shape) > 1 and shape in _PARTS_OF_A_CUBE.values()):
            return ""
        return "a shape is 2x2x1, 2x2x2, 2x2x4, 2x4x4, or has axes that are multiples of 4"

    def wrap(self, shape: Shape) -> tuple[bool, ...]:
        """Which axes have wraparound links."""
        if self.wrap_cube is not None:
            return (all(axis % self.wrap_cube == 0 for axis in shape),) * len(shape)
        return tuple(axis == self.wrap_full_axis for axis in shape)


@cache
def _named_chips(rule: SliceRule) -> tuple[int, ...]:
    """Chip counts that a rule names, computed once: every name that is looked up is compared with them."""
    if rule.sizes is Sizes.listed:
        return tuple(sorted(rule.listed_chips))
    if rule.sizes is Sizes.powers_of_two:
        powers = (2**k for k in range(rule.largest_chips.bit_length()))
        return tuple(n for n in powers if n >= rule.smallest_chips and n not in rule.without_chips)
    parts = [n for n in _PARTS_OF_A_CUBE if n >= rule.smallest_chips]
    cubes = (64 * k for k in range(1, rule.largest_cubes + 1))
    whole = (n for n in cubes if rule.shape(n))
    return tuple(sorted({*parts, *whole, *rule.extra_chips}))


def factorisations(number: int, parts: int, least: int = 1) -> Iterator[Shape]:
    """All ascending tuples of ``parts`` factors, each at least ``least``, whose product it is."""
    if parts == 1:
        if number >= least:
            yield (number,)
        return
    factor = least
    while factor**parts <= number:
        if number % factor == 0:
            for rest in factorisations(number // factor, parts - 1, factor):
                yield (factor, *rest)
        factor += 1
