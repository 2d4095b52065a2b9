"""Intervals of time: pairs of start and end, in seconds."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def exclusive(intervals: Sequence[Interval], ranks: Sequence[int]) -> list[float]:
    """Time of each interval that is its own: an instant is shared by those of the lowest rank in it."""
    # An empty one would end before it begins, and stay.
    points = sorted(
        point
        for number, (start, end) in enumerate(intervals)
        if end > start
        for point in ((start, 1, number), (end, 0, number))
    )
    own = [0.0] * len(intervals)
    active: dict[int, set[int]] = defaultdict(set)
    before = points[0][0] if points else 0.0
    for at, begins, number in points:
        now = next((active[rank] for rank in sorted(active) if active[rank]), None)
        if now and at > before:
            for one in now:
                own[one] += (at - before) / len(now)
        before = at
        if begins:
            active[ranks[number]].add(number)
        else:
            active[ranks[number]].discard(number)
    return own


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Union without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def missing(busy: Sequence[Interval], within: Interval) -> list[Interval]:
    """Parts of ``within`` that ordered intervals leave."""
    low, high = within
    found = []
    for start, end in busy:
        if start > low:
            found.append((low, min(start, high)))
        low = max(low, end)
        if low >= high:
            break
    if low < high:
        found.append((low, high))
    return [gap for gap in found if gap[1] > gap[0]]


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersection of two ordered lists of intervals."""
    found, at = [], 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        number = at
        while number < len(second) and second[number][0] < end:
            found.append((max(start, second[number][0]), min(end, second[number][1])))
            number += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of all of them."""
    return sum(end - start for start, end in intervals)
