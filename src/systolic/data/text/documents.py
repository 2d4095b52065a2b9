"""Text for a language model from files: plain text, JSONL, Parquet, ArrayRecord, datasets folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import DataError
from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, SHARE, check
from systolic.data.text.text_data import FILL, ROW, Packing, TextData, row_fields
from systolic.data.text.tokenizer import Tokenizer
from systolic.job import Layout
from systolic.job.data import Batches, Contents, Field, Read, Split

if TYPE_CHECKING:
    import numpy as np

    from systolic.data.text.corpus import Corpus

PIECE_BYTES = 1 << 16
"""Plain text files longer than this are read as several documents, cut at line ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents(TextData):
    """Rows of packed documents, streamed: the text is never in memory as a whole.

    ``path`` is a text file, a folder of them, JSONL, Parquet or ArrayRecord files (or a folder of
    one of these), a folder of ``datasets.save_to_disk``, or what ``systolic data pack`` wrote. The
    latter is read at random places, resumes at once and is the same for every number of hosts;
    the others are shuffled by document (Parquet within four row groups at a time), packed a window
    at a time, and the rows of ``shuffle_windows`` windows are mixed.
    """

    path: Path
    tokenizer: Path | None = None
    """A ``tokenizer.json`` or its folder; None is that of packed data, or bytes."""
    sequence: Annotated[int, ROW] = 1024
    """Tokens per row."""
    field: str = "text"
    """The JSONL field or the column that holds the text."""
    validation: Path | None = None
    """Validation text, like ``path``; None takes a share of the documents."""
    validation_share: Annotated[float, SHARE] = 0.01
    """The share of documents that are for validation, chosen by a hash of file and number."""
    packing: Packing = Packing.fit
    """How documents are laid into rows (packed data is always cut)."""
    shuffle_windows: Annotated[int, COUNT] = 16
    """Windows, of about 256 rows each, whose rows are mixed in training (packed data mixes all)."""

    def __post_init__(self) -> None:
        as_paths(self, "path", "tokenizer", "validation")
        check(self)

    def fields(self) -> Mapping[str, Field]:
        """tokens, targets, segments, positions: int32[sequence]."""
        return row_fields(self.sequence)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer given, that of the packed data, or bytes.

        Raises:
            DataError: packed data was made with another tokenizer than the one given.
        """
        from systolic.data.text.packed import find_packed

        packed = find_packed(self.path)
        if packed is None:
            return Tokenizer(path=self.tokenizer)
        if self.tokenizer is not None:
            tokenizer = Tokenizer(path=self.tokenizer)
            if tokenizer.digest() != packed.tokenizer_digest:
                raise DataError(
                    f"{self.path} was packed with another tokenizer than {self.tokenizer}; leave the tokenizer out, or pack again"
                )
        return packed.tokenizer()

    def at(self, path: Path) -> "Documents":
        """See :class:`Data`; the tokenizer and the rows are the same."""
        return replace(self, path=path, validation=path)

    def with_tokenizer(self, path: Path) -> "Documents":
        """See :class:`TextData`."""
        return replace(self, tokenizer=path)

    def size(self, split: Split) -> int | None:
        """Rows of packed data; else 0 for a split without documents and None for one with some."""
        from systolic.data.text.packed import find_packed

        packed = find_packed(self._path(split))
        if packed is not None:
            places = packed.places(self._packed_split(split))
            return -(-places // self.sequence)
        return None if len(self.documents(split)[1]) else 0

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the training text, and of the validation text if it is separate."""
        from systolic.data.fingerprint import of_files
        from systolic.data.text.packed import find_packed

        path = self._path(split)
        own = path != self._path(Split.train) and split is Split.validation
        if split is not Split.train and not own:
            return None
        root = path if find_packed(path) is not None else self.documents(split)[0].root
        return of_files(root, self.files(split))

    def files(self, split: Split) -> Sequence[Path]:
        """See :class:`Data`."""
        from systolic.data.text.packed import find_packed

        packed = find_packed(self._path(split))
        return self.documents(split)[0].files if packed is None else packed.files()

    def lasting(self) -> frozenset[str]:
        """Parameters that decide how documents are chosen and laid into rows."""
        return frozenset(("sequence", "field", "packing", "shuffle_windows", "validation_share"))

    def epochs(self, position: bytes) -> float | None:
        """Epochs of a position, by windows of documents and rows; ``None`` for packed data, whose size is known."""
        saved = json.loads(position)
        if "window" not in saved:
            return None
        from systolic.data.text.windows import epochs

        return epochs(saved)

    def earliest(self, positions: Sequence[bytes]) -> bytes:
        """The first window that some reader has not finished."""
        from systolic.data.text.windows import earliest

        return earliest(positions)

    def documents(self, split: Split) -> "tuple[Corpus, np.ndarray]":
        """All documents, and the numbers (int64[n], ascending) of those that are in a split.

        Raises:
            NotFoundError: no such path.
            DataError: nothing readable there.
        """
        import numpy as np

        from systolic.data.text.corpus import changed_ns, find_corpus

        path = self._path(split)
        corpus = find_corpus(path, self.field, PIECE_BYTES, changed_ns(path))
        if split is Split.test:
            return corpus, np.zeros(0, np.int64)
        if self._given(split):
            return corpus, np.arange(len(corpus), dtype=np.int64)
        chosen = np.zeros(len(corpus), bool)
        if self.validation_share and len(corpus) > 1:
            keys = corpus.keys()
            chosen = keys < np.uint64(self.validation_share * 2.0**64)
            # A small corpus gives at least one document and keeps at least one.
            chosen[np.argmin(keys)], chosen[np.argmax(keys)] = True, False
        return corpus, np.flatnonzero(chosen if split is Split.validation else ~chosen)

    def notes(self) -> tuple[str, ...]:
        """Warns of a validation split of one document or of what is trained on, and of sorted text that is read in groups."""
        from systolic.data.text.packed import find_packed

        if find_packed(self.path) is not None:
            return ()
        notes = []
        corpus, kept = self.documents(Split.train)
        if len(self.documents(Split.validation)[1]) == 1 and len(kept) > 1:
            where = self.validation or self.path
            notes.append(
                f"the validation split of {where} is 1 document, whose loss says little about other text; give validation text of its own, or more documents"
            )
        if self.validation is not None:
            trained = {file.resolve() for file in self.files(Split.train)}
            held_out = [file.resolve() for file in self.files(Split.validation)]
            if both := [file for file in held_out if file in trained]:
                notes.append(
                    f"{len(both):,} of {len(held_out):,} files of --validation are in --data too, first {both[0]}, so their loss says nothing of text that was not trained on; give others, or leave --validation out for a share of --data"
                )
        if corpus.order():
            notes.append(
                f"{self.path} is sorted by its column {corpus.order()!r} and read a few row groups at a time, so the training data changes with them; shuffle the rows, or pack them first with systolic data pack"
            )
        return tuple(notes)

    def open(self, read: Read) -> Batches:
        """Rows of a split.

        Raises:
            NotFoundError: no such path, or no such tokenizer.
            DataError: no document, no such field, a damaged file, or a wrong tokenizer file.
        """
        from systolic.data.random_access import check_read, open_table
        from systolic.data.text.packed import find_packed
        from systolic.data.text.rows import RecordRows
        from systolic.data.text.windows import WindowBatches, Windows

        check_read(read)
        tokenizer = self.get_tokenizer()
        packed = find_packed(self._path(read.split))
        if packed is not None:
            if packed.tokenizer_digest != tokenizer.digest():
                raise DataError(
                    f"{self._path(read.split)} was packed with another tokenizer than the training text; pack it again"
                )
            records = packed.records(self._packed_split(read.split))
            return open_table(RecordRows(records, self.sequence), read, self.fields(), FILL)
        corpus, kept = self.documents(read.split)
        if not len(kept):
            raise DataError(_nothing(self, read.split, len(corpus)))
        # A wrong tokenizer is reported here, not by the thread that first uses it.
        tokenizer.digest()
        windows = Windows(
            corpus=corpus,
            kept=kept,
            tokenizer=tokenizer,
            sequence=self.sequence,
            packing=self.packing,
            seed=read.seed,
            shuffle=read.shuffle,
            mixed=self.shuffle_windows,
        )
        return WindowBatches(windows=windows, read=read, fields=self.fields())

    def shrink(self, layout: Layout) -> "Documents":
        """Rows of 64 tokens a context shard."""
        return replace(self, sequence=min(self.sequence, 64 * layout.context))

    def _path(self, split: Split) -> Path:
        """The file or folder that a split is read from."""
        if split is Split.validation and self.validation is not None:
            return self.validation
        return _split_folder(self.path, split) or _split_folder(self.path, Split.train) or self.path

    def _given(self, split: Split) -> bool:
        """Whether all documents at the split's path belong to it."""
        return (
            self.validation is not None
            or _split_folder(self.path, Split.validation) is not None
            or (split is Split.train and not self.validation_share)
        )

    def _packed_split(self, split: Split) -> Split:
        """The split to read of packed data: text given for validation is packed as training text."""
        from systolic.data.text.packed import find_packed

        packed = find_packed(self._path(split))
        if split is Split.validation and self.validation is not None and packed is not None:
            return split if packed.places(split) else Split.train
        return split


@lru_cache(maxsize=16)
def _split_folder(path: Path, split: Split) -> Path | None:
    """The folder of a split in what ``datasets.DatasetDict.save_to_disk`` wrote."""
    if not (path / "dataset_dict.json").is_file():
        return None
    folder = path / split.value
    return folder if folder.is_dir() else None


def _nothing(data: Documents, split: Split, count: int) -> str:
    where = data.validation if split is Split.validation and data.validation else data.path
    if split is Split.test:
        return f"{where}: documents have a train and a validation split, no test split"
    if split is Split.validation and count:
        return f"{where} has {count:,} document{'s'[: count != 1]} and a validation share of {data.validation_share:g}, so none is for validation; give validation text of its own"
    return f"{where} has no documents; give some text"
