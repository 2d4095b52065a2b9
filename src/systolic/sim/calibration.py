"""The simulator's tables, and corrections that a user's own profiles give.

A number that a source publishes of a chip stands in the catalogue (:mod:`systolic.chips`). What is left of a price is
here: ``constants.toml`` has what holds for every generation, each constant with its meaning, its origin and its source;
``attention.toml``, ``estimates.toml`` and ``grouped.toml`` have what was fitted to measured operations by generation.

A :class:`Calibration` corrects these prices by what profiles of the user's own chips measured
(``systolic calibrate``): a factor for each kind of op, and the rate of the host link.
"""

import enum
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")

FOLDER = Path(__file__).parent


@cache
def fitted(name: str, kind: Callable[..., _Row], generation: str) -> _Row:
    """Row of a generation in the table ``name``; what the table or the row lacks is that of ``[all]``."""
    table = _table(name)
    return kind(**_values({**table["all"], **table.get(generation, {})}))


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row, and the tables in it, with the value alone of a constant that has its source."""
    return {
        name: held.get("value", _values(held)) if isinstance(held, dict) else held
        for name, held in row.items()
    }


def constant(name: str, folder: Path = FOLDER) -> Any:
    """Value of a constant of ``constants.toml``, named ``table.constant``: a number, or tables and tuples of numbers."""
    table, _, key = name.partition(".")
    return _plain(_table("constants", folder)[table][key]["value"])


@cache
def _table(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    return tomllib.loads((folder / f"{name}.toml").read_text())


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value


# Corrections


FEW_WORKS: int = constant("calibration.few_works")
"""Ops of different arrays below which their spread says nothing of other ops."""
BOUNDS: tuple[float, float] = constant("calibration.bounds")
"""Least and most measured over simulated seconds that count as a correction: beyond, the simulator does not know the op."""


ROUNDING: float = constant("calibration.rounding")
"""Share of an op's seconds below which a difference is none."""


class CostKind(enum.Enum):
    """Kinds of op that are corrected apart, as files and screens name them."""

    matmul = "matmul"
    """On the matrix units, convolutions and what is fused with them included."""
    kernel = "kernel"
    """Pallas kernels whose work the simulator knows."""
    elementwise = "elementwise"
    """Fusions and single ops without a matmul that pass over their arrays in order, some of them in device memory."""
    vmem_elementwise = "elementwise in vector memory"
    """The same on arrays that all lie in vector memory."""
    formatting = "formatting"
    """Copies, transposes and reshapes on the core that read or write device memory: another layout of the same array."""
    vmem_formatting = "formatting in vector memory"
    """The same from vector memory to vector memory: bound by the vector units, as those of device memory are not."""
    host = "host copies"
    """Between the device's memory and the host's: a rate, bytes/s of one device, one way."""
    all_reduce = "all-reduce"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_to_all = "all-to-all"
    permute = "collective-permute"
    dies = "collectives between dies"
    """Collectives of any kind over the devices of one chip alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """Measured over simulated seconds of a kind of op; of host copies bytes/s."""

    value: float
    """Mean between the 10th and the 90th percentile, each op weighted by its simulated seconds, of host copies by its bytes."""
    low: float
    """10th percentile, weighted alike."""
    high: float
    """90th percentile."""
    ops: int
    """Ops that it rests on."""
    works: int
    """Different arrays of these ops: those of a model's layers are alike."""
    seconds: float
    """Measured seconds of these ops in one run of their programs."""

    @property
    def has_spread(self) -> bool:
        """Whether it rests on ops enough for a range."""
        return self.works >= FEW_WORKS


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Corrections of one generation of chips from measured ops."""

    name: str
    chip: str
    """Generation in the catalogue."""
    factors: Mapping[CostKind, Factor] = field(default_factory=dict)
    made: str = ""
    """Date."""
    num_profiles: int = 0

    def seconds(self, kind: CostKind | None, seconds: float, least: float) -> float:
        """Corrected seconds of an op; no fewer than ``least``, its work at the published peaks, unless the price was less."""
        factor = self.factors.get(kind) if kind is not None else None
        if factor is None or kind is CostKind.host:
            return seconds
        return max(seconds * factor.value, min(seconds, least))

    def holds(self, kind: CostKind | None, seconds: float, least: float) -> bool:
        """Whether an op's factor would make it faster than ``least``, and :meth:`seconds` does not."""
        factor = self.factors.get(kind) if kind is not None else None
        if factor is None or kind is CostKind.host:
            return False
        return seconds * factor.value < min(seconds, least) * (1 - ROUNDING)

    @property
    def host_bytes_per_second(self) -> float | None:
        """Rate of copies between a device and its host, one way; None where none was measured."""
        factor = self.factors.get(CostKind.host)
        return factor.value if factor is not None else None

    def ends(self, kind: CostKind) -> tuple[float, float] | None:
        """Least and most seconds of a kind over its corrected ones; None of a kind without a spread."""
        factor = self.factors.get(kind)
        if factor is None or not factor.has_spread:
            return None
        if kind is CostKind.host:
            return factor.value / factor.high, factor.value / factor.low
        return factor.low / factor.value, factor.high / factor.value


def value_name(kind: CostKind) -> str:
    """Name of a factor's value in files."""
    return "bytes_per_second" if kind is CostKind.host else "factor"


def factors_json(of: Calibration) -> dict[str, Any]:
    """Factors by kind: measured over simulated seconds, of host copies bytes/s; ``ops``, their different ``shapes`` and measured ``seconds`` that they rest on."""
    return {
        kind.value: {
            value_name(kind): factor.value,
            "p10": factor.low,
            "p90": factor.high,
            "ops": factor.ops,
            "shapes": factor.works,
            "seconds": factor.seconds,
        }
        for kind, factor in of.factors.items()
    }
