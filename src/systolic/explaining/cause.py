"""The value that every explanation is made of."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Something that costs time, memory or quality, with its evidence."""

    name: str
    """``exposed-collectives``, ``dead-gradients``: stable, in kebab case."""
    title: str
    """One line for people."""
    share: float | None
    """Of the step, for what costs time (0 to 1); ``None`` where a share makes no sense."""
    seconds: float | None
    """What it costs, in seconds; ``None`` where that makes no sense."""
    evidence: Sequence[str]
    """Lines with numbers: ops, layers, source lines, steps."""
    advice: Sequence[str]
    """What to try, as settings that can be typed."""
