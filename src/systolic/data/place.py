"""From batches on the host to global arrays on the devices, a few ahead."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Self

import jax
from jax.sharding import NamedSharding

from systolic.job.data import Batches


class _Item(NamedTuple):
    """What the feeding thread hands over: a batch, or why there is none."""

    batch: dict[str, jax.Array] | None
    state: bytes
    """The position after the batch."""
    error: Exception | None = None


class Placed:
    """Batches laid out as a step wants them.

    A thread takes the host's batches and starts their transfers, so that the consumer waits only
    when none has arrived; how long it did is :attr:`waited_seconds`.

    Args:
        batches: This host's batches.
        shardings: Where each array of a global batch lives.
        ahead: Batches whose transfer has started before they are asked for, 1 or more.
    """

    def __init__(
        self, batches: Batches, shardings: Mapping[str, NamedSharding], ahead: int = 2
    ) -> None:
        self._batches, self._shardings = batches, shardings
        self._ready: queue.Queue[_Item] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._state = batches.get_state()
        self._ended = False
        self.waited_seconds = 0.0
        """Time the consumer has waited for batches so far."""

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def start(self) -> None:
        """Begins to read ahead; otherwise the first batch that is asked for does."""
        if self._thread is None and not self._ended:
            self._stop.clear()
            self._thread = threading.Thread(target=self._feed, name="systolic-feed", daemon=True)
            self._thread.start()

    def __next__(self) -> dict[str, jax.Array]:
        """Name to global jax.Array [batch, ...]; raises what reading the data raised."""
        if self._ended:
            raise StopIteration
        self.start()
        asked = time.perf_counter()
        item = self._ready.get()
        self.waited_seconds += time.perf_counter() - asked
        if item.error is not None:
            self._ended = True
            raise item.error
        if item.batch is None:
            self._ended = True
            raise StopIteration
        self._state = item.state
        return item.batch

    def get_state(self) -> bytes:
        """The position after the last batch that was handed out, not the last one read ahead."""
        return self._state

    def set_state(self, state: bytes) -> None:
        """Goes to a position saved by :meth:`get_state`."""
        self._halt()
        self._batches.set_state(state)
        self._state, self._ended = state, False

    def close(self) -> None:
        """Ends the feeding thread and the host's readers."""
        self._halt()
        self._ended = True
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self) -> None:
        """Runs in the thread, until the data ends, fails or is no longer wanted."""
        while not self._stop.is_set():
            try:
                item = self._next_item()
            except Exception as error:  # raised again where the batch is asked for
                item = _Item(None, self._state, error)
            self._ready.put(item)
            if item.batch is None:
                return

    def _next_item(self) -> _Item:
        try:
            batch = next(self._batches)
        except StopIteration:
            return _Item(None, self._state)
        placed = {
            name: jax.make_array_from_process_local_data(self._shardings[name], array)
            for name, array in batch.items()
        }
        return _Item(placed, self._batches.get_state())

    def _halt(self) -> None:
        """Ends the thread and drops what it read ahead."""
        if self._thread is None:
            return
        self._stop.set()
        while self._thread.is_alive():
            # The thread may be waiting for room.
            self._drop()
            self._thread.join(0.01)
        self._thread = None
        self._drop()

    def _drop(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()
