"""Files that reading left out because they are damaged: counted and named, each once.

Threads note them here. A worker process sends them beside its batch, for it shares no memory with
the process that trains.
"""

import json
import threading
from collections.abc import Iterable, Mapping

import numpy as np

SIDE = "skipped"
"""The entry of a batch, on its way from a worker or a thread, that holds messages: uint8[bytes] of JSON."""


class Skipped:
    """Messages about files, in the order in which they were met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, None] = {}
        self._taken = 0

    def note(self, lines: Iterable[str]) -> None:
        """Keeps messages; one that is known already counts once."""
        with self._lock:
            self._lines.update(dict.fromkeys(lines))

    def take(self) -> list[str]:
        """The messages that came since the last time."""
        with self._lock:
            lines = list(self._lines)[self._taken :]
            self._taken = len(self._lines)
        return lines

    @property
    def count(self) -> int:
        """Files so far."""
        return len(self._lines)

    def clear(self) -> None:
        """Begins anew, for another session of the same process."""
        with self._lock:
            self._lines.clear()
            self._taken = 0


FILES = Skipped()
"""Of this process."""


def pack(lines: Iterable[str]) -> np.ndarray:
    """Messages as the :data:`SIDE` entry of a batch."""
    return np.frombuffer(json.dumps(list(lines)).encode(), np.uint8)


def unload(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch without its :data:`SIDE` entry, whose messages are noted."""
    if SIDE not in batch:
        return dict(batch)
    FILES.note(json.loads(batch[SIDE].tobytes()))
    return {name: array for name, array in batch.items() if name != SIDE}
