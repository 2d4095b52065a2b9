"""How far a forecast may be off: the spread of errors of its generation in the accuracy table."""

import tomllib
from functools import cache
from pathlib import Path

UNKNOWN = 0.25
"""Half-width where no published result of a generation was rebuilt: the worst seen on the others."""


@cache
def _table() -> dict[str, dict[str, float]]:
    return tomllib.loads((Path(__file__).parent / "errors.toml").read_text())


def interval_of(generation: str, seconds: float) -> tuple[float, float, str]:
    """Low and high seconds, and where they come from.

    The errors of the table are (forecast - published) / published, so a published time lies between
    forecast / (1 + largest) and forecast / (1 + smallest).
    """
    row = _table().get(generation)
    if row is None:
        low, high = seconds / (1 + UNKNOWN), seconds / (1 - UNKNOWN)
        return low, high, f"no published result of {generation} was rebuilt; the width is a guess"
    low, high = seconds / (1 + row["largest"]), seconds / (1 + row["smallest"])
    return low, high, f"spread of {int(row['rows'])} published results on {generation}"
