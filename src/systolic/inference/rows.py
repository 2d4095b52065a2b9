"""Rows, what one call of a program computes many of, and buckets, the shapes of the calls."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """One example, or a part of one such as a window of a recording."""

    arrays: Mapping[str, np.ndarray]
    """By name, without the batch dim."""
    length: int = 0
    """Positions, where rows differ in length."""
    shared: bytes = b""
    """Digest of what all rows of a call have in common; rows with others don't share a call."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """The shape of a call, and so a program."""

    length: int | None = None
    """Positions of a row; None where all rows have one shape."""
    rows: int

    def __str__(self) -> str:
        return f"{self.rows}" if self.length is None else f"{self.rows} x {self.length}"

    @property
    def positions(self) -> int:
        """Rows, or rows x length."""
        return self.rows * (self.length or 1)


MOST = 32
"""Most rows of a call for files."""


def enough(examples: int) -> int:
    """Examples of a batch that holds so many, at most MOST.

    An example of padding takes as long as any, and powers of two are few shapes to compile.
    """
    return min(MOST, 1 << max(examples - 1, 0).bit_length())
