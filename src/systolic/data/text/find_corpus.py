"""Finds the corpus at a path: the files, their kind, and the reader."""

import os
from functools import lru_cache
from pathlib import Path

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import nearest_file
from systolic.data.text.corpus import ArrayRecords, Corpus, HuggingFace, Lines, Parquet, TextFiles
from systolic.data.text.line_files import WIDE_MARKS, refuse_other

TEXT = frozenset(
    (
        ".txt",
        ".md",
        ".rst",
        ".tex",
        ".html",
        ".xml",
        ".csv",
        ".log",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".java",
        ".js",
        ".ts",
        ".go",
        ".rs",
        ".rb",
        ".php",
        ".sh",
        ".sql",
        ".scala",
        ".kt",
        ".swift",
        ".jl",
        ".r",
        ".lua",
        ".toml",
        ".yaml",
        ".yml",
    )
)
"""Suffixes of files that are one document each."""

LINES = frozenset((".jsonl", ".ndjson"))
PARQUET = frozenset((".parquet",))
RECORDS = frozenset((".array_record", ".arrayrecord"))
HEAD_BYTES = 1 << 16
"""Bytes read from a file to tell text from binary."""

_DECOMPRESSED = {".gz": "gunzip -k", ".zst": "zstd -d", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}
"""How a compressed file is decompressed, by its suffix."""


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
    found = _listed(path) if path.is_dir() else [path]
    kinds = {
        kind: [file for file in found if file.suffix.lower() in suffixes]
        for kind, suffixes in (("JSONL", LINES), ("Parquet", PARQUET), ("ArrayRecord", RECORDS))
    }
    kinds = {kind: files for kind, files in kinds.items() if files}
    if len(kinds) > 1:
        raise DataError(
            f"{path} holds both {' and '.join(kinds)} files; give one of them by its path"
        )
    if not kinds:
        return _plain(path, root, found, piece_bytes)
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


def _plain(path: Path, root: Path, found: list[Path], piece_bytes: int) -> Corpus:
    texts = found if path.is_file() else [file for file in found if file.suffix.lower() in TEXT]
    packed = next((file for file in found if file.suffix.lower() in _DECOMPRESSED), None)
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
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())
