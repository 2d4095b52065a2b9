"""Text for a language model: files of it, the Python standard library, real text that every machine has, or none beside a tokenizer."""

import gzip
import hashlib
import json
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import as_paths
from systolic.core.ranges import COUNT, SHARE, check
from systolic.data.text.text_data import FILL, ROW, Packing, TextData, row_fields
from systolic.data.text.tokenizer import Around, Tokenizer
from systolic.job import Layout
from systolic.job.data import Batches, Contents, Field, NoExamples, Read, Split

if TYPE_CHECKING:
    import numpy as np

    from systolic.data.text.corpus import Corpus
    from systolic.data.text.rows import HeldRecords


PIECE_BYTES = 1 << 16
"""Plain text files longer than this are read as several documents, cut at line ends."""
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test"})
"""Folders whose files are not the library's own code, or are tests."""


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
        from systolic.data.text.rows import epochs

        return epochs(saved)

    def earliest(self, positions: Sequence[bytes]) -> bytes:
        """The first window that some reader has not finished."""
        from systolic.data.text.rows import earliest

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
        from systolic.data.text.rows import RecordRows, WindowBatches, Windows

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


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardLibrary(TextData):
    """Rows of bytes of the standard library's own .py files, document token 256 before each file.

    A file is a validation document when the SHA-256 of its relative path is a multiple of 10, a
    training document otherwise. Files follow each other in the order of their paths and are cut
    into rows; each byte is predicted exactly once, and no file sees another.
    """

    sequence: Annotated[int, ROW] = 512
    """Bytes per row."""
    root: Path | None = None
    """Another folder of .py files; None is the standard library of the running Python."""

    def __post_init__(self) -> None:
        as_paths(self, "root")
        check(self)

    def get_tokenizer(self) -> "Tokenizer":
        """Bytes and the document token: 257 ids."""
        from systolic.data.text.tokenizer import Tokenizer

        return Tokenizer()

    def fields(self) -> Mapping[str, Field]:
        """tokens, targets, segments, positions: int32[sequence]."""
        return row_fields(self.sequence)

    def files(self, split: Split) -> tuple[Path, ...]:
        """The files of a split, by relative path.

        Raises:
            NotFoundError: the folder does not exist.
        """
        return _files(self._folder(), split)

    def contents(self, split: Split) -> Contents | None:
        """Fingerprint of the split's files."""
        from systolic.data.fingerprint import of_files

        return of_files(self._folder(), self.files(split))

    def lasting(self) -> frozenset[str]:
        """The length of rows."""
        return frozenset(("sequence",))

    def size(self, split: Split) -> int | None:
        """Rows in a split, from the sizes of the files alone."""
        total = sum(file.stat().st_size for file in self.files(split))
        return -(-total // self.sequence)

    def open(self, read: Read) -> Batches:
        """Rows of a split.

        Raises:
            DataError: the split has no bytes.
        """
        from systolic.data.random_access import open_table
        from systolic.data.text.rows import RecordRows

        files = self.files(read.split)
        if not any(file.stat().st_size for file in files):
            raise DataError(
                f"{self._folder()} has no .py file for the {read.split.value} split; this data has train and validation, of folders with ten files or more"
            )
        rows = RecordRows(_held(self._folder(), read.split), self.sequence)
        return open_table(rows, read, self.fields(), FILL)

    def at(self, path: Path) -> TextData:
        """See :class:`Data`: any text, in bytes."""

        return Documents(path=path, validation=path, sequence=self.sequence)

    def baselines(self) -> Mapping[str, float]:
        """Bits per byte of gzip on the validation files: each on its own, and concatenated."""
        return {
            "gzip_bits_per_byte": self.gzip_bits_per_byte(),
            "gzip_joined_bits_per_byte": self.gzip_bits_per_byte_joined(),
        }

    def shrink(self, layout: Layout) -> "StandardLibrary":
        """Rows of 64 bytes a context shard."""
        return replace(self, sequence=min(self.sequence, 64 * layout.context))

    def gzip_bits_per_byte(self) -> float:
        """Bits per byte that ``gzip -9`` needs for the validation files, each on its own."""
        return _gzip_bits(tuple(file.read_bytes() for file in self._validation()))

    def gzip_bits_per_byte_joined(self) -> float:
        """Bits per byte of all validation files compressed as one, the stricter figure."""
        return _gzip_bits((b"".join(file.read_bytes() for file in self._validation()),))

    def _validation(self) -> tuple[Path, ...]:
        files = self.files(Split.validation)
        if not any(file.stat().st_size for file in files):
            raise DataError(
                f"{self._folder()} has no validation file to compress; give a folder with ten .py files or more"
            )
        return files

    def _folder(self) -> Path:
        return self.root or Path(sysconfig.get_path("stdlib"))


@lru_cache(maxsize=2)
def _gzip_bits(contents: tuple[bytes, ...]) -> float:
    """Bits per byte, kept for the next run of this process."""
    packed = sum(len(gzip.compress(content, compresslevel=9, mtime=0)) for content in contents)
    return 8 * packed / sum(map(len, contents))


def _files(folder: Path, split: Split) -> tuple[Path, ...]:
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is not a folder; give one that holds .py files")
    sources = []
    for base, folders, files in os.walk(folder):
        # site-packages may hold many times the files of the library.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        sources += [os.path.join(base, name) for name in files if name.endswith(".py")]
    relative = sorted(Path(os.path.relpath(file, folder)).as_posix() for file in sources)
    kept = [name for name in relative if _split_of(name) is split]
    return tuple(file for name in kept if (file := folder / name).is_file())


def _split_of(name: str) -> Split:
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    return Split.validation if number % 10 == 0 else Split.train


@lru_cache(maxsize=4)
def _held(folder: Path, split: Split) -> "HeldRecords":
    import numpy as np

    from systolic.data.text.rows import HeldRecords
    from systolic.data.text.tokenizer import BYTES_START

    contents = [content for file in _files(folder, split) if (content := file.read_bytes())]
    places = np.array([len(content) for content in contents], np.int64)
    targets = np.frombuffer(b"".join(contents), np.uint8)
    inputs = np.empty(len(targets), np.uint16)
    inputs[1:] = targets[:-1]
    inputs[np.cumsum(places) - places] = BYTES_START
    return HeldRecords(inputs, targets, places, np.ones(len(places), bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts(NoExamples, TextData):
    """Prompts and texts from outside for a model whose training text is elsewhere; all splits are empty."""

    refusal: ClassVar[str] = "an imported model brings no {split} text; give the text with --path"

    tokenizer: Path | None = None
    """A ``tokenizer.json`` or its folder; None reads bytes."""
    sequence: Annotated[int, ROW] = 1024
    """Tokens per row of a text that is scored."""
    positions: Annotated[int, COUNT] = 1024
    """Tokens that the model was trained to see at once."""
    stops: tuple[int, ...] = ()
    """Ids that end a generated text, besides the tokenizer's end (generation_config.json: eos_token_id)."""

    def __post_init__(self) -> None:
        as_paths(self, "tokenizer")
        check(self)

    @property
    def context(self) -> int:
        """See :class:`TextData`."""
        return self.positions

    @property
    def ends(self) -> frozenset[int]:
        """See :class:`TextData`; also those that end a turn, which the model's files may not name."""
        from systolic.data.text.chat import turn_ends

        tokenizer = self.get_tokenizer()
        own = frozenset(self.stops if tokenizer.end is None else (*self.stops, tokenizer.end))
        return own | turn_ends(self.find_template(), tokenizer)

    def fields(self) -> Mapping[str, Field]:
        """tokens, targets, segments, positions: int32[sequence]."""
        return row_fields(self.sequence)

    def get_tokenizer(self) -> Tokenizer:
        """See :class:`TextData`."""
        return Tokenizer(path=self.tokenizer, around=Around.own)

    def with_tokenizer(self, path: Path) -> "Prompts":
        """See :class:`TextData`."""
        return replace(self, tokenizer=path)

    def at(self, path: Path) -> TextData:
        """The text at a path, in rows of the same length; conversations by the tokenizer's chat template, where it has one."""
        from systolic.data.text.instructions import held_out

        return held_out(self, path, self.sequence, self.stops) or Passages(
            path=path, validation=path, tokenizer=self.tokenizer, sequence=self.sequence
        )

    def shrink(self, layout: Layout) -> "Prompts":
        """Rows of 64 tokens a context shard."""
        return replace(self, sequence=min(self.sequence, 64 * layout.context))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passages(Documents):
    """Documents with the tokens around them that the tokenizer's own post-processor adds."""

    def get_tokenizer(self) -> Tokenizer:
        """See :class:`Documents`."""
        # The two-argument form: a dataclass with slots is made anew, and super() would name the old class.
        return replace(Documents.get_tokenizer(self), around=Around.own)
