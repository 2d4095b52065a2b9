"""Documents laid out in rows of a fixed length, so that they do not see each other, and streams of them, packed a window at a time."""

import json
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from systolic.core.errors import DataError
from systolic.data.random_access import Picks, Table, check_read, keys, order, permute, prefetched
from systolic.data.text.corpus import Corpus
from systolic.data.text.text_data import FILL, Packing
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import MASK, Field, Read

_ROWS = 256
"""Rows of a window: enough for good packing, few enough to pack quickly."""
_BYTES_PER_TOKEN = 4
"""Typical of trained vocabularies on English (bytes are 1); only sizes windows."""
GROUPS = 4
"""Groups of documents (row groups of Parquet) whose documents are shuffled together."""
_FOREVER = 1 << 60


class Piece(NamedTuple):
    """Part of a document in one row."""

    tokens: np.ndarray
    """int[places + 1]."""
    row: int


def cut(documents: Sequence[np.ndarray], sequence: int) -> list[Piece]:
    """Fills row after row; a document that does not fit continues in the next row. Padding only at the end."""
    pieces, row, free = [], 0, sequence
    for tokens in documents:
        start = 0
        while start < len(tokens) - 1:
            places = min(free, len(tokens) - 1 - start)
            pieces.append(Piece(tokens[start : start + places + 1], row))
            start += places
            free -= places
            if not free:
                row, free = row + 1, sequence
    return pieces


def fit(documents: Sequence[np.ndarray], sequence: int) -> list[Piece]:
    """Cuts only documents longer than a row; each part goes into the fullest row that has room.

    Best-fit decreasing bin packing, as in Ding et al., "Fewer Truncations Improve Language
    Modeling", 2024. Rows come in the order of the documents that opened them.
    """
    parts = [
        tokens[start : start + sequence + 1]
        for tokens in documents
        for start in range(0, len(tokens) - 1, sequence)
    ]
    rows: list[int] = []
    room: list[tuple[int, int]] = []
    row_of = [0] * len(parts)
    # The longest first; among equals the order of the documents, so that the result is definite.
    for number in sorted(range(len(parts)), key=lambda n: -len(parts[n])):
        places = len(parts[number]) - 1
        at = bisect_left(room, (places, -1))
        free, row = room.pop(at) if at < len(room) else (sequence, len(rows))
        if row == len(rows):
            rows.append(number)
        row_of[number] = row
        if free > places:
            insort(room, (free - places, row))
    rank = np.empty(len(rows), np.int64)
    rank[np.argsort(rows, kind="stable")] = np.arange(len(rows))
    return [Piece(part, int(rank[row])) for part, row in zip(parts, row_of, strict=True)]


def lay(pieces: Sequence[Piece], sequence: int) -> dict[str, np.ndarray]:
    """Lays pieces into their rows: tokens, targets, segments and positions, int32[rows, sequence].

    Padding has segment 0 and target -1. Within a row, pieces keep their order.
    """
    pieces = sorted(pieces, key=lambda piece: piece.row)
    height = pieces[-1].row + 1 if pieces else 0
    places = np.array([len(piece.tokens) - 1 for piece in pieces], np.int64)
    row = np.array([piece.row for piece in pieces], np.int64)
    before = np.concatenate([[0], np.cumsum(places)])
    first_of_row = np.searchsorted(row, row)
    column = before[:-1] - before[first_of_row] if pieces else before[:-1]
    inner = np.arange(before[-1]) - np.repeat(before[:-1], places)
    flat = np.repeat(row * sequence + column, places) + inner
    out = {
        "tokens": np.zeros(height * sequence, np.int32),
        "targets": np.full(height * sequence, -1, np.int32),
        "segments": np.zeros(height * sequence, np.int32),
        "positions": np.zeros(height * sequence, np.int32),
    }
    if pieces:
        out["tokens"][flat] = np.concatenate([piece.tokens[:-1] for piece in pieces])
        out["targets"][flat] = np.concatenate([piece.tokens[1:] for piece in pieces])
        out["segments"][flat] = np.repeat(np.arange(len(pieces)) - first_of_row + 1, places)
        out["positions"][flat] = inner
    return {name: array.reshape(height, sequence) for name, array in out.items()}


