"""Data in memory: numpy arrays, or a function that makes them, as a table of examples."""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from systolic.core.errors import DataError, nearest
from systolic.data.random_access import Picks, Table
from systolic.job.data import MASK, Batches, Contents, Data, Field, Read, Split

Splits = Mapping[str, Mapping[str, Any]]
"""Split name ("train", "validation", "test") to array name to array [examples, ...]."""

_NARROW = {"float64": "float32", "int64": "int32", "uint64": "uint32"}
"""JAX computes in 32 bits; narrowing once on the host saves half of every transfer."""


class LazyArrays:
    """Arrays, or the function that makes them at first use; compared by identity."""

    __slots__ = ("_lock", "_make", "_splits")

    def __init__(self, make: Callable[[], Splits]) -> None:
        self._make = make
        self._splits: dict[Split, dict[str, np.ndarray]] | None = None
        self._lock = threading.Lock()

    def splits(self) -> "dict[Split, dict[str, np.ndarray]]":
        """Split to name to array, checked and narrowed to 32 bits.

        Raises:
            DataError: a split of another name, no array, or arrays of different lengths.
        """
        with self._lock:
            if self._splits is None:
                splits: Any = self._make()
                if not isinstance(splits, Mapping):
                    raise DataError(
                        f"{self} returned {_kind(splits)}; return {{split: {{name: array}}}}, such as {{'train': {{'x': x, 'label': y}}, 'validation': …}}"
                    )
                self._splits = {
                    _split(name): _checked(name, arrays) for name, arrays in splits.items()
                }
            return self._splits

    def __str__(self) -> str:
        if self._splits is None:
            # An instance has no name of its own; its class stands for it.
            make = self._make
            while isinstance(make, functools.partial):
                make = make.func
            named = make if inspect.isroutine(make) or inspect.isclass(make) else type(make)
            return f"{named.__module__}.{named.__qualname__}()"
        return "; ".join(
            f"{split.value}: "
            + ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in named.items())
            for split, named in self._splits.items()
        )

    def __getstate__(self) -> tuple[Any, Any]:
        return (self._make if self._splits is None else None, self._splits)

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self._make, self._splits = state
        self._lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrays(Data):
    """Examples from numpy arrays, one array a field, one set of arrays a split.

    ``Arrays.of(train={"image": images, "label": labels}, test={...})`` holds arrays;
    ``Arrays.call(load)`` calls ``load() -> {"train": {"image": ...}, ...}`` when the data is
    first needed. 64-bit numbers are narrowed to 32 bits.
    """

    held: LazyArrays
    declared: Mapping[str, Field] = field(default_factory=dict)
    """The fields, if they should be known before the arrays, or have logical axes."""
    names: tuple[str, ...] = ()
    """The classes, in label order."""
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the columns of an array's numbers, by the array's name, by which ``systolic predict`` checks tables of new rows."""

    @classmethod
    def of(
        cls,
        *,
        train: Mapping[str, Any],
        validation: Mapping[str, Any] | None = None,
        test: Mapping[str, Any] | None = None,
        names: tuple[str, ...] = (),
        fields: Mapping[str, Field] | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> "Arrays":
        """Data that holds these arrays.

        Raises:
            DataError: no array, or arrays of different lengths in a split.
        """
        named = {"train": train, "validation": validation, "test": test}
        splits = {name: arrays for name, arrays in named.items() if arrays is not None}
        held = LazyArrays(lambda: splits)
        held.splits()
        return cls(held=held, declared=fields or {}, names=names, columns=_columns(columns))

    @classmethod
    def call(
        cls,
        function: Callable[[], Splits],
        *,
        names: tuple[str, ...] = (),
        fields: Mapping[str, Field] | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
    ) -> "Arrays":
        """Data that ``function`` makes at first use."""
        held = LazyArrays(function)
        return cls(held=held, declared=fields or {}, names=names, columns=_columns(columns))

    def fields(self) -> Mapping[str, Field]:
        """The declared fields, or those of the arrays (which makes them)."""
        if self.declared:
            return dict(self.declared)
        splits = self.held.splits()
        if not splits:
            raise DataError("the data has no split; give it at least train={name: array}")
        return {
            name: Field(shape=array.shape[1:], dtype=str(array.dtype))
            for name, array in next(iter(splits.values())).items()
        }

    def size(self, split: Split) -> int | None:
        """Examples in a split; makes the arrays."""
        arrays = self.held.splits().get(split, {})
        return next((len(array) for array in arrays.values()), 0)

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the split's arrays; makes them."""
        from systolic.data.fingerprint import of_arrays

        where = f"{split.value} arrays of {self.held}"
        return of_arrays(where, self.held.splits().get(split, {}))

    def open(self, read: Read) -> Batches:
        """Batches of a split; fields named label or targets are padded with -1.

        Raises:
            DataError: no such split, no examples, or arrays that are not as declared.
        """
        from systolic.data.random_access import open_table

        arrays = self.held.splits().get(read.split, {})
        fields = self.fields()
        if arrays:
            for name in fields.keys() | arrays.keys():
                array, declared = arrays.get(name), fields.get(name)
                have = None if array is None else (array.shape[1:], str(array.dtype))
                want = None if declared is None else (tuple(declared.shape), declared.dtype)
                if have != want:
                    raise DataError(
                        f"{read.split.value} array {name!r} is {_shown(have)} an example but the data's fields say {_shown(want)}; make them agree"
                    )
        return open_table(ArrayTable(arrays), read, fields, fill={"label": -1, "targets": -1})

    def labels(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.names


def _kind(value: Any) -> str:
    import numpy as np

    shape = f" {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    return f"a {type(value).__name__}{shape}"


def _columns(by_name: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    return {name: tuple(map(str, columns)) for name, columns in (by_name or {}).items()}


def _split(name: str) -> Split:
    known = [split.value for split in Split]
    if name not in known:
        raise DataError(
            f"there is no split {name!r}{nearest(name, known)}; splits are {', '.join(known)}"
        )
    return Split(name)


def _checked(split: str, arrays: Mapping[str, Any]) -> "dict[str, np.ndarray]":
    import numpy as np

    if not isinstance(arrays, Mapping):
        raise DataError(
            f"the {split} split is {_kind(arrays)}; give {{name: array}}, by the names that the model and the task read"
        )
    result = {name: np.asarray(array) for name, array in arrays.items()}
    if not result:
        raise DataError(f"the {split} split has no array; give it {{name: array}}")
    if MASK in result:
        raise DataError(
            f"the {split} split has an array named {MASK!r}, which marks padding; rename it"
        )
    for name, array in result.items():
        if array.ndim == 0 or array.dtype.kind not in "biuf":
            raise DataError(
                f"{split} array {name!r} is {array.dtype}{list(array.shape)}; it must hold numbers, examples first"
            )
        result[name] = _narrowed(split, name, array)
    lengths = {name: len(array) for name, array in result.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(
            f"{split} arrays differ in length ({shown}); each needs one entry an example"
        )
    return result


def _narrowed(split: str, name: str, array: "np.ndarray") -> "np.ndarray":
    import numpy as np

    narrow = _NARROW.get(str(array.dtype))
    if narrow is None:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(narrow)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{split} array {name!r} holds {low}..{high}, more than {narrow} does; make its numbers smaller"
            )
    return array.astype(narrow)


def _shown(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]}{list(kind[0])}"


class ArrayTable(Table):
    """Name to array [examples, ...]; a batch is one gather of each array."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def __len__(self) -> int:
        return next((len(array) for array in self._arrays.values()), 0)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked examples."""
        return {name: array[picks.indices] for name, array in self._arrays.items()}
