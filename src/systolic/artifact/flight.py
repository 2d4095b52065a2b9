"""A save on its way to the disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from systolic.artifact import manifest as manifests
from systolic.artifact.manifest import Leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """What is written, and where it will be committed."""

    step: int
    root: Path
    """The folder that gets it: the store's own, or the one beside it where it replaces a checkpoint."""
    started: float
    """Seconds of ``time.monotonic``."""
    leaves: Mapping[tuple[str, ...], Leaf]
    metrics: Mapping[str, float]

    def seal(self) -> None:
        """Writes the manifest, when every array is on disk and before the commit.

        Raises:
            OSError: a file does not read.
            RunError: the manifest does not write.
        """
        from systolic.artifact import backend

        manifests.seal(
            backend.scratch_folder(self.root, self.step),
            step=self.step,
            leaves=self.leaves,
            metrics=self.metrics,
            ignore=backend.CHANGES_AT_COMMIT,
        )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that can be ranked."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