class TokenRecords(ABC):
    """Token sequences one after another, each one or more places long, readable by number."""

    def __init__(self, places: np.ndarray, begins: np.ndarray) -> None:
        self.starts = np.concatenate([[0], np.cumsum(places, dtype=np.int64)])
        """int64[records + 1]: the place at which each record starts."""
        self.begins = begins
        """bool[records]: whether a record begins a document, rather than continuing one."""

    @abstractmethod
    def read(self, spans: Sequence[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets of records ``first`` up to ``last`` (excluded), for each span."""


class RecordRows(Table):
    """Rows of all records, concatenated: row ``r`` is read from its place."""

    def __init__(self, records: TokenRecords, sequence: int) -> None:
        self._records = records
        self._sequence = sequence

    def __len__(self) -> int:
        return -(-int(self._records.starts[-1]) // self._sequence)

    def take(self, picks: Picks) -> dict[str, np.ndarray]:
        """The picked rows: tokens, targets, segments, positions int32[n, sequence]."""
        starts, length = self._records.starts, self._sequence
        low = picks.indices * length
        high = np.minimum(low + length, starts[-1])
        first = np.searchsorted(starts, low, side="right") - 1
        last = np.searchsorted(starts, high, side="left")
        spans = [(int(a), int(b)) for a, b in zip(first, last, strict=True)]
        shape = (len(low), length)
        out = {
            "tokens": np.zeros(shape, np.int32),
            "targets": np.full(shape, -1, np.int32),
            "segments": np.zeros(shape, np.int32),
        }
        opens = np.zeros(shape, bool)
        opens[:, 0] = True
        for row, (inputs, targets) in enumerate(self._records.read(spans)):
            a, b = spans[row]
            width, skip = high[row] - low[row], low[row] - starts[a]
            out["tokens"][row, :width] = inputs[skip : skip + width]
            out["targets"][row, :width] = targets[skip : skip + width]
            inside = starts[a + 1 : b][self._records.begins[a + 1 : b]] - low[row]
            opens[row, inside] = True
            out["segments"][row, :width] = 1
        columns = np.arange(length, dtype=np.int32)
        started = np.maximum.accumulate(np.where(opens, columns, 0), axis=1)
        padding = out["segments"] == 0
        out["segments"] = np.where(padding, 0, np.cumsum(opens, axis=1)).astype(np.int32)
        out["positions"] = np.where(padding, 0, columns - started).astype(np.int32)
        return out


class HeldRecords(TokenRecords):
    """Records in memory, as flat inputs and targets."""

    def __init__(
        self, inputs: np.ndarray, targets: np.ndarray, places: np.ndarray, begins: np.ndarray
    ) -> None:
        super().__init__(places, begins)
        self._inputs, self._targets = inputs, targets

    def read(self, spans: Sequence[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of the flat arrays."""
        edges = [(self.starts[a], self.starts[b]) for a, b in spans]
        return [(self._inputs[low:high], self._targets[low:high]) for low, high in edges]


def padding_share(batch: Mapping[str, np.ndarray]) -> float:
    """Share of padding in a batch."""
    return float(np.mean(batch["segments"] == 0))


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
    mixed: int = 1
    """Most windows whose rows are mixed, if rows are shuffled."""

    @property
    def documents(self) -> int:
        """Documents in a window, from the data and the sequence alone, so it never changes."""
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
        """Documents at these places of an epoch."""
        groups = self.corpus.groups()
        if groups is None or not self.shuffle:
            size = len(self.kept)
            return self.kept[order(epoch * size + places, size, self.seed, self.shuffle)]
        # Documents that are only cheap together: few groups are read at a time, and shuffled as one.
        bounds = np.searchsorted(self.kept, groups)
        count = len(bounds) - 1
        turned = order(epoch * count + np.arange(count), count, self.seed, True)
        starts = np.concatenate([[0], np.cumsum(np.diff(bounds)[turned])])
        sets = np.unique(np.append(starts[::GROUPS], starts[-1]))
        places = _within(places, sets, epoch, self.seed)
        at = np.searchsorted(starts, places, side="right") - 1
        return self.kept[bounds[turned[at]] + places - starts[at]]


def _within(places: np.ndarray, bounds: np.ndarray, epoch: int, seed: int) -> np.ndarray:
    """Permutes places int64[n] between bounds."""
    sets = np.searchsorted(bounds, places, side="right") - 1
    sent = places.copy()
    for number in np.unique(sets):
        mine, (start, stop) = sets == number, bounds[number : number + 2]
        turn = keys(seed, np.array([epoch * len(bounds) + number]))
        sent[mine] = start + permute(places[mine] - start, int(stop - start), turn)
    return sent


@dataclass(frozen=True, kw_only=True, slots=True)
class _From:
    """Windows that one host reads, as the source that Grain indexes."""

    windows: Windows
    first: int
    step: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return self.windows.make(self.first + number * self.step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Spread of the windows of an epoch, as one host reads them, over rounds.

    Share ``j`` of window ``i`` is in round ``i + j - mixed + 1``, or the first or the last one.
    """

    windows: int
    mixed: int

    @classmethod
    def of(cls, first: int, step: int, per_epoch: int, mixed: int) -> "Rounds":
        """Rounds of every ``step``-th window from ``first`` to the end of its epoch."""
        left = per_epoch - first % per_epoch
        windows = -(-left // step)
        return cls(windows=windows, mixed=min(mixed, windows))

    @property
    def count(self) -> int:
        """Rounds."""
        return self.windows - self.mixed + 1

    def span(self, at: int, window: int, rows: int) -> slice:
        """Rows of a window, of ``rows``, that are in round ``at``."""
        share = at + self.mixed - 1 - window
        start = 0 if at == 0 else share
        stop = self.mixed if at == self.count - 1 else share + 1
        return slice(rows * start // self.mixed, rows * stop // self.mixed)

    def before(self, at: int) -> float:
        """Windows' worth of rows in the rounds before ``at``."""
        if at == 0:
            return 0.0
        if at >= self.count:
            return float(self.windows)
        # All of the windows before it, and of the others the shares that earlier rounds took.
        return at + (self.mixed - 1) / 2


@dataclass(kw_only=True, slots=True)
class WindowBatches:
    """Batches of rows out of windows.

    A window is a fixed number of documents, packed on its own. The rows of each are spread evenly over as
    many *rounds* as windows are mixed: round ``t`` of an epoch holds a share of each of the windows ``t`` to
    ``t + mixed - 1``, shuffled. So the text changes a little with every round and never all at once, memory
    holds the mixed windows only, and every row comes once an epoch: the first round of an epoch also holds
    what would have come before it, the last one what would come after it.

    The position of a stream is the oldest window of the round and the row in the round; going there costs
    packing the mixed windows again, and no packing buffer is saved.

    An endless stream gives each host windows of its own; with ``epochs`` every host packs all
    windows and takes its rows of each global batch, so that all hosts get equally many batches.
    """

    windows: Windows
    read: Read
    fields: Mapping[str, Field]
    first: int = field(default=-1, init=False)
    """First window of this host in the epoch."""
    window: int = field(default=-1, init=False)
    """The oldest window of the round of the next row: all before it are finished."""
    row: int = field(default=0, init=False)
    """The next row in the round."""
    height: int = field(default=0, init=False)
    """Rows in the round where the row is not its first, else 0."""
    rows: dict[str, np.ndarray] | None = field(default=None, init=False)
    """The round."""
    held: dict[int, dict[str, np.ndarray]] = field(default_factory=dict, init=False)
    """The windows of the round by number."""
    reader: Any = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_read(self.read)
        self.first = self.window = 0 if self._shared else self.read.shard

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
        self._skip_empty_round()
        self.height = len(self.rows["tokens"]) if self.rows is not None and self.row else 0
        rows = {name: np.concatenate([part[name] for part in parts]) for name in self.fields}
        if self._shared:
            mine = slice(read.shard * read.batch, (read.shard + 1) * read.batch)
            rows = {name: array[mine] for name, array in rows.items()}
        return self._padded(rows)

    def get_state(self) -> bytes:
        """Position of the next row, with the parameters it is valid for."""
        place = {"first": self.first, "window": self.window, "row": self.row, "rows": self.height}
        saved = {**place, "shards": self.read.shards}
        return json.dumps({**saved, **self._identity()}, sort_keys=True).encode()

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Saved by another number of readers, an endless stream continues from the window of the position,
        which is the first that any of them had not finished: a few documents may come twice, none is
        left out.

        Raises:
            DataError: it belongs to other data, another tokenizer, packing, sequence or shuffle.
        """
        saved = json.loads(state)
        for name, value in self._identity().items():
            if saved.get(name) != value:
                raise DataError(
                    f"the checkpoint was saved with {_phrase(name, saved.get(name))}, the data now has {_phrase(name, value)}; use the data and options the run began with, or start a new run"
                )
        self._stop()
        self.first, self.window = int(saved["first"]), int(saved["window"])
        self.row, self.height = int(saved["row"]), int(saved["rows"])
        if not self._shared and saved["shards"] != self.read.shards:
            self.window += self.read.shard
            self.first, self.row, self.height = self.window, 0, 0

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
                self._advance()
            if empty > self.windows.per_epoch:
                raise DataError(
                    f"all documents of the {self.read.split.value} split are empty; give some text"
                )
            if self._end is not None and self.window >= self._end:
                return False
            self.rows = self._round()
        return True

    def _skip_empty_round(self) -> None:
        """After the last row of a round, names the next one: equal positions have equal bytes."""
        if self.rows is not None and self.row >= len(self.rows["tokens"]):
            self._advance()

    @property
    def _rounds(self) -> Rounds:
        return Rounds.of(self.first, self._step, self.windows.per_epoch, self._mixed)

    @property
    def _mixed(self) -> int:
        return self.windows.mixed if self.windows.shuffle else 1

    def _advance(self) -> None:
        """Moves to the next round."""
        rounds = self._rounds
        self.window += self._step
        if (self.window - self.first) // self._step >= rounds.count:
            self.first = self.window = self.first + rounds.windows * self._step
        self.rows, self.row = None, 0

    def _round(self) -> dict[str, np.ndarray]:
        """The rows of the round, out of its windows."""
        rounds, at = self._rounds, (self.window - self.first) // self._step
        parts = []
        for index in range(at, at + rounds.mixed):
            number = self.first + index * self._step
            if number not in self.held:
                if self.reader is None:
                    self._start(number)
                self.held[number] = next(self.reader)
            window = self.held[number]
            span = rounds.span(at, index, len(window["tokens"]))
            parts.append({name: array[span] for name, array in window.items()})
        self.held = {number: w for number, w in self.held.items() if number > self.window}
        if len(parts) == 1:
            return parts[0]
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        seed = [self.windows.seed & 0xFFFFFFFFFFFFFFFF, self.window, self.first]
        turn = np.random.default_rng(seed).permutation(len(rows["tokens"]))
        return {name: array[turn] for name, array in rows.items()}

    def _start(self, window: int) -> None:
        count = _FOREVER if self._end is None else self._end - window
        source = _From(windows=self.windows, first=window, step=self._step, count=count)
        # One thread: tokenizers spread a window over the cores themselves.
        self.reader = prefetched(source, self.read.workers, 1, max(2, 2 * self.read.workers))

    def _stop(self) -> None:
        self.rows, self.held = None, {}
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
            "mixed windows": self._mixed,
        }


def _phrase(name: str, value: Any) -> str:
    """Describes one part of a position's identity, to follow "with" or "has"."""
    words = {
        "documents": f"{value} documents",
        "documents per window": f"windows of {value} documents",
        "sequence": f"rows of {value} tokens",
        "packing": f"rows packed by {value}",
        "tokenizer": f"tokens of the tokenizer {value}",
        "seed": f"rows in the order of seed {value}",
        "shuffle": "rows in shuffled order" if value else "rows in the order of the files",
        "mixed windows": f"{value} windows mixed",
    }
    return words[name]


def earliest(positions: Sequence[bytes]) -> bytes:
    """The earliest position of all readers of an endless stream: every row before it has been read.

    Reader ``s`` of ``n`` takes every ``n``-th window in ascending order, so the windows below the
    smallest are finished, whichever reader they belonged to.
    """

    def place(position: bytes) -> tuple[int, int]:
        saved = json.loads(position)
        return saved["window"], saved["row"]

    return min(positions, key=place)


def epochs(position: Mapping[str, Any]) -> float:
    """Epochs at a position (:meth:`WindowBatches.get_state`, decoded)."""
    per_epoch = -(-position["documents"] // position["documents per window"])
    first, step = position["first"], position["shards"]
    rounds = Rounds.of(first, step, per_epoch, position["mixed windows"])
    at = (position["window"] - first) // step
    done = rounds.before(at)
    if position["rows"]:
        done += (rounds.before(at + 1) - done) * position["row"] / position["rows"]
    epoch, begun = divmod(first, per_epoch)
    # A host begins an epoch at one of the first windows, or later where another number of hosts went before.
    begun = begun // step * step / per_epoch
    return epoch + begun + (1 - begun) * done / rounds.windows
