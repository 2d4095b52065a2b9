"""Documents laid out in rows of a fixed length, so that they do not see each other.

A document of ``m`` tokens is ``m - 1`` places: the token at a place is the input, the one after it
the target. A cut between rows repeats one token as the next row's first input, so each target is
predicted exactly once.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from systolic.data.random_access import Picks, Table


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
