"""Cause: the value that explanations are lists of."""

from collections.abc import Sequence
from dataclasses import dataclass

from systolic.core.units import si


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """Work of measured ops on the unit that most of their time is bound by."""

    unit: str
    """``host link``, ``device memory``, ``matrix units``."""
    measure: str
    """``B`` or ``FLOP``."""
    amount: float
    """Bytes or FLOPs in a step."""
    per_second: float
    """While they were under way."""
    share: float | None
    """Share of the unit's peak (0 to 1); None where no peak is known."""

    @property
    def text(self) -> str:
        """``32.2 GB at 27.1 GB/s, 42% of the peak: host link``."""
        size = si(self.amount, self.measure)
        text = f"{size} at {si(self.per_second, f'{self.measure}/s')}"
        return f"{text}, {self.unit}" + ("" if self.share is None else f" at {self.share:.0%}")


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
    work: Reached | None = None
    """Bytes and rate of a measured step's ops; None where they are not known."""
