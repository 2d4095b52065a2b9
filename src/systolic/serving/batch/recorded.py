"""The traffic of a model, recorded for the choice of buckets at its next start."""

import threading
from collections import Counter

from systolic.serving.batch.buckets import Traffic


class Recorder:
    """Histograms of what came; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples: Counter[int] = Counter()
        self._lengths: Counter[int] = Counter()

    def record(self, waited: int, lengths: list[int]) -> None:
        """A batch.

        Args:
            waited: Rows that could have been in it.
            lengths: Of its rows, 0 where all have one shape.
        """
        with self._lock:
            self._examples[waited] += 1
            self._lengths.update(length for length in lengths if length)

    @property
    def traffic(self) -> Traffic:
        """What came so far."""
        with self._lock:
            return Traffic(
                examples={value: float(count) for value, count in self._examples.items()},
                lengths={value: float(count) for value, count in self._lengths.items()},
            )
