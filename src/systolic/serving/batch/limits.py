"""How large a request may be; checked before anything is decoded."""

from dataclasses import dataclass
from typing import Annotated

from systolic.core.ranges import COUNT, Range, check


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """Largest inputs.

    Raises:
        OptionError: a value out of its range.
    """

    examples: Annotated[int, COUNT] = 256
    """Of a request."""
    bytes: Annotated[int, COUNT] = 32 * 2**20
    """Of a file, encoded, and of a text."""
    pixels: Annotated[int, COUNT] = 40_000_000
    """Width x height of a picture, by its header."""
    seconds: Annotated[float, Range(above=0)] = 1800.0
    """Of a recording."""

    def __post_init__(self) -> None:
        check(self)
