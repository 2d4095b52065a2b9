"""Values of a loop's counters by cases of what they are computed from.

With ``jax_enable_x64`` an integer is two halves, and ``jnp.clip(n, 10, 64)`` chooses each half by comparisons of both: alone
a half may be anything. So what is compared with a constant is split at it, and each case is computed for itself.
"""

from collections.abc import Iterator, Mapping, Sequence

from systolic.hlo.scalars import Scope
from systolic.hlo.values import UNKNOWN, Known, kind_of

MOST_CASES = 100
"""Cases after which a range is no longer split."""
MOST_EACH = 64
"""Numbers of a range that are taken one by one."""


def cases_of(
    scope: Scope, names: Sequence[str], asked: Mapping[str, set[int]], *, each: bool
) -> list[tuple[Known, ...]]:
    """Values of some scalars together, in each case of what they are computed from.

    Args:
        scope: The run that computes them.
        names: The scalars.
        asked: Numbers that some of them are compared with later.
        each: Whether short ranges are taken number by number.
    """
    if scope.on.case_values <= 0:
        return []
    kept = scope.on.turns, scope.on.split
    found = _Cases(scope, names, each)
    for name, at in asked.items():
        run, source, shifted = scope.source(name)
        if run is scope and not shifted:
            found.asked[source] = at
    try:
        values = list(found.values({}))
    finally:
        scope.on.turns, scope.on.split = kept
    for source in found.sources:
        scope.on.decides(*scope.scalar(source))
    return values


class _Cases:
    """Cases of some values, and how many ranges may still be split."""

    def __init__(self, scope: Scope, names: Sequence[str], each: bool) -> None:
        self.scope, self.names, self.each, self.left = scope, names, each, MOST_CASES
        self.sources: set[str] = set()
        self.asked: dict[str, set[int]] = {}
        index = scope.computation.index
        self.fixed = {
            name: value
            for name, value in scope.values.items()
            if name in index and index[name].opcode in ("while", "conditional")
        }

    def values(self, given: dict[str, Known]) -> Iterator[tuple[Known, ...]]:
        """The values with these ranges of others, split further where these leave a comparison open."""
        on, like = self.scope.on, self.scope
        on.turns = []
        run = Scope(on, like.computation, like.argument, lambda *_: UNKNOWN, like.depth)
        run.values = {**self.fixed, **given}
        before, on.split = on.left, (run, {})
        found = tuple(map(run.scalar, self.names))
        points, on.split = on.split[1], None
        on.case_values -= before - on.left
        if not all(one.exact for one in found) and on.case_values > 0:
            for source in dict.fromkeys((*points, *self.asked)):
                at = points.get(source, set()) | self.asked.get(source, set())
                cells = list(self.cells(source, run.scalar(source), at))
                if 1 < len(cells) <= self.left:
                    self.left -= len(cells) - 1
                    self.sources.add(source)
                    for cell in cells:
                        yield from self.values({**given, source: cell})
                    return
        yield found

    def cells(self, source: str, range_: Known, points: set[int]) -> Iterator[Known]:
        """Ranges of a source between its points."""
        kind = kind_of(self.scope.computation[source])
        if kind is None:
            return
        low = int(max(range_.low, kind.lowest))
        high = int(min(range_.high, kind.lowest + (1 << kind.bits) - 1))
        inside = sorted(one for one in points if low <= one <= high)
        if self.each and high - low < MOST_EACH:
            inside = list(range(low, high + 1))
        for one in inside:
            if low < one:
                yield Known(low, one - 1)
            yield Known(one, one)
            low = one + 1
        if low <= high:
            yield Known(low, high)
