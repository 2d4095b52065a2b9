"""Random-access tables of examples, shuffled without a table of the order, and streams of batches of them whose position is one number.

A :class:`Table` returns examples by number, many at a time. Batch ``i`` of a host is a pure
function of ``i``, so Grain reads ahead in threads or processes, resuming costs nothing, and the
global order of examples is the same for every number of hosts and every batch size.
"""

import json
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.core.machine import bounded, end_with
from systolic.data.input_files import SIDE, unload
from systolic.job.data import MASK, Batches, Field, Read

_ROUNDS = 4
"""Rounds over both halves, so 8 of a plain Feistel network."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: the step that SplitMix64 takes between keys."""

_BLOCK = 1 << 14
"""Positions shuffled at once: numpy's cost per call would dwarf a batch of 128."""
_FOREVER = 1 << 60
"""Length of an endless stream, in batches; ``len()`` must stay below ``sys.maxsize``."""


def mix(values: np.ndarray) -> np.ndarray:
    """A bijective hash of uint64[...] (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permutes positions 0..size-1, one permutation for each key.

    A keyed permutation of 0..n-1 is computed for the asked positions only, so any position of any
    epoch is reached at once, in constant memory, and every host agrees without talking. It is a
    Feistel network over the next power of two, walked until it lands below n (format-preserving
    encryption: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        positions: integers[n] below ``size``.
        size: number of positions.
        keys: uint64[n] (or [1]): the permutation that each position is under.

    Returns:
        int64[n].
    """
    bits = max(size - 1, 0).bit_length()
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits - int(low_bits))) - 1)
    result = positions.astype(np.uint64)
    keys = np.broadcast_to(keys, result.shape)
    todo = np.arange(len(result)) if bits else np.arange(0)
    while len(todo):
        low, high, key = result[todo] & low_mask, result[todo] >> low_bits, keys[todo]
        for _ in range(_ROUNDS):
            key = key + np.uint64(_GOLDEN)
            high ^= mix(low + key) & high_mask
            key = key + np.uint64(_GOLDEN)
            low ^= mix(high + key) & low_mask
        result[todo] = (high << low_bits) | low
        todo = todo[result[todo] >= size]
    return result.astype(np.int64)


def keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """uint64[n]: the key of each epoch's permutation."""
    start = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
    return mix(mix(start + np.uint64(_GOLDEN)) + epochs.astype(np.uint64))


def order(positions: np.ndarray, size: int, seed: int, shuffled: bool) -> np.ndarray:
    """Index of the example at each position of the endless stream of epochs.

    Args:
        positions: int64[n], 0 or more; ``position // size`` is the epoch.
        size: examples in the data.
        seed: of the shuffle.
        shuffled: whether each epoch is shuffled (anew).

    Returns:
        int64[n], each value once per epoch.
    """
    if not shuffled:
        return positions % size
    blocks = positions // _BLOCK
    known = {number: _block(int(number), size, seed) for number in np.unique(blocks)}
    if len(known) == 1:
        return known[blocks[0]][positions % _BLOCK]
    return np.array(
        [known[b][p] for b, p in zip(blocks, positions % _BLOCK, strict=True)], np.int64
    )


