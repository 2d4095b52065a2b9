"""The run directory and its checkpoints: what training writes to disk, and how it is read back.

Its modules are imported when one of the names is used, since most commands need few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systolic.runs.access import Access
    from systolic.runs.checkpoint import CheckpointStore, Restored, SavedCheckpoint
    from systolic.runs.run import Run

_HOME = {
    "Access": "systolic.runs.access",
    "CheckpointStore": "systolic.runs.checkpoint",
    "Restored": "systolic.runs.checkpoint",
    "Run": "systolic.runs.run",
    "SavedCheckpoint": "systolic.runs.checkpoint",
}

__all__ = ["Access", "CheckpointStore", "Restored", "Run", "SavedCheckpoint"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'systolic.runs' has no attribute {name!r}")
