"""Batches on the devices: numpy arrays of the host become global sharded ``jax.Array`` here, a few batches ahead.

:meth:`DeviceBatches._to_devices` is the one place where a batch becomes arrays on devices.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import NamedSharding

from systolic.core.errors import DataError
from systolic.data.host_shard import Blocks, ProcessShare

Index = tuple[slice, ...]


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
            DataError: see :meth:`systolic.data.host_shard.Blocks.set_states`.
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
