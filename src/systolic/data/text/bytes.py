"""Bytes of the Python standard library: real text that every machine has."""

import gzip
import hashlib
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import as_paths
from systolic.core.ranges import check
from systolic.data.text.text_data import FILL, ROW, TextData, row_fields
from systolic.job import Layout
from systolic.job.data import Batches, Contents, Field, Read, Split

if TYPE_CHECKING:
    from systolic.data.text.rows import HeldRecords
    from systolic.data.text.tokenizer import Tokenizer

_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test"})
"""Folders whose files are not the library's own code, or are tests."""


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
        from systolic.data.text.documents import Documents

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
