"""What training leaves on disk: the run directory and its checkpoints."""

from systolic.artifact.access import Access
from systolic.artifact.checkpoint import CheckpointStore, Restored, Saved
from systolic.artifact.run import Run

__all__ = ["Access", "CheckpointStore", "Restored", "Run", "Saved"]
