"""Damaged files that reading skipped: counted and named, each once.

Threads note them here. A worker process sends them beside its batch, since it shares no memory with
the training process.
"""

import json
import threading
from collections.abc import Iterable, Mapping

import numpy as np

SIDE = "skipped"
"""The entry of a batch, on its way from a worker or a thread, that holds messages: uint8[bytes] of JSON."""


class Skipped:
    """Messages about files, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, None] = {}
        self._taken = 0

    def note(self, lines: Iterable[str]) -> None:
        """Adds messages; a repeated one counts once."""
        with self._lock:
            self._lines.update(dict.fromkeys(lines))

    def take(self) -> list[str]:
        """Messages since the last call."""
        with self._lock:
            lines = list(self._lines)[self._taken :]
            self._taken = len(self._lines)
        return lines

    @property
    def count(self) -> int:
        """Number of files so far."""
        return len(self._lines)

    def clear(self) -> None:
        """Forgets all messages, for another session of the same process."""
        with self._lock:
            self._lines.clear()
            self._taken = 0


FILES = Skipped()
"""Skipped files of this process."""


def pack(lines: Iterable[str]) -> np.ndarray:
    """Encodes messages as the :data:`SIDE` entry of a batch."""
    return np.frombuffer(json.dumps(list(lines)).encode(), np.uint8)


def unload(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Removes the :data:`SIDE` entry of a batch and notes its messages."""
    if SIDE not in batch:
        return dict(batch)
    FILES.note(json.loads(batch[SIDE].tobytes()))
    return {name: array for name, array in batch.items() if name != SIDE}
