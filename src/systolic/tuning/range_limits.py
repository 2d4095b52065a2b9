"""Best values at an end of their range, with the wider range to search."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from systolic.tuning.search import Searched

NEAR = 0.02
"""Share of a range, of its logarithm if it is logarithmic, within which a value is at an end."""
WIDER = 10
"""Factor by which a logarithmic range grows."""
HALVES = 4
"""Times that the growth is halved where the recipe refuses the new end."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A best value at an end of its range."""

    option: str
    value: float
    search: str
    """Wider range: ``log:1e-4..1e-1``."""


def edge(one: Searched, value: float, accepts: Callable[[float], bool]) -> Edge | None:
    """The end of a range that a value is at; None if it is at none, or if the end is the option's own limit.

    Args:
        one: The option.
        value: Its best value.
        accepts: Whether the recipe takes a value beyond the range.
    """
    if not one.is_range:
        return None
    place = one.place(value)
    if NEAR < place < 1 - NEAR:
        return None
    upper = place > 0.5
    for end in _ends(one, upper=upper):
        if accepts(end):
            return Edge(option=one.name, value=value, search=_spec(one, end, upper=upper))
    return None


def _ends(one: Searched, *, upper: bool) -> Iterator[float]:
    """New ends, the widest first."""
    low, high = one.low, one.high
    if one.log:
        factors = [WIDER ** (0.5**half) for half in range(HALVES + 1)]
        found = [high * factor if upper else low / factor for factor in factors]
    else:
        width = high - low
        grown = [width * 0.5**half for half in range(HALVES + 1)]
        found = [high + more if upper else low - more for more in grown]
        # A share ends at 1 and most numbers at 0, which a wider range would step over.
        limits = (1, 0) if upper else (0, 1)
        found[1:1] = [
            one for one in limits if (high < one < found[0] if upper else found[0] < one < low)
        ]
    seen = {low, high}
    for end in found:
        own = _fitted(one, end, upper=upper)
        if own not in seen:
            seen.add(own)
            yield own


def _fitted(one: Searched, end: float, *, upper: bool) -> float:
    """The end as a number that the option takes: whole, on a step, or of few digits."""
    if one.step is not None:
        start = one.high if upper else one.low
        end = (
            start
            + math.trunc((end - start) / one.step + math.copysign(1e-9, end - start)) * one.step
        )
    if one.whole:
        return int(end) if upper else math.ceil(end)
    wide = replace(one, low=min(one.low, end), high=max(one.high, end), step=None)
    return wide.rounded(end)


def _spec(one: Searched, end: float, *, upper: bool) -> str:
    """The range with a new end in the place of one; the other as typed."""
    bounds, colon, step = one.spec.removeprefix("log:").partition(":")
    low, _, high = bounds.partition("..")
    text = _as_typed(end, high if upper else low)
    ends = f"{low}..{text}" if upper else f"{text}..{high}"
    return f"{'log:' if one.log else ''}{ends}{colon}{step}"


def _as_typed(value: float, word: str) -> str:
    """A number as the word that it replaces is written: ``1e-1`` for ``1e-2``, ``0.1`` for ``0.01``."""
    if "e" not in word.lower() or 1 <= abs(value) < WIDER:
        return f"{value:.12g}"
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
