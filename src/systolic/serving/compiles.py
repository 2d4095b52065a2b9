"""Compiles, as JAX itself counts them: how many happen in which threads."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of JAX after each compile, also one that was read from the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileFacts:
    """One program that was made ready."""

    bucket: str
    seconds: float
    """Time of tracing, lowering and compiling, or of reading it from the disk."""
    cached: bool
    """Whether it was on the disk."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Parts of these seconds: ``trace`` and ``compile`` and ``keep``, or ``load``."""
    after_ready: bool = False
    """True breaks the promise that nothing compiles after a model is ready."""
    done: int = 0
    """Programs of the model that are ready, this one among them."""
    programs: int = 0
    """Programs of the model."""


class CompileCount(threading.local):
    """Compiles of the calling thread since it first asked.

    JAX calls its listeners in the thread that compiles.
    """

    def __init__(self) -> None:
        self.compiled = 0


COUNT = CompileCount()
"""Counts of each thread; see :func:`count_compiles`."""
_lock = threading.Lock()
_listening: list[Callable[..., None]] = []


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
