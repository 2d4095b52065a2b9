"""Corpora: the files at a path, their kind and reader, and documents by number without loading a file completely."""

import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, NotFoundError, extra, nearest
from systolic.core.files import nearest_file
from systolic.data.random_access import mix
from systolic.data.text.line_files import UTF8_MARK, WIDE_MARKS, not_json, refuse_other

FEWEST_GROUPS = 8
"""Number of row groups from which an order matters although some groups are shuffled together."""
CHECKED_BYTES = 1 << 20
"""Bytes of the first JSONL file that are checked on opening; other lines are checked when read."""
TEXT = frozenset(
    {".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".log", ".py", ".pyi", ".c"}
    | {".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".php"}
    | {".sh", ".sql", ".scala", ".kt", ".swift", ".jl", ".r", ".lua", ".toml", ".yaml"}
    | {".yml"}
)
"""Suffixes of files that are one document each."""
LINES = frozenset((".jsonl", ".ndjson"))
PARQUET = frozenset((".parquet",))
RECORDS = frozenset((".array_record", ".arrayrecord"))
HEAD_BYTES = 1 << 16
"""Bytes read from a file to tell text from binary."""
_DECOMPRESSED = {".gz": "gunzip -k", ".zst": "zstd -d", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
"""How a compressed file is decompressed, by its suffix."""


def sorted_by(about: Any) -> str:
    """Column by which a file is sorted or grouped; "" if there is none or groups are few.

    A column that only counts rows does not qualify: some group must hold a single value.

    Args:
        about: ``pyarrow.parquet.FileMetaData``.
    """
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    if len(groups) < FEWEST_GROUPS:
        return ""
    for number in range(about.num_columns):
        statistics = [group.column(number).statistics for group in groups]
        if not all(statistic is not None and statistic.has_min_max for statistic in statistics):
            continue
        ranges = [(statistic.min, statistic.max) for statistic in statistics]
        alone = [low for low, high in ranges if low == high]
        ordered = all(high <= low for (_, high), (low, _) in itertools.pairwise(ranges))
        grouped = 2 * len(alone) >= len(ranges)
        if alone and ranges[0] != ranges[-1] and (ordered or grouped):
            return groups[0].column(number).path_in_schema
    return ""


class Corpus(ABC):
    """Documents in a fixed order. Picklable; read from several threads at once."""

    root: Path
    files: tuple[Path, ...]
    """Files below ``root``, in reading order."""
    bytes: int
    """Bytes of the files, for choosing how many documents to read at a time."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of documents."""

    @abstractmethod
    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The documents with these numbers, as UTF-8."""

    @abstractmethod
    def keys(self) -> np.ndarray:
        """uint64[documents]: a hash of each document's file and place, the same on every machine."""

    def groups(self) -> np.ndarray | None:
        """int64[groups + 1]: bounds of groups that are read together; None if any document is cheap to read."""
        return None

    def order(self) -> str:
        """Name of the column that the documents are sorted by, if known and relevant; else ""."""
        return ""


class TextFiles(Corpus):
    """Text files, one document each; long ones in several."""

    def __init__(self, root: Path, files: Sequence[Path], piece_bytes: int) -> None:
        sizes = [file.stat().st_size for file in files]
        self.bytes = sum(sizes)
        self.root, self.files = root, tuple(files)
        self._names = [_name(root, file) for file in files]
        self._spans: list[tuple[int, int, int]] = []
        for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
            cuts = _cuts(file, size, piece_bytes)
            self._spans += [(number, a, b) for a, b in itertools.pairwise(cuts)]

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Number of parts of files."""
        out = []
        for number in numbers:
            file, start, stop = self._spans[number]
            with self.files[file].open("rb") as opened:
                opened.seek(start)
                text = opened.read(stop - start)
                out.append(text if start else text.removeprefix(UTF8_MARK))
        return out

    def keys(self) -> np.ndarray:
        """Hash of the path and the start of the part."""
        files = np.array([_key(self._names[file]) for file, _, _ in self._spans], np.uint64)
        return mix(files + np.array([start for _, start, _ in self._spans], np.uint64))


class Lines(Corpus):
    """JSONL files: one JSON object a line, the text in one of its fields."""

    def __init__(self, root: Path, files: Sequence[Path], field: str) -> None:
        self.bytes = sum(file.stat().st_size for file in files)
        self._field = field
        self.root, self.files = root, tuple(files)
        self._names = [_name(root, file) for file in files]
        self._lines = [_line_bounds(file) for file in files]
        self._starts = np.concatenate([[0], np.cumsum([len(lines) for lines in self._lines])])
        # Errors near the start are reported before a model is compiled.
        if len(self):
            lines = next(lines for lines in self._lines if len(lines))
            near = int(np.count_nonzero(lines[:, 1] <= CHECKED_BYTES))
            self.read(np.arange(max(near, 1)))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The field of each line.

        Raises:
            DataError: a line that is not a JSON object, or lacks the field.
        """
        out = []
        for number in numbers:
            file = int(np.searchsorted(self._starts, number, side="right")) - 1
            start, stop = self._lines[file][number - self._starts[file]]
            with self.files[file].open("rb") as opened:
                opened.seek(start)
                out.append(self._text(opened.read(stop - start), file, int(start)))
        return out

    def keys(self) -> np.ndarray:
        """Hash of the path and the line number."""
        parts = [_keys(n, len(lines)) for n, lines in zip(self._names, self._lines, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def _text(self, line: bytes, file: int, start: int) -> bytes:
        import msgspec

        try:
            row = msgspec.json.decode(line if start else line.removeprefix(UTF8_MARK))
        except ValueError as error:
            raise DataError(
                f"{self._place(file, start)} {not_json(error, 'each line must be one JSON object')}"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get(self._field), str):
            known = (
                [name for name, value in row.items() if isinstance(value, str)]
                if isinstance(row, dict)
                else []
            )
            raise DataError(_no_field(self._place(file, start), self._field, known))
        return row[self._field].encode()

    def _place(self, file: int, start: int) -> str:
        """``corpus.jsonl line 3``, counted from 1 with the empty lines, as editors do."""
        number = 1
        with self.files[file].open("rb") as opened:
            while start and (chunk := opened.read(min(start, 1 << 24))):
                number += chunk.count(b"\n")
                start -= len(chunk)
        return f"{self.files[file]} line {number}"


class Parquet(Corpus):
    """Parquet files, the text in one column. A row group is read as a whole."""

    def __init__(self, root: Path, files: Sequence[Path], field: str) -> None:
        arrow = _arrow("Parquet files")
        self.bytes = sum(file.stat().st_size for file in files)
        self._field = field
        self.root, self.files = root, tuple(files)
        self._order = ""
        counts: list[int] = []
        self._places: list[tuple[int, int]] = []
        keys = []
        for number, file in enumerate(files):
            try:
                about = arrow.ParquetFile(file)
            except Exception as error:  # pyarrow's errors have no common base but Exception
                raise DataError(f"{file} is not a Parquet file ({_brief(error)})") from error
            _check_column(str(file), about.schema_arrow, field)
            self._order = self._order or sorted_by(about.metadata)
            for group in range(about.num_row_groups):
                counts.append(about.metadata.row_group(group).num_rows)
                self._places.append((number, group))
            keys.append(_keys(_name(root, file), about.metadata.num_rows))
        self._keys = np.concatenate(keys)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The column of each row."""
        out = []
        for number in numbers:
            group = int(np.searchsorted(self._starts, number, side="right")) - 1
            file, inner = self._places[group]
            column = _row_group(self.files[file], inner, self._field)
            out.append(_utf8(column[int(number - self._starts[group])].as_py()))
        return out

    def keys(self) -> np.ndarray:
        """Hash of the path and the row number."""
        return self._keys

    def groups(self) -> np.ndarray | None:
        """Bounds of the row groups."""
        return self._starts

    def order(self) -> str:
        """A column that holds one value in each row group of a file, by the file's own statistics."""
        return self._order


class ArrayRecords(Corpus):
    """ArrayRecord files whose records are UTF-8 text."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self.root, self.files = root, tuple(files)
        self.bytes = sum(file.stat().st_size for file in files)
        self._source = record_source(files)
        counts = np.diff(_record_counts(files))
        pairs = zip(files, counts, strict=True)
        self._keys = np.concatenate([_keys(_name(root, file), int(n)) for file, n in pairs])

    def __len__(self) -> int:
        return len(self._source)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The records."""
        return list(self._source.__getitems__([int(n) for n in numbers]))

    def keys(self) -> np.ndarray:
        """Hash of the path and the record number."""
        return self._keys


class HuggingFace(Corpus):
    """A folder that ``datasets.Dataset.save_to_disk`` wrote, memory-mapped."""

    def __init__(self, folder: Path, field: str) -> None:
        with extra("reading a Hugging Face datasets folder", "text"):
            import datasets
        try:
            data = datasets.load_from_disk(str(folder))
        except Exception as error:  # damaged folders raise whatever Arrow or JSON raise
            raise DataError(f"{folder} cannot be loaded by datasets ({_brief(error)})") from error
        if not isinstance(data, datasets.Dataset):
            raise DataError(f"{folder} holds several splits; give the path of one of them")
        _check_column(str(folder), data.features.arrow_schema, field)
        self._field = field
        self._data = data.select_columns([field])
        self.root, self.files = folder, tuple(sorted(folder.glob("*.arrow")))
        self.bytes = sum(file.stat().st_size for file in self.files)

    def __len__(self) -> int:
        return len(self._data)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """The column of each row."""
        return [_utf8(text) for text in self._data[[int(n) for n in numbers]][self._field]]

    def keys(self) -> np.ndarray:
        """Hash of the row number."""
        return _keys("", len(self))


def record_source(files: Sequence[Path]) -> Any:
    """Random access to the records of ArrayRecord files.

    Raises:
        DataError: one of them is not such a file.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    try:
        return ArrayRecordDataSource([str(file) for file in files])
    except Exception as error:  # C++ status errors
        raise DataError(f"{files[0]} cannot be read as ArrayRecord ({_brief(error)})") from error


def _cuts(file: Path, size: int, piece_bytes: int) -> list[int]:
    """Cuts of a file: after the last line break before each multiple of ``piece_bytes``."""
    cuts = [0] if size else []
    if size > piece_bytes:
        with file.open("rb") as opened:
            while size - cuts[-1] > piece_bytes:
                back = min(4096, piece_bytes // 2)
                end = cuts[-1] + piece_bytes
                opened.seek(end - back)
                tail = opened.read(back)
                line = tail.rfind(b"\n") + 1
                cuts.append(end - back + (line or _character(tail)))
    return [*cuts, size] if size else []


def _character(tail: bytes) -> int:
    """The last place in ``tail`` where a UTF-8 character starts (later bytes of one are 0b10xxxxxx)."""
    for place in range(len(tail) - 1, max(len(tail) - 5, 0), -1):
        if tail[place] & 0xC0 != 0x80:
            return place
    return len(tail)


def _line_bounds(file: Path) -> np.ndarray:
    """int64[lines, 2]: start and end of each line that is not empty."""
    ends: list[np.ndarray] = []
    at, last = 0, b"\n"
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 24):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + at)
            at, last = at + len(chunk), chunk[-1:]
    if last != b"\n":
        ends.append(np.array([at]))
    stops = np.concatenate(ends).astype(np.int64) if ends else np.zeros(0, np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    bounds = np.stack([starts, stops], axis=1)
    # One byte is the carriage return of an empty line.
    return bounds[stops - starts > 1]


def _record_counts(files: Sequence[Path]) -> np.ndarray:
    from array_record.python.array_record_module import (  # ty: ignore[import-not-found]
        ArrayRecordReader,
    )

    counts = []
    for file in files:
        reader = ArrayRecordReader(str(file))
        counts.append(reader.num_records())
        reader.close()
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


@lru_cache(maxsize=4)
def _row_group(file: Path, group: int, field: str) -> Any:
    """A column of one row group; the last few are cached, since documents come group by group."""
    return _arrow("Parquet files").ParquetFile(file).read_row_group(group, columns=[field])[field]


def _arrow(what: str) -> Any:
    with extra(f"reading {what}", "text"):
        import pyarrow.parquet
    return pyarrow.parquet


def _check_column(where: str, schema: Any, field: str) -> None:
    import pyarrow

    texts = [
        column.name
        for column in schema
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    ]
    if field not in texts:
        raise DataError(_no_field(where, field, texts))


def _no_field(where: str, field: str, known: Sequence[str]) -> str:
    if not known:
        return f"{where} has no text field {field!r} and no other; conversations are for systolic train sft"
    hint = nearest(field, known) or f"; it has {', '.join(known[:8])};"
    return f"{where} has no text field {field!r}{hint} name it with --field"


def _utf8(text: str | None) -> bytes:
    return b"" if text is None else text.encode()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _name(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _keys(name: str, count: int) -> np.ndarray:
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return mix(np.array([_key(name)], np.uint64) + numbers * np.uint64(0x9E3779B97F4A7C15))


@lru_cache(maxsize=16)
def find_corpus(path: Path, field: str, piece_bytes: int, stamp: int) -> Corpus:
    """The documents at ``path``: a file, a folder of files of one kind, or a ``datasets`` folder.

    Args:
        path: as above.
        field: the JSONL field or column that holds the text.
        piece_bytes: plain text files longer than this are several documents.
        stamp: :func:`changed_ns` of the path, so that changed data is read anew.

    Raises:
        NotFoundError: no such path.
        DataError: no readable file, several kinds at once, or no such field.
    """
    del stamp
    if not path.exists():
        raise NotFoundError(
            f"{path} does not exist{nearest_file(path)}; give a file or folder of text"
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return HuggingFace(path, field)
    root = path if path.is_dir() else path.parent
    listed = _listed(path) if path.is_dir() else [path]
    kinds = {
        kind: [file for file in listed if file.suffix.lower() in suffixes]
        for kind, suffixes in (("JSONL", LINES), ("Parquet", PARQUET), ("ArrayRecord", RECORDS))
    }
    kinds = {kind: files for kind, files in kinds.items() if files}
    if len(kinds) > 1:
        raise DataError(
            f"{path} holds both {' and '.join(kinds)} files; give one of them by its path"
        )
    if not kinds:
        return _plain(path, root, listed, piece_bytes)
    kind, files = next(iter(kinds.items()))
    if kind == "JSONL":
        for file in files:
            check_encoding(file)
        return Lines(root, files, field)
    if kind == "Parquet":
        return Parquet(root, files, field)
    return ArrayRecords(root, files)


def changed_ns(path: Path) -> int:
    """Time of the last change of a file or the newest file in a folder; 0 if absent."""
    if not path.is_dir():
        return path.stat().st_mtime_ns if path.exists() else 0
    return max((file.stat().st_mtime_ns for file in _listed(path)), default=0)


def _plain(path: Path, root: Path, listed: list[Path], piece_bytes: int) -> Corpus:
    texts = listed if path.is_file() else [file for file in listed if file.suffix.lower() in TEXT]
    packed = next((file for file in listed if file.suffix.lower() in _DECOMPRESSED), None)
    if packed is not None and packed in (texts or [packed]):
        raise DataError(
            f"{packed} is compressed, and text is read at any place of its files; decompress it first: {_DECOMPRESSED[packed.suffix.lower()]} {packed}"
        )
    if path.is_file():
        refuse_other(path)
    if path.is_file() and path.suffix.lower() in (
        ".json",
        ".arrow",
        ".safetensors",
        ".zip",
        ".tar",
    ):
        raise DataError(
            f"{path} is not text; Systolic reads plain text, .jsonl, .parquet, .array_record and datasets folders"
        )
    if not texts:
        raise DataError(
            f"{path} holds no text; Systolic reads .txt, .md, code, .jsonl, .parquet, .array_record and datasets folders"
        )
    if path.is_file():
        check_text(path)
    return TextFiles(root, texts, piece_bytes)


def check_encoding(file: Path) -> None:
    """Refuses another Unicode than UTF-8, whose places can't be reached.

    Raises:
        DataError: its first bytes say so.
    """
    with file.open("rb") as opened:
        first = opened.read(4)
    other = next((name for mark, name in WIDE_MARKS.items() if first.startswith(mark)), None)
    if other is not None:
        raise DataError(
            f"{file} is {other.upper()} by its first bytes, and text is read as UTF-8; convert it first: iconv -f {other.upper()} -t UTF-8"
        )


def check_text(file: Path) -> None:
    """Refuses a binary file: one with a zero byte near its start.

    Raises:
        DataError: it is binary.
    """
    check_encoding(file)
    with file.open("rb") as opened:
        start = opened.read(HEAD_BYTES)
    if (place := start.find(b"\0")) >= 0:
        raise DataError(
            f"{file} is binary, not text (a zero byte at {place}); give plain text, .jsonl, .parquet or .array_record"
        )


def _listed(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, by relative path."""
    files = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())
