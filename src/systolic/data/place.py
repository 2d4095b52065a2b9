"""From batches on the host to global arrays on the devices, a few ahead."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Self

import jax
from jax.sharding import NamedSharding

from systolic.job.data import Batches


class Placed:
    """Batches laid out as a step wants them; transfers start before they are needed.

    Args:
        batches: This host's batches.
        shardings: Where each array of a global batch lives.
        ahead: Batches whose transfer has started before they are asked for.
    """

    def __init__(self, batches: Batches, shardings: Mapping[str, NamedSharding], ahead: int = 2) -> None:
        self._batches, self._shardings, self._ahead = batches, shardings, ahead
        self._queue: deque[tuple[dict[str, jax.Array], bytes]] = deque()
        self._state = batches.get_state()
        self._ended = False

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        return self

    def __next__(self) -> dict[str, jax.Array]:
        """Name to global jax.Array [batch, ...]."""
        while len(self._queue) <= self._ahead and not self._ended:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
                break
            placed = {name: jax.make_array_from_process_local_data(self._shardings[name], array) for name, array in batch.items()}
            self._queue.append((placed, self._batches.get_state()))
        if not self._queue:
            raise StopIteration
        batch, self._state = self._queue.popleft()
        return batch

    def get_state(self) -> bytes:
        """The position after the last batch that was handed out, not the last one read ahead."""
        return self._state

    def set_state(self, state: bytes) -> None:
        """Goes to a position saved by :meth:`get_state`."""
        self._batches.set_state(state)
        self._queue.clear()
        self._state, self._ended = state, False

    def close(self) -> None:
        """Ends the host's readers."""
        self._queue.clear()
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
