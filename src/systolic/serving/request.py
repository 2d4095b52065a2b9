"""Kinds of models that answer whole requests, the arrays that they take and give back, and requests that get no answer."""

from dataclasses import dataclass
from enum import StrEnum

from systolic.core.errors import SystolicError

BYTES = "bytes"
"""``ArraySpec.dtype`` of an object array whose elements are ``bytes`` (or ``str``, which stands for UTF-8)."""
ANY = -1
"""Size of a dim that may have any."""


class ModelKind(StrEnum):
    """Task of a model."""

    image = "image"
    """Classes of pictures."""
    embedding = "embedding"
    """Vectors of texts."""
    transcription = "transcription"
    """Texts of recordings."""
    tensors = "tensors"
    """Arrays of arrays: exported programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """A named array of a request or an answer."""

    name: str
    dtype: str
    """By NumPy's name, or :data:`BYTES`."""
    shape: tuple[int, ...]
    """Its first dim is the number of examples, ANY."""
    optional: bool = False
    """Whether a request may leave it out."""


class RefusedError(SystolicError):
    """A request that is not taken now.

    Attributes:
        retry_seconds: When to come back; None where it can never be taken.
        parameter: Field of the request that is to blame, if one is.
    """

    def __init__(
        self, message: str, *, retry_seconds: float | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.retry_seconds, self.parameter = retry_seconds, parameter


class ExpiredError(SystolicError):
    """A request whose deadline passed before its answer was known."""
