"""How far a forecast may be off: the spread of errors of its generation in the accuracy table."""

import tomllib
from functools import cache
from pathlib import Path

ALL = "all"
"""The row of all generations together."""
FEW = 3
"""Results below which a generation's own spread says little: the spread of all is taken."""


@cache
def _table() -> dict[str, dict[str, float]]:
    return tomllib.loads((Path(__file__).parent / "errors.toml").read_text())


def interval_of(generation: str, seconds: float, unit: str = "tokens") -> tuple[float, float, str]:
    """Low and high seconds, and where they come from.

    The errors of the table are (forecast - published) / published, so a published time lies between
    forecast / (1 + largest) and forecast / (1 + smallest). All published results that were rebuilt
    are of language models: for what counts no tokens the spread is only the best guess there is.
    """
    table = _table()
    row = table.get(generation)
    if row is None or row["rows"] < FEW:
        here = int(row["rows"]) if row is not None else 0
        row, told = table[ALL], f"all generations, {here or 'none'} of them on {generation}"
        text = f"spread of {int(row['rows'])} published results on {told}"
    else:
        text = f"spread of {int(row['rows'])} published results on {generation}"
    if unit != "tokens":
        text += ", language models"
    return seconds / (1 + row["largest"]), seconds / (1 + row["smallest"]), text
