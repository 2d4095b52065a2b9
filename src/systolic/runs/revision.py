"""Check that this version reads a run's weights like the version that trained them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from systolic.core.errors import RunError

REVISION = 2
"""Revision of the meaning of weights; raised when the same weights would give another function."""


def check_revision(run: Path, record: Mapping[str, Any]) -> None:
    """Refuses weights that this version would read differently from the version that trained them.

    Args:
        run: The run's directory, for the message.
        record: The content of its job.json.

    Raises:
        RunError: a decoder with tied embeddings from before they lost their scale (revision 1).
    """
    model = record.get("job", {}).get("model", {})
    if record.get("revision", 1) < REVISION and model.get("tie_embeddings"):
        raise RunError(
            f"{run} was trained by an earlier version, in which tied embeddings had a scale, and would give other results now; use that version, or train it again"
        )
