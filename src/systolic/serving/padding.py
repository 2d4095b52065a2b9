"""Sizes of programs that pad the least."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np


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