@lru_cache(maxsize=16)
def _block(number: int, size: int, seed: int) -> np.ndarray:
    positions = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64)
    return permute(positions % size, size, keys(seed, positions // size))


def uniform(seed: int, positions: np.ndarray, count: int) -> np.ndarray:
    """float64[n, count] in [0, 1): random numbers that belong to stream positions.

    They depend on ``seed`` and the position only, not on batch size, host or worker, so an
    augmented stream resumes exactly.
    """
    rows = keys(seed ^ 0x5DEECE66D, positions)[:, None]
    columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (mix(rows + columns[None, :]) >> np.uint64(11)) * 2.0**-53


class Picks(NamedTuple):
    """Examples of a batch."""

    indices: np.ndarray
    """int64[n]: numbers in the table."""
    positions: np.ndarray
    """int64[n]: positions in the stream of all epochs; seeds of augmentation."""


class Table(ABC):
    """Examples by number. Must be picklable where worker processes read it."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked examples: name to array [n, *shape]. Called from several threads at once.

        It may hold ``mask`` f32[n], 0 for an unreadable example, and the reasons packed by
        :func:`systolic.data.input_files.pack`.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batching:
    """Batch ``i``: the object that Grain indexes."""

    table: Table
    read: Read
    fields: Mapping[str, Field]
    fill: Mapping[str, int]
    start: int = 0
    """The stream position of the first example of batch 0, over all hosts."""

    def total(self) -> int | None:
        """Examples in the stream, ``None`` when it has no end."""
        return None if self.read.epochs is None else self.read.epochs * len(self.table)

    def __len__(self) -> int:
        total = self.total()
        if total is None:
            return _FOREVER
        return -(-max(total - self.start, 0) // (self.read.batch * self.read.shards))

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        read = self.read
        first = self.start + (number * read.shards + read.shard) * read.batch
        positions = np.arange(first, first + read.batch, dtype=np.int64)
        total = self.total()
        if total is not None:
            positions = positions[positions < total]
        mask = np.zeros(read.batch, np.float32)
        mask[: len(positions)] = 1
        if not len(positions):
            return {**{name: self._padding(name, read.batch) for name in self.fields}, MASK: mask}
        indices = order(positions, len(self.table), read.seed, read.shuffle)
        arrays = self.table.take(Picks(indices, positions))
        side = {SIDE: arrays.pop(SIDE)} if SIDE in arrays else {}
        if MASK in arrays:
            mask[: len(positions)] = arrays.pop(MASK)
        missing = read.batch - len(positions)
        if missing:
            arrays = {
                name: np.concatenate([array, self._padding(name, missing)])
                for name, array in arrays.items()
            }
        return {**arrays, MASK: mask, **side}

    def _padding(self, name: str, count: int) -> np.ndarray:
        known = self.fields[name]
        return np.full((count, *known.shape), self.fill.get(name, 0), known.dtype)


def check_read(read: Read) -> None:
    """Refuses an invalid :class:`Read`.

    Raises:
        OptionError: a batch below 1, or a shard that is not one of the shards.
    """
    if read.batch < 1:
        raise OptionError(f"batch is {read.batch} per host; give 1 or more")
    if not 0 <= read.shard < read.shards:
        raise OptionError(f"shard is {read.shard} of {read.shards}; give 0 to {read.shards - 1}")


def prefetched(source: Any, workers: int, threads: int, buffer: int) -> Any:
    """Grain's iterator over ``source[0], source[1], ...``, with prefetch.

    Args:
        source: has ``__len__`` and ``__getitem__(int)``.
        workers: worker processes, at most one a core; 0 reads in threads of this process. They
            end with this process, however it ends.
        threads: threads that read (of each process).
        buffer: items to read ahead.
    """
    import grain
    from absl import flags

    reading = grain.MapDataset.source(source).to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffer)
    )
    if workers:
        workers = bounded(workers)
        if not flags.FLAGS.is_parsed():
            # Grain sends its absl flags to its workers and fails on unparsed flags.
            flags.FLAGS(["systolic"])
        options = grain.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=max(1, buffer // workers)
        )
        reading = reading.mp_prefetch(options, worker_init_fn=_end_with_parent)
    return iter(reading)


def _end_with_parent(_worker: int, _workers: int) -> None:
    """Ends this worker with its parent: Grain's workers outlive a killed reader and keep its memory."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with(parent.pid)


@dataclass(kw_only=True, slots=True)
class _TableBatches:
    """Grain's iterator over :class:`_Batching`, with a position independent of Grain.

    The position counts examples, not Grain's steps, so that it outlives a change of workers,
    hosts, batch size or Grain's version.
    """

    batching: _Batching
    threads: int
    seen: int = 0
    reader: Any = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.closed:
            raise ValueError("these batches are closed")
        if self.reader is None:
            self.reader = prefetched(
                self.batching, self.batching.read.workers, self.threads, 2 * self.threads
            )
        batch = next(self.reader)
        self.seen += 1
        return unload(batch)

    def get_state(self) -> bytes:
        """Number of examples that all hosts have read, with the size and order it is valid for."""
        read = self.batching.read
        examples = self.batching.start + self.seen * read.batch * read.shards
        return json.dumps({"examples": examples, **self._identity()}, sort_keys=True).encode()

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Raises:
            DataError: it belongs to data of another size or to another shuffle.
        """
        import dataclasses

        saved = json.loads(state)
        for name, value in self._identity().items():
            if saved.get(name) != value:
                raise DataError(
                    f"the checkpoint was saved with {_phrase(name, saved.get(name))}, the data now has {_phrase(name, value)}; use the data and seed the run began with, or start a new run"
                )
        self._stop()
        self.batching = dataclasses.replace(self.batching, start=int(saved["examples"]))
        self.seen = 0

    def close(self) -> None:
        """Ends worker processes and threads."""
        self._stop()
        self.closed = True

    def _stop(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def _identity(self) -> dict[str, Any]:
        read = self.batching.read
        return {"size": len(self.batching.table), "seed": read.seed, "shuffle": read.shuffle}


def _phrase(name: str, value: Any) -> str:
    """Describes one part of a position's identity, to follow "with" or "has"."""
    words = {
        "size": f"{value} examples",
        "seed": f"examples in the order of seed {value}",
        "shuffle": "examples in shuffled order" if value else "examples in the order of the files",
    }
    return words[name]


def open_table(
    table: Table,
    read: Read,
    fields: Mapping[str, Field],
    fill: Mapping[str, int] | None = None,
    threads: int | None = None,
) -> Batches:
    """Batches of a table: name to array [batch, *shape], and ``mask`` f32[batch].

    Without ``epochs`` the stream has no end and a batch may reach into the next epoch, so each
    example comes once per epoch whatever the batch. With ``epochs`` the last batch is padded, and
    every host gets the same number of batches.

    Args:
        table: the examples.
        read: batch, shuffle, shard, workers.
        fields: shape and dtype of each array, for batches of padding alone.
        fill: padding values other than 0 (such as -1 for labels).
        threads: threads that read ahead (of each worker); by default up to 4.

    Raises:
        DataError: the table is empty.
        OptionError: ``read`` is invalid.
    """
    check_read(read)
    if len(table) == 0:
        raise DataError(
            f"the {read.split.value} split has no examples; give it some, or leave it out"
        )
    batching = _Batching(table=table, read=read, fields=dict(fields), fill=dict(fill or {}))
    return _TableBatches(batching=batching, threads=threads or min(4, os.cpu_count() or 1))
