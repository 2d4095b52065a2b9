"""The run directory and its checkpoints: what training writes to disk, and how it is read back.

Its modules are imported when one of the names is used, since most commands need few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from systolic.artifact.access import Access
    from systolic.artifact.checkpoint import CheckpointStore, Restored, SavedCheckpoint
    from systolic.artifact.run import Run

_HOME = {
    "Access": "systolic.artifact.access",
    "CheckpointStore": "systolic.artifact.checkpoint",
    "Restored": "systolic.artifact.checkpoint",
    "Run": "systolic.artifact.run",
    "SavedCheckpoint": "systolic.artifact.checkpoint",
}

__all__ = ["Access", "CheckpointStore", "Restored", "Run", "SavedCheckpoint"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'systolic.artifact' has no attribute {name!r}")
