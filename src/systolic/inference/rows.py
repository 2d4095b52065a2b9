"""Rows, what one call of a program computes many of, and buckets, the shapes of the calls, that pad the least."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 32
"""Most rows of a call for files."""


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


def enough(examples: int) -> int:
    """Examples of a batch that holds so many, at most MOST.

    An example of padding takes as long as any, and powers of two are few shapes to compile.
    """
    return min(MOST, 1 << max(examples - 1, 0).bit_length())


def fewest_padded(weights: Mapping[int, float], count: int) -> tuple[list[int], float]:
    """At most ``count`` sizes, the largest value among them, and the share of positions that is then padding.

    Each value takes the least size that holds it. Exact, by dynamic programming over the values in order.

    Args:
        weights: Value to how often it comes.
        count: Most sizes.
    """
    values = np.array(sorted(weights), np.int64)
    often = np.array([weights[value] for value in values.tolist()], np.float64)
    if not often.sum():
        often[-1] = 1.0
    number = len(values)
    before = np.concatenate([[0.0], np.cumsum(often)])
    # cost[i]: positions of the first i values under the best sizes so far; size j ends a group at value j.
    cost = np.concatenate([[0.0], np.full(number, np.inf)])
    origins = []
    for _ in range(min(count, number)):
        fresh = np.full(number + 1, np.inf)
        fresh[0] = 0.0
        origin = np.zeros(number + 1, np.int64)
        for end in range(1, number + 1):
            total = cost[:end] + (before[end] - before[:end]) * values[end - 1]
            origin[end] = int(np.argmin(total))
            fresh[end] = total[origin[end]]
        cost = np.minimum(fresh, cost)
        origins.append(np.where(fresh <= cost, origin, -1))
    sizes, end = [], number
    for origin in reversed(origins):
        if end == 0:
            break
        if origin[end] >= 0:
            sizes.append(int(values[end - 1]))
            end = int(origin[end])
    useful = float((values * often).sum())
    return sizes[::-1], share_beyond(useful, float(cost[number]))


def padding_share(needed: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Expected share of padding where each need takes the least of the sizes that holds it.

    Args:
        needed: Need to how often it comes.
        sizes: Ascending; the last holds every need.
    """
    useful = sum(need * often for need, often in needed.items())
    held = sum(sizes[bisect_left(sizes, need)] * often for need, often in needed.items())
    return share_beyond(useful, held)


def share_beyond(useful: float, held: float) -> float:
    """Share of what is held that is not useful; both are sums of floats, of which equal ones may differ in the last digit."""
    return max(0.0, 1 - useful / held) if held else 0.0
