"""Chips and slices: what an accelerator can do, how many of them a name means, what they cost.

``chip("v5e")`` is a record of sourced numbers, ``slice("v5e-16")`` a shape of such chips with its
hosts and links. Both come from ``catalogue.toml``, the one file with hardware numbers.
"""

import sys
from types import ModuleType

from systolic.chips.catalogue import by_device_kind, chip, chips, known, usual
from systolic.chips.record import Chip, ChipKind, Citation, Figure, Prices
from systolic.chips.slices import SLICE, SLICES, Slice, named_slices, slice

__all__ = [
    "SLICE",
    "SLICES",
    "Chip",
    "ChipKind",
    "Citation",
    "Figure",
    "Prices",
    "Slice",
    "by_device_kind",
    "chip",
    "chips",
    "known",
    "named_slices",
    "slice",
    "usual",
]


class _CallableModule(ModuleType):
    """This package as ``systolic.chips``, which is a public function, too: an import of the package takes its name."""

    def __call__(self) -> tuple[Chip, ...]:
        return chips()


sys.modules[__name__].__class__ = _CallableModule
