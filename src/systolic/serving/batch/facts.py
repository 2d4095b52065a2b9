"""Events of a batch model, of which metrics, traces and logs are made."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from systolic.serving.compiles import CompileFacts


class Ended(StrEnum):
    """How a request ended."""

    answered = "answered"
    refused = "refused"
    """Its input can't be read."""
    expired = "expired"
    cancelled = "cancelled"
    failed = "failed"
    """The device or the worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """One batch that ran."""

    bucket: str
    """The program, such as ``8 x 64 tokens``."""
    examples: int
    """Rows that hold an example."""
    rows: int
    """Rows of the program."""
    useful_positions: int
    """Positions that hold an example: rows, or their lengths."""
    padded_positions: int
    """The program's other positions."""
    padding_share: float
    """Share of the program's positions (rows, or rows x length) that hold nothing."""
    requests: int
    """Requests with an example in it."""
    waiting: int
    """Examples that wait after it was taken."""
    queue_seconds: float
    """Wait of its oldest example, decoding left out."""
    compute_seconds: float
    """From the first byte to the device to the last one back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFacts:
    """One request that ended."""

    examples: int
    ended: Ended
    decode_seconds: float
    """Reading of its files, the wait for a thread included."""
    queue_seconds: float
    """From then until its last example was in a batch."""
    compute_seconds: float
    """Time of the longest of the batches that held it."""
    seconds: float
    """From submit to answer."""


class BatchWatcher(Protocol):
    """Whoever is told; its methods return at once, and are called from the model's threads."""

    def opened(self, waiting: Callable[[], int]) -> None:
        """Before anything else.

        Args:
            waiting: Examples that no batch holds yet, from any thread.
        """
        ...

    def compiled(self, facts: CompileFacts) -> None:
        """After each program."""
        ...

    def died(self, reason: str) -> None:
        """After a worker died; another takes its place."""
        ...

    def ran(self, facts: BatchFacts) -> None:
        """After each batch."""
        ...

    def answered(self, facts: AnswerFacts) -> None:
        """After each request."""
        ...
