"""Batches: the rows of a global batch that a process reads, as equal blocks, and their way onto the devices."""

import base64
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from systolic.core.errors import DataError
from systolic.job.data import MASK, Batches, Data

_SEVERAL = b"blocks "
"""Prefix of a position of several blocks; the position of a whole batch is its reader's own."""

MOST_PIECES = 16
"""Most blocks that are read in place of one in order to go on exactly where more processes were: the mixed windows of each are in memory."""
Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessShare:
    """The part of every global batch that one process reads."""

    rows: int
    """Rows of a global batch."""
    count: int
    """Number of equal blocks of a global batch, the same in every process."""
    blocks: tuple[int, ...]
    """Blocks that this process reads, ascending."""

    @property
    def block_rows(self) -> int:
        """Rows in a block."""
        return self.rows // self.count

    @classmethod
    def of(cls, held: Mapping[int, Set[int]], process: int, rows: int) -> Self:
        """Share of a process, in the largest blocks that divide the rows of every process.

        Args:
            held: Process to the parts of the batch on its devices; parts are equal, numbered from 0,
                and each is on some device.
            process: Index of this process.
            rows: Rows of a global batch, a multiple of the number of parts.
        """
        num_parts = 1 + max(max(parts) for parts in held.values())
        for count in range(1, num_parts + 1):
            if num_parts % count == 0 and all(
                _whole(parts, num_parts // count) for parts in held.values()
            ):
                break
        each = num_parts // count
        return cls(rows=rows, count=count, blocks=tuple(sorted({p // each for p in held[process]})))

    def in_blocks(self, count: int) -> "ProcessShare | None":
        """The rows of this share out of the smaller blocks of ``count``, some of which may hold rows of others, too.

        ``None``, in all processes alike, if blocks are not smaller, the rows don't divide, or there are too many.
        """
        if not self.count <= count <= MOST_PIECES * self.count or self.rows % count:
            return None
        each, have = self.rows // count, self.block_rows
        held = {
            block
            for own in self.blocks
            for block in range(own * have // each, -(-(own + 1) * have // each))
        }
        return replace(self, count=count, blocks=tuple(sorted(held)))


def _whole(parts: Set[int], each: int) -> bool:
    """Whether ``parts`` are whole blocks of ``each`` parts."""
    return len(parts) == each * len({part // each for part in parts})


class Blocks:
    """The blocks of a process's share, read in step.

    A global batch of ``rows`` is ``count`` equal contiguous blocks. Block ``b`` is what
    ``Read(batch=rows // count, shard=b, shards=count)`` gives, whichever process reads it, so processes
    whose devices hold the same rows read the same data. Fewer processes read the blocks of more: each those that
    hold any of its rows.

    Args:
        data: Source of the batches.
        share: The rows to read, in the fewest blocks.
        open_block: Opens the batches of one block of a share, each with the rows of a block.
        count: Blocks of a batch to begin with where more processes would read it.
    """

    def __init__(
        self,
        data: Data,
        share: ProcessShare,
        open_block: Callable[[ProcessShare, int], Batches],
        count: int = 1,
    ) -> None:
        self._data, self._fewest, self._open = data, share, open_block
        self.share = share.in_blocks(count) or share
        self._readers = {block: open_block(self.share, block) for block in self.share.blocks}

    def __iter__(self) -> Iterator[dict[int, dict[str, np.ndarray]]]:
        return self

    def __next__(self) -> dict[int, dict[str, np.ndarray]]:
        """Block to name to array [block rows, ...]; ends with the first block that ends."""
        return {block: next(reader) for block, reader in self._readers.items()}

    def get_state(self) -> bytes:
        """Position of this process; :meth:`set_states` takes those of all processes."""
        states = {block: reader.get_state() for block, reader in self._readers.items()}
        if self.share.count == 1:
            return states[0]
        coded = {str(block): base64.b64encode(state).decode() for block, state in states.items()}
        return _SEVERAL + json.dumps({"count": self.share.count, "states": coded}).encode()

    def set_states(self, states: Sequence[bytes]) -> None:
        """Moves to the position that the processes of a run saved, whatever their number.

        Fewer processes read the blocks that were saved, so that batches hold the rows of a run that goes on with
        all of them. Only where that is too many blocks a process, or more processes than blocks, does the data
        choose one position for all.

        Args:
            states: Results of :meth:`get_state` in each process, in their order.

        Raises:
            DataError: it belongs to other data, or this data resumes only with the blocks it was
                saved with.
        """
        count, saved = _saved(states)
        distinct = sorted(set(saved.values()))
        if count != self.share.count and len(distinct) > 1:
            self._read(self._fewest.in_blocks(count) or self._fewest)
        if count != self.share.count:
            common = distinct[0] if len(distinct) == 1 else self._data.earliest(distinct)
            saved = dict.fromkeys(self.share.blocks, common)
        missing = [block for block in self.share.blocks if block not in saved]
        if missing:
            raise DataError(
                f"the checkpoint holds the data's position for parts {', '.join(map(str, sorted(saved)))} of {count}, and part {missing[0]} is missing; restore the files of every process"
            )
        for block, reader in self._readers.items():
            reader.set_state(saved[block])

    def close(self) -> None:
        """Closes all readers."""
        for reader in self._readers.values():
            reader.close()

    def _read(self, share: ProcessShare) -> None:
        """Reads a share in other blocks from now on."""
        if share != self.share:
            self.close()
            self.share = share
            self._readers = {block: self._open(share, block) for block in share.blocks}


class FirstExamples:
    """The first examples of a pass over a split: the last batch is padded, whatever its size.

    Args:
        batches: Of one block.
        share: The blocks.
        block: The number of the block.
        examples: How many, over all blocks.
    """

    def __init__(self, batches: Batches, share: ProcessShare, block: int, examples: int) -> None:
        self._batches, self._rows, self._examples = batches, share.rows, examples
        self._next = block * share.block_rows

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        left = self._examples - self._next
        if left + self._next % self._rows <= 0:
            raise StopIteration
        self._next += self._rows
        batch = next(self._batches)
        return {**batch, MASK: np.where(np.arange(len(batch[MASK])) < left, batch[MASK], 0)}

    def get_state(self) -> bytes:
        """See :class:`~systolic.job.data.Batches`."""
        return self._batches.get_state()

    def set_state(self, state: bytes) -> None:
        """Not of a part of a pass: nothing saves its position."""
        raise NotImplementedError(f"a position in the first {self._examples} examples")

    def close(self) -> None:
        """See :class:`~systolic.job.data.Batches`."""
        self._batches.close()


def first_reader(state: bytes) -> bytes:
    """The first reader's own position in a result of :meth:`Blocks.get_state`."""
    _, saved = _saved([state])
    return saved[min(saved)]


def _saved(states: Sequence[bytes]) -> tuple[int, dict[int, bytes]]:
    """Number of blocks of saved positions, and the position of each."""
    several = [state for state in states if state.startswith(_SEVERAL)]
    if not several:
        if len(set(states)) == 1:
            return 1, {0: states[0]}
        # From versions in which every process read one block of its own.
        return len(states), dict(enumerate(states))
    positions: dict[int, bytes] = {}
    count = 0
    for state in several:
        plain = json.loads(state.removeprefix(_SEVERAL))
        count = plain["count"]
        for block, coded in plain["states"].items():
            positions[int(block)] = base64.b64decode(coded)
    return count, positions


def share_of(sharding: NamedSharding, rows: int) -> ProcessShare:
    """Share of a global batch that this process reads: the rows that its devices hold.

    Args:
        sharding: Sharding of an array [rows] of the batch.
        rows: Rows of the global batch.
    """
    indices = sharding.devices_indices_map((rows,))
    starts = {device: index[0].indices(rows)[0] for device, index in indices.items()}
    numbers = {start: number for number, start in enumerate(sorted(set(starts.values())))}
    held: dict[int, set[int]] = {}
    for device, start in starts.items():
        held.setdefault(device.process_index, set()).add(numbers[start])
    return ProcessShare.of(held, jax.process_index(), rows)


class _Item(NamedTuple):
    """Result of the feeding thread: a batch, the end, or an error."""

    batch: dict[str, jax.Array] | None
    state: bytes
    """Position in the data after the batch."""
    error: Exception | None = None


class DeviceBatches:
    """Iterator over batches on the devices, sharded as the step expects.

    A thread reads the host's batches and starts their transfers, so that the consumer waits only
    when none has arrived; :attr:`waited_seconds` counts that.

    Args:
        blocks: The blocks of each batch that this process reads.
        shardings: Sharding of each array of the global batch.
        ahead: Batches in transfer before they are requested, 1 or more.
    """

    def __init__(
        self, blocks: Blocks, shardings: Mapping[str, NamedSharding], ahead: int = 2
    ) -> None:
        self._blocks, self._shardings = blocks, shardings
        self._ready: queue.Queue[_Item] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = blocks.get_state()
        self._ended = False
        self.waited_seconds = 0.0
        """Time the consumer has waited for batches so far."""

    @property
    def share(self) -> ProcessShare:
        """Share of each batch that this process reads."""
        return self._blocks.share

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def start(self) -> None:
        """Starts to read ahead; by default the first request does."""
        if self._thread is None and not self._ended:
            self._stop.clear()
            self._thread = threading.Thread(target=self._feed, name="systolic-feed", daemon=True)
            self._thread.start()

    def __next__(self) -> dict[str, jax.Array]:
        """Next batch: name to global jax.Array [batch, ...]; raises errors of reading the data."""
        if self._ended:
            raise StopIteration
        self.start()
        start = time.perf_counter()
        item = self._ready.get()
        self.waited_seconds += time.perf_counter() - start
        if item.error is not None:
            self._ended = True
            raise item.error
        if item.batch is None:
            self._ended = True
            raise StopIteration
        self._state = item.state
        return item.batch

    def get_state(self) -> bytes:
        """Position after the last batch returned, not the last one read ahead."""
        return self._state

    def set_states(self, states: Sequence[bytes]) -> None:
        """Moves to the position that :meth:`get_state` returned in each process of a run, in their order.

        Raises:
            DataError: see :meth:`systolic.data.batches.Blocks.set_states`.
        """
        self._halt()
        self._blocks.set_states(states)
        self._state, self._ended = self._blocks.get_state(), False

    def close(self) -> None:
        """Stops the feeding thread and the host's readers."""
        self._halt()
        self._ended = True
        self._blocks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self) -> None:
        """Feeds the queue until the data ends, fails or the thread is stopped."""
        while not self._stop.is_set():
            try:
                item = self._next_item()
            except Exception as error:  # raised again at the request
                item = _Item(None, self._state, error)
            self._ready.put(item)
            if item.batch is None:
                return

    def _next_item(self) -> _Item:
        try:
            parts = next(self._blocks)
        except StopIteration:
            return _Item(None, self._state)
        names = next(iter(parts.values()))
        arrays = {name: self._to_devices(name, parts) for name in names}
        return _Item(arrays, self._blocks.get_state())

    def _to_devices(self, name: str, parts: Mapping[int, Mapping[str, np.ndarray]]) -> jax.Array:
        """Makes the global array, of which this process has read some blocks."""
        share = self._blocks.share
        arrays = {block: part[name] for block, part in parts.items()}
        first = next(iter(arrays.values()))
        rows = len(first)
        if (jax.process_count() > 1 or share.count > 1) and any(
            len(array) != share.block_rows for array in arrays.values()
        ):
            counts = ", ".join(str(len(array)) for array in arrays.values())
            raise DataError(
                f"the data returned {counts} examples of {name}, but each of the {share.count} blocks of a batch of {share.rows} has {share.block_rows}; return as many in every process"
            )

        def shard(index: Index | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(rows * share.count)
            parts = [
                arrays[block][max(start - block * rows, 0) : stop - block * rows]
                for block in range(start // rows, -(-stop // rows))
            ]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return whole[(slice(None), *index[1:])]

        shape = (rows * share.count, *first.shape[1:])
        return jax.make_array_from_callback(shape, self._shardings[name], shard)

    def _halt(self) -> None:
        """Stops the thread and drops its batches."""
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():
            # The thread may be waiting for room in the queue.
            self._drop()
            self._thread.join(0.01)
        self._thread = None
        self._drop()

    def _drop(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
