"""Sizes as a map of rectangles: squarified, so that areas can be compared.

After Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle in per cent of the map."""

    left: float
    top: float
    width: float
    height: float


def treemap(sizes: Sequence[float], aspect: float) -> list[Rectangle]:
    """A box for each size (all above 0, the largest first), whose areas are in their proportion.

    Args:
        sizes: What the areas stand for.
        aspect: Width of the map over its height.
    """
    total = sum(sizes)
    if not total:
        return []
    area = aspect
    left, top, width, height = 0.0, 0.0, aspect, 1.0
    boxes: list[Rectangle] = []
    todo = [size / total * area for size in sizes]
    while todo:
        side = min(width, height)
        row = [todo[0]]
        while len(row) < len(todo) and _worst([*row, todo[len(row)]], side) <= _worst(row, side):
            row.append(todo[len(row)])
        depth = sum(row) / side
        at = 0.0
        for part in row:
            length = part / depth
            if width >= height:
                boxes.append(_box(left, top + at, depth, length, aspect))
            else:
                boxes.append(_box(left + at, top, length, depth, aspect))
            at += length
        if width >= height:
            left, width = left + depth, width - depth
        else:
            top, height = top + depth, height - depth
        todo = todo[len(row) :]
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of sides in a row of areas along a side."""
    depth = sum(row) / side
    return max(max(part / depth / depth, depth * depth / part) for part in row)


def _box(left: float, top: float, width: float, height: float, aspect: float) -> Rectangle:
    return Rectangle(
        round(left / aspect * 100, 3),
        round(top * 100, 3),
        round(width / aspect * 100, 3),
        round(height * 100, 3),
    )
