"""The contract of data: what an example looks like, and how to read batches of them.

Arrays on the host are numpy; ``systolic.data`` implements the sources, ``systolic.training`` places
batches on devices.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from systolic.core.errors import DataError, OptionError
from systolic.core.ranges import check
from systolic.job.layout import Layout

if TYPE_CHECKING:
    import numpy as np

MASK = "mask"
"""Name of the array f32[batch] in every batch: 1 for an example, 0 for padding of the last batch."""


class Split(enum.Enum):
    """Part of the data."""

    train = "train"
    validation = "validation"
    test = "test"


class OnError(enum.Enum):
    """Policy for a damaged file."""

    skip = "skip"
    """Skip it, name it and count it; it has no weight in losses and metrics."""
    stop = "stop"
    """End the run and name the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReading:
    """Options of reading a recipe's files."""

    on_error: OnError = OnError.skip

    def __post_init__(self) -> None:
        check(self, "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One named array of an example, without the batch dim."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...] = ()
    """Logical names of the dims ("sequence" is split over the context axis); () means none is split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Options of reading a split on one host."""

    split: Split
    batch: int
    """Examples per batch on this host."""
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    """Passes over the split; None repeats without end, 1 pads the last batch (``mask`` 0)."""
    shard: int = 0
    """Index of the part that this host reads, of ``shards`` equal parts."""
    shards: int = 1
    workers: int = 0
    """Worker processes that read and transform ahead; 0 uses threads of this process."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """Fingerprint of the data of a split (made by :mod:`systolic.data.fingerprint`)."""

    where: str
    """Path, for display only: data that was moved is the same."""
    files: int
    bytes: int
    names: str
    """Digest of the file names."""
    digest: str
    """Digest of the sizes and of the contents, up to a bound."""
    arrays: tuple[str, ...] = ()
    """Name, type and shape of each array; () of files, and in records of earlier versions."""


class Batches(Protocol):
    """An iterator of batches whose position can be saved and set, packing buffers included."""

    def __next__(self) -> dict[str, "np.ndarray"]: ...

    def __iter__(self) -> Iterator[dict[str, "np.ndarray"]]: ...

    def get_state(self) -> bytes:
        """The position as bytes; equal bytes mean the same next batch."""
        ...

    def set_state(self, state: bytes) -> None:
        """Restores a position saved by :meth:`get_state`, also one of another process.

        If the number of ``Read.shards`` has changed since it was saved, the position is one that all
        readers shared or that :meth:`Data.earliest` chose.
        """
        ...

    def close(self) -> None:
        """Ends worker processes and threads."""
        ...


class Data(ABC):
    """Source of examples, a frozen value."""

    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """Arrays of one example by name; reads no file, so that a step compiles without the data."""

    def files(self, split: Split) -> Sequence[Path]:
        """Files that hold the examples of a split, those of training where it comes out of them; none where there are none of their own."""
        del split
        return ()

    def missing(self) -> str:
        """Message about fields that training needs and that were not given; empty where nothing is missing."""
        return ""

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Number of examples in a split, 0 if it is empty, ``None`` if only reading tells (packed text)."""

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of a split, by which a resume refuses other data.

        ``None`` if there is none, or if the split comes out of the training split's files.

        Raises:
            DataError: a file can't be read.
        """
        del split
        return None

    def encoding(self) -> Sequence[str]:
        """Converters of files to numbers besides the fields, with digests: a tokenizer; () if nothing does.

        Raises:
            NotFoundError: there is no such tokenizer.
            DataError: it can't be read.
        """
        return ()

    def lasting(self) -> frozenset[str]:
        """Names of the fields that a resume may not change, because the position in the data depends on them."""
        return frozenset()

    def epochs(self, position: bytes) -> float | None:
        """Passes over the training split at a saved position; ``None`` if its size tells."""
        del position
        return None

    def earliest(self, positions: Sequence[bytes]) -> bytes:
        """Position from which a different number of readers continues without skipping an example.

        Args:
            positions: Positions of all readers (``Read.shard``) of the training split at one step, all different.

        Raises:
            DataError: this data continues only with the number of readers that it was saved with.
        """
        raise DataError(
            f"the checkpoint holds the positions of {len(positions)} readers of {type(self).__name__} data, and a different number of readers cannot continue from them; resume with the layout and the number of processes that saved it"
        )

    @abstractmethod
    def open(self, read: Read) -> Batches:
        """Batches of a split: name to array [batch, *shape], and ``mask`` f32[batch].

        Raises:
            DataError: no example, a damaged file, or a format that this source does not read.
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

    def read(self, content: bytes, name: str) -> dict[str, Any]:
        """The content of a file as :meth:`load` gives it; no path of this machine is opened.

        Args:
            content: All of the file.
            name: What messages call it.

        Raises:
            OptionError: this kind of data has no such form.
            DataError: it can't be read.
        """
        del content
        raise OptionError(
            f"{name} is a file, and the data of this recipe is not read from the content of one; give arrays"
        )

    def at(self, path: Path) -> "Data":
        """The same source at another path, all of it in the validation split.

        Raises:
            OptionError: this kind of data can't be read from another path.
        """
        raise OptionError(
            f"--path is {path}, but {type(self).__name__} data can't be read from elsewhere; leave --path out"
        )

    @property
    def read_elsewhere(self) -> bool:
        """Whether :meth:`at` takes a path."""
        return type(self).at is not Data.at

    def baselines(self) -> Mapping[str, float]:
        """Results of simple methods on the held-out data, to compare with."""
        return {}

    def shrink(self, layout: Layout) -> "Data":
        """The same data with smaller examples that the layout still divides, for rehearsals."""
        del layout
        return self

    def notes(self) -> tuple[str, ...]:
        """Warnings about the data to print before training, from listings and sizes, without reading it."""
        return ()

    def labels(self) -> tuple[str, ...]:
        """Class names in label order; () if there are none."""
        return ()

    def with_labels(self, labels: tuple[str, ...]) -> "Data":
        """The same data with the classes that a run was trained on, whatever the files say now; unchanged if they are fixed."""
        del labels
        return self


class NoExamples(Data):
    """Base of the data of a model that came trained: all splits are empty."""

    __slots__ = ()
    refusal: ClassVar[str]
    """Why ``{split}`` can't be read, and what to do."""

    def size(self, split: Split) -> int:
        """0: there are no examples."""
        del split
        return 0

    def open(self, read: Read) -> Batches:
        """Refuses.

        Raises:
            OptionError: always.
        """
        raise OptionError(self.refusal.format(split=read.split.value))
