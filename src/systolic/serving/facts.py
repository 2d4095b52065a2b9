"""Events of a served model, of which metrics, traces and logs are made: programs that were made ready, batches that ran and requests that ended."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of JAX after each compile, also one that was read from the disk."""
_lock = threading.Lock()
_listening: list[Callable[..., None]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileFacts:
    """One size of a call whose program was made ready."""

    bucket: str
    seconds: float
    """Time of tracing, lowering and compiling, or of reading it from the disk."""
    cached: bool
    """Whether it was on the disk."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Parts of these seconds: ``trace`` and ``compile`` and ``keep``, or ``load``."""
    after_ready: bool = False
    """True breaks the promise that nothing compiles after a model is ready."""
    shared: bool = False
    """Whether it has no program of its own: each core computes a part of its rows by that of another size."""
    done: int = 0
    """Sizes of the model that are ready, this one among them."""
    programs: int = 0
    """Sizes of the model."""


class CompileCount(threading.local):
    """Compiles of the calling thread since it first asked.

    JAX calls its listeners in the thread that compiles.
    """

    def __init__(self) -> None:
        self.compiled = 0


COUNT = CompileCount()
"""Counts of each thread; see :func:`count_compiles`."""


def count_compiles() -> None:
    """Starts to count, once in a process."""
    with _lock:
        if _listening:
            return
        _listening.append(_duration)
        jax.monitoring.register_event_duration_secs_listener(_duration)


def _duration(event: str, duration_secs: float, **more: Any) -> None:
    del duration_secs, more
    if event == COMPILED:
        COUNT.compiled += 1


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
