"""Systolic takes a model to a TPU and knows the step time, the memory and the bill beforehand.

Importing this package imports no array library, touches no environment variable and starts nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systolic.chips import Chip, Slice, chip, chips, slice
    from systolic.core.errors import SystolicError

__version__ = "0.1.0"

_HOME = {
    "Chip": "systolic.chips",
    "Slice": "systolic.chips",
    "SystolicError": "systolic.core.errors",
    "chip": "systolic.chips",
    "chips": "systolic.chips",
    "slice": "systolic.chips",
}

__all__ = ["Chip", "Slice", "SystolicError", "__version__", "chip", "chips", "slice"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'systolic' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
