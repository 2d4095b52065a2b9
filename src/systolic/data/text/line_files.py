"""Lines of JSON from files as people have them: compressed, with a byte order mark, in another Unicode, or as Parquet."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError, extra

SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""Suffixes that are read as what is in them."""
PARQUET, ZST = ".parquet", ".zst"
UTF8_MARK = b"\xef\xbb\xbf"
WIDE_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
"""First bytes of files in other Unicode encodings, such as PowerShell writes; the longer ones first."""
GZIP = b"\x1f\x8b"
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)
"""Errors that reading a damaged file raises; an OSError without a number is of the library that decompresses."""
SHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
"""Suffixes of spreadsheets."""
OTHERS = {
    **dict.fromkeys(
        SHEETS,
        ("a spreadsheet", "save it as CSV in UTF-8 with the names of its columns in the first line"),
    ),
    **dict.fromkeys(
        (".arrow", ".feather"),
        ("an Arrow file", "write it as Parquet (from datasets: load_from_disk(FOLDER).to_parquet(FILE); from pandas: read_feather(FILE).to_parquet(FILE))"),
    ),
    **dict.fromkeys((".orc", ".avro"), ("a table in {}", "write it as Parquet")),
    **dict.fromkeys((".pkl", ".pickle"), ("a pickle, which may run code when it is read", "write it as JSONL or Parquet")),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), ("a database", "write its table as CSV or Parquet")),
    **dict.fromkeys((".docx", ".doc", ".odt", ".pdf", ".rtf"), ("a document with a layout", "save its text as .txt in UTF-8, or conversations as JSONL")),
    **dict.fromkeys((".zip", ".7z", ".rar", ".tar", ".tgz"), ("an archive", "unpack it")),
}  # fmt: skip
"""Kinds of other files by their suffixes, and what to do with them."""
ROWS = 1024
"""Rows of a Parquet file that are read at a time."""


def is_lines(file: Path) -> bool:
    """Whether a file of a folder holds lines of JSON, by its name."""
    last = file.suffix.lower()
    inner = Path(file.stem) if last in (*COMPRESSED, ZST) else file
    return inner.suffix.lower() in SUFFIXES or last == PARQUET


def refuse_other(file: Path) -> None:
    """Refuses files of programs, which hold no text.

    Raises:
        DataError: it is one by its name; says how to save it.
    """
    suffix = file.suffix.lower()
    what, how = OTHERS.get(suffix, ("", ""))
    if what:
        raise DataError(f"{file} is {what.format(suffix[1:].upper())}; {how}, and give that")


def not_json(error: Exception, form: str = "") -> str:
    """Fault of a line that is not JSON: text of another encoding, or of another form than the declared one."""
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"is not UTF-8 (it has the byte {byte:#x}); save it as UTF-8"
    return f"is not JSON ({error}){form and f'; {form}'}"


def lines_of(file: Path) -> Iterator[tuple[str, bytes]]:
    """Place (``FILE line 3``) and content of each line of a file that is not blank; of each row of a Parquet file as JSON.

    Raises:
        DataError: the file is damaged, or of a kind that is not read; names it.
        MissingExtraError: it is a Parquet file and pyarrow is not installed.
    """
    if file.suffix.lower() == PARQUET:
        yield from _rows(file)
        return
    if file.suffix.lower() == ZST:
        raise DataError(
            f"{file} is compressed with Zstandard, which is not read; decompress it first: zstd -d {file}"
        )
    number = 0
    try:
        with opened(file) as content:
            for number, line in enumerate(content, 1):
                if line.strip():
                    yield f"{file} line {number}", line
    except DAMAGED as error:
        reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(
            f"{file} can't be read behind line {number} ({reason}); copy it again, or save it as UTF-8"
        ) from error


def opened(file: Path) -> Any:
    """A file of lines for reading, decompressed, in UTF-8 without a byte order mark."""
    with file.open("rb") as raw:
        compressed = raw.read(2) == GZIP
    opener = gzip.open if compressed else COMPRESSED.get(file.suffix.lower(), open)
    content: Any = opener(file, "rb")
    first = content.peek(4)[:4] if isinstance(content, io.BufferedReader) else _first(content)
    encoding = next((name for mark, name in WIDE_MARKS.items() if first.startswith(mark)), None)
    if encoding is not None:
        return _Recoded(content, encoding)
    if first.startswith(UTF8_MARK):
        content.read(len(UTF8_MARK))
    return content


def _first(content: Any) -> bytes:
    first = content.read(4)
    content.seek(0)
    return first


class _Recoded:
    """Lines of a file in another Unicode as UTF-8."""

    def __init__(self, content: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(content, encoding=encoding, newline="\n")

    def __enter__(self) -> "_Recoded":
        return self

    def __exit__(self, *error: object) -> None:
        self._text.close()

    def __iter__(self) -> Iterator[bytes]:
        return (line.encode("utf-8", "surrogatepass") for line in self._text)


def _rows(file: Path) -> Iterator[tuple[str, bytes]]:
    import msgspec

    with extra("reading Parquet", "text"):
        import pyarrow
        import pyarrow.parquet
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(ROWS):
                for row in batch.to_pylist():
                    number += 1
                    # Columns that a row does not have are null in it.
                    kept = {name: value for name, value in row.items() if value is not None}
                    yield f"{file} row {number}", msgspec.json.encode(kept)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{file} can't be read as Parquet ({reason}); write it again") from error
