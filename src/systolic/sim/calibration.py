"""The simulator's tables: constants of all generations, and what was fitted to one generation.

A number that a source publishes of a chip stands in the catalogue (:mod:`systolic.chips`). What is left of a price is
here: ``constants.toml`` has what holds for every generation, each constant with its meaning, its origin and its source;
``attention.toml``, ``estimates.toml`` and ``grouped.toml`` have what was fitted to measured operations by generation;
``calibration.toml`` corrects the compiler's estimates by kind of op.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured over estimated seconds, by kind: matmul, memory, vector, kernel, collective."""

    generation: str
    factors: Mapping[str, float] = field(default_factory=dict)

    def factor(self, kind: str) -> float:
        """Factor of a kind of op; 1 where nothing was fitted."""
        return self.factors.get(kind, 1.0)


def calibration_of(generation: str) -> Calibration:
    """Factors that were fitted for a generation of chips."""
    return Calibration(generation, _table("calibration").get(generation, {}))


@cache
def fitted(name: str, kind: type[_Row], generation: str) -> _Row:
    """Row of a generation in the table ``name``; what the table or the row lacks is that of ``[all]``."""
    table = _table(name)
    return kind(**{**table["all"], **table.get(generation, {})})


def constant(name: str, folder: Path = FOLDER) -> Any:
    """Value of a constant of ``constants.toml``, named ``table.constant``: a number, or tables and tuples of numbers."""
    table, _, key = name.partition(".")
    return _plain(_table("constants", folder)[table][key]["value"])


@cache
def _table(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    return tomllib.loads((folder / f"{name}.toml").read_text())


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value
