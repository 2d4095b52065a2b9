"""Cause: the value that explanations are lists of."""

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
    """Share of the step (0 to 1) for a cause that costs time, else ``None``."""
    seconds: float | None
    """Cost in seconds; ``None`` for a cause that is not about time."""
    evidence: Sequence[str]
    """Lines with numbers: ops, layers, source lines, steps."""
    advice: Sequence[str]
    """Settings to try, as typed on the command line."""
