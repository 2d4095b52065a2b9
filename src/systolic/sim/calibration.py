"""Corrections of the compiler's estimates, per generation and kind of op.

Fitted on one half of the published results, judged on the other (benchmarks/accuracy); a kind
without a fit has the factor 1.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured over estimated, by kind: matmul, memory, vector, kernel, collective."""

    generation: str
    factors: Mapping[str, float] = field(default_factory=dict)

    def factor(self, kind: str) -> float:
        """1 where nothing was fitted."""
        return self.factors.get(kind, 1.0)


@cache
def calibration_of(generation: str) -> Calibration:
    """What was fitted for a generation of chips."""
    table = tomllib.loads((Path(__file__).parent / "calibration.toml").read_text())
    return Calibration(generation, table.get(generation, {}))
