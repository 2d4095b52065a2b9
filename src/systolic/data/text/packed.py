"""Tokenised text in compressed ArrayRecord files, and where each record starts.

A folder of it holds ``SPLIT-00000.array_record`` ..., ``SPLIT.index.npz`` (the places of each
record and whether it begins a document), the tokenizer and, written last, ``dataset.json``.
"""

import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, OptionError, RunError
from systolic.core.files import cure
from systolic.data.text.corpus import record_source
from systolic.data.text.documents import Documents
from systolic.data.text.rows import TokenRecords
from systolic.data.text.tokenizer import ADDED, CONFIG, TOKENS_MAP, Tokenizer
from systolic.job.data import Split

MANIFEST = "dataset.json"
FORMAT = 1
"""Raised when the files change in a way that older code misreads."""
_RECORD_PLACES = 1 << 14
"""Longest record; longer documents become several, so that a row never reads a whole book."""
_OPTIONS = "group_size:1,zstd:3"
"""One record a group, so that any record is read without its neighbours."""
_BATCH_BYTES = 1 << 24
"""Bytes of text tokenised at a time."""
Tell = Callable[[Split, int, int], None]
"""Called with the split, the documents written so far and all its documents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A folder of packed text."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer of the tokens."""
        return self.manifest["tokenizer"]["digest"]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens, from its copy in the folder."""
        about = self.manifest["tokenizer"]
        if about["file"] is None:
            return Tokenizer()
        return Tokenizer(path=self.folder / about["file"], bos=about["bos"], eos=about["eos"])

    def files(self) -> list[Path]:
        """All files of the text and its index."""
        splits = self.manifest["splits"]
        named = [name for about in splits.values() for name in about["files"]]
        return [self.folder / name for name in (*named, *(f"{s}.index.npz" for s in splits))]

    def places(self, split: Split) -> int:
        """Predicted tokens in a split, 0 if it has none."""
        return self.manifest["splits"].get(split.value, {}).get("places", 0)

    def records(self, split: Split) -> "PackedRecords":
        """The records of a split.

        Raises:
            DataError: no such split, or files that are missing or damaged.
        """
        about = self.manifest["splits"].get(split.value)
        if about is None:
            known = ", ".join(self.manifest["splits"])
            raise DataError(
                f"{self.folder} has no {split.value} split (it has {known}); pack it with a validation share"
            )
        files = [self.folder / name for name in about["files"]]
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            raise DataError(f"{missing} is missing from the packed data; pack it again")
        try:
            with np.load(self.folder / f"{split.value}.index.npz") as index:
                places, begins = index["places"], index["begins"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{self.folder}: the index of the {split.value} split is damaged; pack it again"
            ) from error
        records = PackedRecords(files, places, begins, self.manifest["dtype"])
        if records.count() != len(places):
            raise DataError(
                f"{self.folder} has {records.count()} {split.value} records but an index of {len(places)}; pack it again"
            )
        return records


class PackedRecords(TokenRecords):
    """Records on disk, each a token sequence."""

    def __init__(
        self, files: Sequence[Path], places: np.ndarray, begins: np.ndarray, dtype: str
    ) -> None:
        super().__init__(places, begins)
        self._source = record_source(files)
        self._dtype = np.dtype(dtype)

    def count(self) -> int:
        """Records in the files."""
        return len(self._source)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Reads each record once, whichever spans it is in."""
        wanted = sorted({number for a, b in spans for number in range(a, b)})
        raw = dict(zip(wanted, self._source.__getitems__(wanted), strict=True))
        out = []
        for a, b in spans:
            parts = [np.frombuffer(raw[number], self._dtype) for number in range(a, b)]
            out.append(
                (
                    np.concatenate([part[:-1] for part in parts]),
                    np.concatenate([part[1:] for part in parts]),
                )
            )
        return out


def find_packed(path: Path) -> Packed | None:
    """The packed text at ``path``; ``None`` if there is none.

    Raises:
        DataError: it is of another kind or was written by a newer version.
    """
    file = path / MANIFEST
    return _load(path, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=16)
def _load(folder: Path, stamp: int) -> Packed | None:
    del stamp
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except ValueError as error:
        raise DataError(f"{folder / MANIFEST} is not JSON; pack the data again") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "text":
        # Another program's dataset.json among text files is none of ours.
        return None
    if manifest.get("format") != FORMAT:
        raise DataError(
            f"{folder} was packed in format {manifest.get('format')}, this version reads {FORMAT}; pack it again or upgrade"
        )
    return Packed(folder=folder, manifest=manifest)


