"""The contract of a model that answers whole requests: what it takes, what it gives back."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

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


class BatchModel(Protocol):
    """A model that answers requests of one or more examples each.

    Inputs and outputs by kind; every array has one entry per example, [n] or [n, ...]:

    ============== ====================================================== ===================================
    kind           inputs                                                 outputs
    ============== ====================================================== ===================================
    image          ``image``: bytes[n], files (JPEG, PNG, ...) that get   ``label`` int32[n, k], ``probability``
                   the model's own preparation; or                        float32[n, k], best first, and
                   uint8[n, side, side, channels] as they are             ``name`` bytes[n, k] of the labels
    embedding      ``text``: bytes[n]; an element may be an int array of  ``embedding`` float32[n, d_model],
                   token ids instead                                      ``tokens`` int32[n]
    transcription  ``audio``: bytes[n], files (WAV, FLAC, ...); or        ``text`` and ``language`` bytes[n],
                   float32[n, samples] of 16 kHz; ``language``: bytes[n]  ``seconds`` float32[n], ``segments``
                   of codes or names, which may be left out               bytes[n]: JSON [{"start", "end", "text"}]
    tensors        the program's inputs                                   the program's outputs
    ============== ====================================================== ===================================
    """

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def kind(self) -> ModelKind:
        """Its task."""
        ...

    @property
    def inputs(self) -> Sequence[ArraySpec]:
        """Arrays of a request; an encoded input has one dim and the dtype BYTES."""
        ...

    @property
    def outputs(self) -> Sequence[ArraySpec]:
        """Arrays of an answer."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Names of classes in label order; () where there are none."""
        ...

    def submit(
        self, inputs: "Mapping[str, np.ndarray]", *, deadline_seconds: float | None = None
    ) -> "Future[Mapping[str, np.ndarray]]":
        """Queues a request; returns at once, from any thread.

        ``Future.cancel`` drops a request that no batch holds yet; ``asyncio.wrap_future`` awaits it. The
        future fails with :class:`~systolic.core.errors.DataError` for an input that can't be read (a damaged
        picture), with :class:`~systolic.serving.errors.ExpiredError` after the deadline, and with
        :class:`~systolic.core.errors.RunError` where the device or the worker failed.

        Args:
            inputs: Name to array; checked against ``inputs`` before it is queued.
            deadline_seconds: Fails the request so long after now.

        Raises:
            RefusedError: the queue is full, the model ends or is not ready, or the request can never be
                taken (more examples, pixels, seconds or bytes than the limits).
            OptionError: an input is missing, unknown, or of another dtype or shape.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether every program is compiled and the worker answers."""
        ...

    @property
    def heartbeat_seconds(self) -> float:
        """Since it failed, or a worker was found stuck; 0 while all is well."""
        ...

    def start(self) -> None:
        """Compiles every program and starts the worker; returns when it is ready."""
        ...

    def drain(self, seconds: float) -> bool:
        """Refuses new requests, and waits until those that were taken are answered; False where time ran out.

        Requests that are left fail with RunError.
        """
        ...

    def close(self) -> None:
        """Ends at once; requests that are left fail with RunError."""
        ...
