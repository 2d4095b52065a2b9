"""What training leaves on disk: the run directory and its checkpoints."""

from systolic.artifact.access import Access
from systolic.artifact.checkpoint import CheckpointStore, Restored, SavedCheckpoint
from systolic.artifact.run import Run

__all__ = ["Access", "CheckpointStore", "Restored", "Run", "SavedCheckpoint"]
