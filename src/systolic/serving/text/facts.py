"""Events of an engine, of which metrics, traces and logs are made."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from systolic.serving.text.request import TextOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One step of the engine."""

    decode_rows: int
    """Texts that read one token."""
    prefill_tokens: int
    """Prompt tokens that were read."""
    bucket: str
    """The program that ran, such as ``decode 16 rows x 64 pages``."""
    padded_tokens: int
    """Positions of the program that held no token."""
    pages_in_use: int
    pages_total: int
    running: int
    waiting: int
    preempted: int
    """Texts that lost their pages to this step."""
    host_seconds: float
    """Scheduling, arguments of programs, detokenising and handing out: the loop's time without waiting for the device, which runs meanwhile."""
    seconds: float
    """Wall time from step to step."""
    compiled: bool = False
    """Whether the program had to be compiled, which never happens after the engine is ready."""


class EngineLoad(NamedTuple):
    """Texts and pages that an engine holds."""

    running: int
    """Texts in the step."""
    waiting: int
    pages_in_use: int
    pages_total: int


class EngineWatcher(Protocol):
    """Whoever is told; its methods return at once, and are called from the engine's thread."""

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        ...

    def ended(self, output: TextOutput, load: EngineLoad) -> None:
        """After each request, with its last output and the load without it."""
        ...
