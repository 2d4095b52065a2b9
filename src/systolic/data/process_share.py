"""The rows of a global batch that a process reads, as equal blocks, each with a reader of its own.

A global batch of ``rows`` is ``count`` equal contiguous blocks. Block ``b`` is what
``Read(batch=rows // count, shard=b, shards=count)`` gives, whichever process reads it, so processes
whose devices hold the same rows read the same data.
"""

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Self

import numpy as np

from systolic.core.errors import DataError
from systolic.job.data import Batches, Data

_SEVERAL = b"blocks "
"""Prefix of a position of several blocks; the position of a whole batch is its reader's own."""


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


def _whole(parts: Set[int], each: int) -> bool:
    """Whether ``parts`` are whole blocks of ``each`` parts."""
    return len(parts) == each * len({part // each for part in parts})


class Blocks:
    """The blocks of a process's share, read in step.

    Args:
        data: Source of the batches.
        share: The blocks to read.
        open_block: Opens the batches of one block, each with the rows of a block.
    """

    def __init__(
        self, data: Data, share: ProcessShare, open_block: Callable[[int], Batches]
    ) -> None:
        self._data, self.share = data, share
        self._readers = {block: open_block(block) for block in share.blocks}

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

        Args:
            states: Results of :meth:`get_state` in each process, in their order.

        Raises:
            DataError: it belongs to other data, or this data resumes only with the blocks it was
                saved with.
        """
        count, saved = _saved(states)
        if count != self.share.count:
            distinct = sorted(set(saved.values()))
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
    found: dict[int, bytes] = {}
    count = 0
    for state in several:
        plain = json.loads(state.removeprefix(_SEVERAL))
        count = plain["count"]
        for block, coded in plain["states"].items():
            found[int(block)] = base64.b64decode(coded)
    return count, found
