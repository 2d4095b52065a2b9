"""A save in progress."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from systolic.runs import manifest as manifests
from systolic.runs.manifest import Leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """State being written, with the step and folder to commit."""

    step: int
    root: Path
    """Folder to write to: the store's own, or the one beside it if it replaces a checkpoint."""
    started: float
    """Seconds of ``time.monotonic``."""
    leaves: Mapping[tuple[str, ...], Leaf]
    metrics: Mapping[str, float]
    manifest: str = manifests.NAME
    """Name of the manifest: another where other hosts have other parts."""

    def seal(self) -> None:
        """Writes the manifest: after every array is on disk, before the commit.

        Raises:
            OSError: a file does not read.
            RunError: the manifest does not write.
        """
        from systolic.runs import backend

        manifests.seal(
            backend.scratch_folder(self.root, self.step),
            step=self.step,
            leaves=self.leaves,
            metrics=self.metrics,
            ignore=backend.CHANGES_AT_COMMIT,
            name=self.manifest,
        )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that can be ranked."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
