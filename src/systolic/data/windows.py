"""Streams of packed rows: documents are read and packed a window at a time.

A window is a fixed number of documents, packed on its own. So the position of a stream is the
number of the window and the row in it, and going there costs packing one window again; no packing
buffer is saved.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from systolic.core.errors import DataError
from systolic.data.corpus import Corpus
from systolic.data.packing import Packing
from systolic.data.rows import cut, fit, lay
from systolic.data.shuffle import order
from systolic.data.table import check_read, prefetched
from systolic.data.text import FILL
from systolic.data.tokenizer import Tokenizer
from systolic.job.data import MASK, Field, Read

_ROWS = 256
"""Rows that a window should make: enough for good packing, few enough to be packed in a moment."""

_BYTES_PER_TOKEN = 4
"""Typical of trained vocabularies on English (bytes are 1); only sizes windows."""

_FOREVER = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Window ``n`` of the endless stream: rows int32[rows, sequence] of each field."""

    corpus: Corpus
    kept: np.ndarray
    """int64[documents]: the documents of this split, ascending."""
    tokenizer: Tokenizer
    sequence: int
    packing: Packing
    seed: int
    shuffle: bool

    @property
    def documents(self) -> int:
        """Documents in a window; from the data and the sequence only, so that it never changes."""
        per_token = 1 if self.tokenizer.path is None else _BYTES_PER_TOKEN
        average = max(self.corpus.bytes / max(len(self.corpus), 1), 1)
        wanted = _ROWS * self.sequence * per_token / average
        return int(min(max(round(wanted), 1), len(self.kept), 1 << 16))

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        return -(-len(self.kept) // self.documents)

    def make(self, number: int) -> dict[str, np.ndarray]:
        """Window ``number``: tokens, targets, segments, positions int32[rows, sequence]."""
        epoch, inner = divmod(number, self.per_epoch)
        first = inner * self.documents
        last = min(first + self.documents, len(self.kept))
        texts = self.corpus.read(self._numbers(epoch, np.arange(first, last, dtype=np.int64)))
        documents = self.tokenizer.documents([text for text in texts if text])
        pack = fit if self.packing is Packing.fit else cut
        rows = lay(pack(documents, self.sequence), self.sequence)
        if self.shuffle:
            height = len(rows["tokens"])
            turn = np.random.default_rng([self.seed & 0xFFFFFFFFFFFFFFFF, number])
            shuffled = turn.permutation(height)
            rows = {name: array[shuffled] for name, array in rows.items()}
        return rows

    def _numbers(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Which documents stand at these places of an epoch."""
        groups = self.corpus.groups()
        if groups is None or not self.shuffle:
            size = len(self.kept)
            return self.kept[order(epoch * size + places, size, self.seed, self.shuffle)]
        # Documents that are only cheap together stay together: their groups are shuffled.
        bounds = np.searchsorted(self.kept, groups)
        count = len(bounds) - 1
        turned = order(epoch * count + np.arange(count), count, self.seed, True)
        starts = np.concatenate([[0], np.cumsum(np.diff(bounds)[turned])])
        at = np.searchsorted(starts, places, side="right") - 1
        return self.kept[bounds[turned[at]] + places - starts[at]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _From:
    """The windows that one host reads, from one on: what Grain indexes."""

    windows: Windows
    first: int
    step: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self.windows.make(self.first + number * self.step)


@dataclass(kw_only=True, slots=True)
class WindowBatches:
    """Batches of rows out of windows.

    An endless stream gives each host windows of its own; with ``epochs`` every host packs all
    windows and takes its rows of each global batch, so that all hosts get equally many batches.
    """

    windows: Windows
    read: Read
    fields: Mapping[str, Field]
    window: int = field(default=-1, init=False)
    """The window that the next row comes from, of the endless stream of epochs."""
    row: int = field(default=0, init=False)
    """The next row in it."""
    rows: dict[str, np.ndarray] | None = field(default=None, init=False)
    reader: Any = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_read(self.read)
        self.window = 0 if self._shared else self.read.shard

    @property
    def _shared(self) -> bool:
        return self.read.epochs is not None

    @property
    def _step(self) -> int:
        return 1 if self._shared else self.read.shards

    @property
    def _end(self) -> int | None:
        return None if self.read.epochs is None else self.read.epochs * self.windows.per_epoch

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.closed:
            raise ValueError("these batches are closed")
        read = self.read
        wanted = read.batch * (read.shards if self._shared else 1)
        parts, have = [], 0
        while have < wanted and self._fill():
            assert self.rows is not None
            stop = min(self.row + wanted - have, len(self.rows["tokens"]))
            parts.append({name: array[self.row : stop] for name, array in self.rows.items()})
            have += stop - self.row
            self.row = stop
        if not parts:
            raise StopIteration
        self._settle()
        rows = {name: np.concatenate([part[name] for part in parts]) for name in self.fields}
        if self._shared:
            mine = slice(read.shard * read.batch, (read.shard + 1) * read.batch)
            rows = {name: array[mine] for name, array in rows.items()}
        return self._padded(rows)

    def get_state(self) -> bytes:
        """Window and row of the next row, and what would make them meaningless."""
        saved = {"window": self.window, "row": self.row, "shards": self.read.shards}
        return json.dumps({**saved, **self._identity()}, sort_keys=True).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to a saved position.

        Saved by another number of hosts, an endless stream goes on from the window of the position,
        which is the first that any of them had not finished: a few documents may come twice, none is
        left out.

        Raises:
            DataError: it belongs to other data, another tokenizer, packing, sequence or shuffle.
        """
        saved = json.loads(state)
        for name, value in self._identity().items():
            if saved.get(name) != value:
                raise DataError(
                    f"the saved position is for {name} {saved.get(name)}, this data has {name} {value}; restore what it was, or start a new run"
                )
        self._stop()
        window, row = int(saved["window"]), int(saved["row"])
        if not self._shared and saved["shards"] != self.read.shards:
            window, row = window + self.read.shard, 0 if self.read.shard else row
        self.window, self.row, self.rows = window, row, None

    def close(self) -> None:
        """Ends worker processes and threads."""
        self._stop()
        self.closed = True

    def _fill(self) -> bool:
        """Makes ``rows`` hold the next row; False at the end of the stream."""
        empty = 0
        while self.rows is None or self.row >= len(self.rows["tokens"]):
            if self.rows is not None:
                empty = 0 if len(self.rows["tokens"]) else empty + 1
                self.rows, self.row, self.window = None, 0, self.window + self._step
            if empty > self.windows.per_epoch:
                raise DataError(
                    f"all documents of the {self.read.split.value} split are empty; give some text"
                )
            if self._end is not None and self.window >= self._end:
                return False
            if self.reader is None:
                self._start()
            self.rows = next(self.reader)
        return True

    def _settle(self) -> None:
        """After the last row of a window, names the next one: equal positions have equal bytes."""
        if self.rows is not None and self.row >= len(self.rows["tokens"]):
            self.rows, self.row, self.window = None, 0, self.window + self._step

    def _start(self) -> None:
        count = _FOREVER if self._end is None else self._end - self.window
        source = _From(windows=self.windows, first=self.window, step=self._step, count=count)
        # One thread: tokenizers spread a window over the cores themselves.
        self.reader = prefetched(source, self.read.workers, 1, max(2, 2 * self.read.workers))

    def _stop(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def _padded(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        have, batch = len(rows["tokens"]), self.read.batch
        mask = np.zeros(batch, np.float32)
        mask[:have] = 1
        if have < batch:
            rows = {
                name: np.concatenate(
                    [array, np.full((batch - have, *array.shape[1:]), FILL.get(name, 0), np.int32)]
                )
                for name, array in rows.items()
            }
        return {**rows, MASK: mask}

    def _identity(self) -> dict[str, Any]:
        windows = self.windows
        return {
            "documents": len(windows.kept),
            "documents per window": windows.documents,
            "sequence": windows.sequence,
            "packing": windows.packing.value,
            "tokenizer": windows.tokenizer.digest(),
            "seed": self.read.seed,
            "shuffle": self.read.shuffle,
        }


def earliest(positions: Sequence[bytes]) -> bytes:
    """Of the positions of all readers of an endless stream, the one before which every row has been read.

    Reader ``s`` of ``n`` takes every ``n``-th window in ascending order, so the windows below the
    smallest are finished, whichever reader they belonged to.
    """

    def place(position: bytes) -> tuple[int, int]:
        saved = json.loads(position)
        return saved["window"], saved["row"]

    return min(positions, key=place)