def pack_text(
    data: Documents, out: Path, shard_bytes: int = 1 << 28, tell: Tell | None = None
) -> dict[str, Any]:
    """Writes the train and validation documents of ``data`` under ``out``.

    Args:
        data: text, tokenizer and validation share.
        out: a new folder; it appears when everything is written.
        shard_bytes: size of the tokens in one file, before compression.
        tell: for a progress bar.

    Returns:
        Content of ``dataset.json``: kind, tokenizer, dtype, and the counts of each split.

    Raises:
        OptionError: ``out`` exists.
        DataError: the text is packed already, empty or damaged.
        RunError: ``out`` cannot be written.
    """
    import systolic

    if find_packed(data.path) is not None:
        raise DataError(f"{data.path} is packed already; give the text it was made from")
    tokenizer = data.get_tokenizer()
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    with fresh_folder(out) as scratch:
        splits = {}
        for split in (Split.train, Split.validation):
            writer = _Writer(
                folder=scratch, split=split, shard_places=shard_bytes // 2, dtype=dtype
            )
            about = _pack_split(data, split, tokenizer, writer, tell)
            if about["places"]:
                splits[split.value] = about
        if Split.train.value not in splits:
            raise DataError(f"{data.path} has no text to pack; its documents are empty")
        manifest = {
            "kind": "text",
            "format": FORMAT,
            "systolic": systolic.__version__,
            "dtype": dtype,
            "tokenizer": _keep_tokenizer(tokenizer, scratch),
            "splits": splits,
        }
        from systolic.core.files import write_json

        write_json(scratch / MANIFEST, manifest)
    return manifest


@contextmanager
def fresh_folder(out: Path) -> Generator[Path, None, None]:
    """A scratch folder that becomes ``out`` when the block succeeds.

    Leftovers of a killed run are removed first.

    Raises:
        OptionError: ``out`` exists.
        RunError: the disk is full or the folder is not writable.
    """
    if out.exists():
        raise OptionError(f"{out} exists; remove it or choose another folder")
    scratch = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        for file in scratch.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        os.replace(scratch, out)
    except OSError as error:
        raise RunError(
            f"{out} could not be written ({error.strerror}); {cure(out, error)}"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _pack_split(
    data: Documents, split: Split, tokenizer: Tokenizer, writer: "_Writer", tell: Tell | None
) -> dict[str, Any]:
    corpus, kept = data.documents(split)
    step = max(1, int(_BATCH_BYTES * max(len(corpus), 1) / max(corpus.bytes, 1)))
    done = text_bytes = 0
    for start in range(0, len(kept), step):
        texts = [text for text in corpus.read(kept[start : start + step]) if text]
        text_bytes += sum(map(len, texts))
        for tokens in tokenizer.documents(texts):
            writer.add(tokens)
            done += 1
        if tell:
            tell(split, min(start + step, len(kept)), len(kept))
    return {**writer.close(), "documents": done, "text_bytes": text_bytes}


def _keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    file = tokenizer.file()
    if file is not None:
        for name in ("tokenizer.json", CONFIG, TOKENS_MAP, ADDED):
            beside = file if name == "tokenizer.json" else file.parent / name
            if beside.is_file():
                shutil.copyfile(beside, folder / name)
    return {
        "file": None if file is None else "tokenizer.json",
        "digest": tokenizer.digest(),
        "vocab_size": tokenizer.vocab_size,
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
    }


@dataclass(kw_only=True, slots=True)
class _Writer:
    """Files of one split, and their index."""

    folder: Path
    split: Split
    shard_places: int
    dtype: str
    files: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    opened: Any = None
    in_shard: int = 0

    def add(self, tokens: np.ndarray) -> None:
        """Writes a document, as one record or several that each repeat a token."""
        for start in range(0, len(tokens) - 1, _RECORD_PLACES):
            part = tokens[start : start + _RECORD_PLACES + 1]
            self._shard().write(part.astype(self.dtype).tobytes())
            self.places.append(len(part) - 1)
            self.begins.append(start == 0)
            self.in_shard += len(part)

    def close(self) -> dict[str, Any]:
        """Closes the last file and writes the index; returns the split's entry of ``dataset.json``."""
        self._end()
        places = np.array(self.places, np.uint32)
        if self.files:
            np.savez(
                self.folder / f"{self.split.value}.index.npz",
                places=places,
                begins=np.array(self.begins, bool),
            )
        return {
            "files": self.files,
            "records": len(places),
            "places": int(places.sum(dtype=np.int64)),
            "file_bytes": sum((self.folder / name).stat().st_size for name in self.files),
        }

    def _shard(self) -> Any:
        if self.opened is None or self.in_shard >= self.shard_places:
            from array_record.python.array_record_module import ArrayRecordWriter  # ty: ignore[import-not-found]

            self._end()
            name = f"{self.split.value}-{len(self.files):05d}.array_record"
            self.opened = ArrayRecordWriter(str(self.folder / name), _OPTIONS)
            self.files.append(name)
            self.in_shard = 0
        return self.opened

    def _end(self) -> None:
        if self.opened is not None:
            self.opened.close()
            self.opened = None
