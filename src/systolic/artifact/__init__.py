"""The run directory and its checkpoints: what training writes to disk, and how it is read back."""

from systolic.artifact.access import Access
from systolic.artifact.checkpoint import CheckpointStore, Restored, SavedCheckpoint
from systolic.artifact.run import Run

__all__ = ["Access", "CheckpointStore", "Restored", "Run", "SavedCheckpoint"]
