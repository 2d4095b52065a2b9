"""The contract of data: what an example looks like, and how to read batches of them.

Numbers on the host are numpy; ``systolic.data`` implements the sources, ``systolic.training`` places
batches on devices.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from systolic.core.errors import DataError, OptionError
from systolic.job.layout import Layout

if TYPE_CHECKING:
    import numpy as np

MASK = "mask"
"""Every batch holds ``mask`` f32[batch]: 1 for an example, 0 for the padding of a last batch."""


class Split(enum.Enum):
    """Which part of the data."""

    train = "train"
    validation = "validation"
    test = "test"


class OnError(enum.Enum):
    """What to do about a damaged file."""

    skip = "skip"
    """Leave it out, name it and count it; it weighs nothing in losses and metrics."""
    stop = "stop"
    """End the run and name the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReading:
    """How a recipe reads its files."""

    on_error: OnError = OnError.skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One named array of an example, without the batch dim."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ()
    """Logical names of the dims ("sequence" is split over the context axis); () means none is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """How one host reads a split."""

    split: Split
    batch: int
    """Examples per batch on this host."""
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    """None reads for ever; 1 reads once, and the last batch is padded (``mask`` 0)."""
    shard: int = 0
    """Which of ``shards`` equal parts of the data this host reads."""
    shards: int = 1
    workers: int = 0
    """Worker processes that read and transform ahead; 0 does it in threads of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What tells the data of a split from other data (made by :mod:`systolic.data.fingerprint`)."""

    where: str
    """A path for people; data that was moved is the same."""
    files: int
    bytes: int
    names: str
    """A digest of the files' names."""
    digest: str
    """Of the sizes and of contents, up to a bound."""


class Batches(Protocol):
    """An iterator of batches whose position can be saved and set, packing buffers included."""

    def __next__(self) -> dict[str, "np.ndarray"]: ...

    def __iter__(self) -> Iterator[dict[str, "np.ndarray"]]: ...

    def get_state(self) -> bytes:
        """The position as bytes; equal bytes mean the same next batch."""
        ...

    def set_state(self, state: bytes) -> None:
        """Goes to a position saved by :meth:`get_state`, also of another process.

        With another number of ``Read.shards`` than it was saved with, the position is one that all of
        their readers shared or that :meth:`Data.earliest` chose.
        """
        ...

    def close(self) -> None:
        """Ends worker processes and threads."""
        ...


class Data(ABC):
    """A frozen value that says where examples come from."""

    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """Name to array of one example; reads no file, so that a step can be compiled without the data."""

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Examples in a split, 0 if it has none, ``None`` when only reading tells (packed text)."""

    def contents(self, split: Split) -> Contents | None:
        """What tells the data of a split from other data, so that a run goes on with its own only.

        ``None`` where nothing does, or where it comes out of the training split's files.

        Raises:
            DataError: a file can't be read.
        """
        del split
        return None

    def lasting(self) -> frozenset[str]:
        """Names of the fields that a run keeps to its end, because its position in the data depends on them."""
        return frozenset()

    def epochs(self, position: bytes) -> float | None:
        """Passes over the training split that a saved position stands for; ``None``: its size tells."""
        del position
        return None

    def earliest(self, positions: Sequence[bytes]) -> bytes:
        """The position from which another number of readers goes on without leaving an example out.

        Args:
            positions: Of every reader (``Read.shard``) of the training split at one moment, all different.

        Raises:
            DataError: this data goes on only with as many readers as it was saved with.
        """
        raise DataError(
            f"the checkpoint holds the positions of {len(positions)} readers of {type(self).__name__} data, which another number of readers cannot take up; resume with the layout and the number of processes that saved it"
        )

    @abstractmethod
    def open(self, read: Read) -> Batches:
        """Batches of a split: name to array [batch, *shape], and ``mask`` f32[batch].

        Raises:
            DataError: no example, a damaged file or another format than this source reads.
            NotFoundError: a path that does not exist.
        """

    def load(self, path: Path) -> dict[str, Any]:
        """One file as an example (without labels) for ``predict``.

        Raises:
            OptionError: this kind of data has no single-file form.
        """
        raise OptionError(
            f"{path} is a single file, and the data of this recipe is read as a whole only; use systolic eval RUN --path {path}"
        )

    def at(self, path: Path) -> "Data":
        """Other data read in the same way, all of which is in the validation split.

        Raises:
            OptionError: this kind of data can't be read from another path.
        """
        raise OptionError(
            f"--path is {path}, but {type(self).__name__} data can't be read from elsewhere; leave --path out"
        )

    def baselines(self) -> Mapping[str, float]:
        """Figures of simple methods on the held-out data, for a result to be held against."""
        return {}

    def shrink(self, layout: Layout) -> "Data":
        """The same data in smaller examples that the layout still divides, for rehearsals."""
        del layout
        return self

    def notes(self) -> tuple[str, ...]:
        """What is odd about the data and worth a line before training: found in listings and sizes, not by reading it."""
        return ()

    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in label order; () where there are none."""
        return ()

    def with_labels(self, labels: tuple[str, ...]) -> "Data":
        """The same data with the classes that a run was trained on, whatever is there now; itself where they are fixed."""
        del labels
        return self
