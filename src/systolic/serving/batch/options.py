"""Options of a batch model: batches, queue, limits and promises."""

from dataclasses import dataclass, field
from typing import Annotated

from systolic.core.ranges import COUNT, NOT_NEGATIVE, Range, check
from systolic.serving.batch.buckets import Shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """Largest inputs.

    Raises:
        OptionError: a value out of its range.
    """

    examples: Annotated[int, COUNT] = 256
    """Examples of a request."""
    bytes: Annotated[int, COUNT] = 32 * 2**20
    """Size of an encoded file, or of a text."""
    pixels: Annotated[int, COUNT] = 40_000_000
    """Width x height of a picture, by its header."""
    seconds: Annotated[float, Range(above=0)] = 1800.0
    """Length of a recording."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """Options of a batch model.

    Raises:
        OptionError: a value out of its range.
    """

    shapes: Shapes = field(default_factory=Shapes)
    limits: InputLimits = field(default_factory=InputLimits)
    delay_ms: Annotated[float, NOT_NEGATIVE] = 2.0
    """Longest wait of a row for others while a worker is free."""
    waiting: Annotated[int, COUNT] = 1024
    """Most examples that wait or are read; further requests are refused."""
    waiting_bytes: Annotated[int, COUNT] = 512 * 2**20
    """Most bytes of their inputs."""
    readers: Annotated[int, COUNT] = 4
    """Threads that decode."""
    workers: Annotated[int, COUNT] = 2
    """Threads that run batches: while one waits for the device, another prepares the next call."""
    stalled_seconds: Annotated[float, Range(above=0)] = 60.0
    """A call that takes longer makes the model not ready."""
    strict: bool = False
    """Whether a compile after the model is ready ends it, beside being counted."""

    def __post_init__(self) -> None:
        check(self)
