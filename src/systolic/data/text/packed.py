"""Tokenised text in compressed ArrayRecord files, and where each record starts.

A folder of it holds ``SPLIT-00000.array_record`` ..., ``SPLIT.index.npz`` (the places of each
record and whether it begins a document), the tokenizer and, written last, ``dataset.json``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError
from systolic.data.text.corpus import record_source
from systolic.data.text.rows import TokenRecords
from systolic.data.text.tokenizer import Tokenizer
from systolic.job.data import Split

MANIFEST = "dataset.json"
FORMAT = 1
"""Raised when the files change in a way that older code misreads."""


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
