"""What an engine tells whoever watches it: metrics, traces and logs are made of these."""

from dataclasses import dataclass
from typing import Protocol

from systolic.serving.text.request import Finish


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFacts:
    """One request that ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queried_tokens: int
    """Of its prompt, that were looked up in the cache: none where it waited until it ended, or its prompt was scored."""
    finish: Finish
    queue_seconds: float
    """Until its first token was read."""
    first_token_seconds: float | None
    """Until its first new token was known; None where there was none."""
    seconds: float
    """Until it ended."""
    begun: bool
    """Whether a token of it was read."""
    running: int
    """Other texts in the step."""
    waiting: int
    pages_in_use: int
    """By others."""


class EngineWatcher(Protocol):
    """Whoever is told; its methods return at once, and are called from the engine's thread."""

    def stepped(self, facts: StepFacts) -> None:
        """After each step."""
        ...

    def ended(self, facts: RequestFacts) -> None:
        """After each request."""
        ...
