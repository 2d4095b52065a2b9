"""Seconds of a product of every row with every group, of which the compiler skips what its mask empties.

XLA has no kernel for the gradient of a ragged matmul's weights: it masks both operands for each group and multiplies
them. On generations with one core a device it starts each group at its own rows (``GROUP_STARTS``): the steps that
are left are those of a grouped matmul. With megacore (``ITERATION_INDICES``) chips take the time of all steps.
"""

from collections.abc import Mapping
from typing import Any

from systolic.hlo import Instruction
from systolic.sim.calibration import constant
from systolic.sim.rates import Rates, cores

_STARTS = "ITERATION_SKIPPER_MODE_GROUP_STARTS"
_MODES = (_STARTS, "ITERATION_SKIPPER_MODE_ITERATION_INDICES")
VISITED: float = constant("masked.visited")


def masked_share(instruction: Instruction) -> float | None:
    """Share of the steps that are left; None where a mask leaves no step out.

    Groups are taken to be equal, and to begin inside a tile of rows.
    """
    found = _skipped(instruction)
    if found is None:
        return None
    mode, groups, tiles = found
    return (tiles + groups - 1) / (tiles * groups) if mode == _STARTS else 1.0


def masked_seconds(instruction: Instruction, rates: Rates) -> float | None:
    """Seconds by the compiler's cycles for all steps; None for any other op."""
    share, cycles = masked_share(instruction), instruction.cycles
    if share is None or cycles is None:
        return None
    seconds = cycles / rates.clock_hz
    if share < 1.0:
        return VISITED * share * seconds
    bounds = _bounds(instruction)
    split = instruction.config.get("megacore_config", {}).get("megacore_split_dim")
    # The cycles are those of both cores; a dim of one step leaves one of them idle.
    alone = split is not None and abs(int(split)) < len(bounds) and bounds[int(split)] == 1
    return seconds * (cores(rates) if alone else 1)


def _skipped(instruction: Instruction) -> tuple[str, int, int] | None:
    """The mode, and steps over groups and over tiles of rows."""
    found: Mapping[str, Any] = instruction.config.get("mask_aggregator_config", {})
    mode, dims = found.get("iteration_skipper_mode"), found.get("mask_dim_to_iteration_index", [])
    bounds = _bounds(instruction)
    if mode not in _MODES or len(dims) != 2 or max(int(dim) for dim in dims) >= len(bounds):
        return None
    groups, tiles = (bounds[int(dim)] for dim in dims)
    return mode, groups, tiles


def _bounds(instruction: Instruction) -> list[int]:
    """Steps along each dim of an op's loop."""
    window = instruction.config.get("window_config", {})
    return [int(size) for size in window.get("iteration_bounds", [])]
