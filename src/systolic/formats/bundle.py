"""A Bundle as a source."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from systolic.artifact.bundle import MANIFEST, ORIGIN, Bundle, arrays, open_bundle
from systolic.artifact.bundle_job import read_job
from systolic.artifact.bundle_record import ImportedFrom
from systolic.artifact.packed import RestoredTensor
from systolic.core.digest import digest
from systolic.data.audio.recordings import Recordings
from systolic.data.text.instructions import Instructions
from systolic.data.text.sentences import Sentences
from systolic.data.text.text_data import TextData
from systolic.formats.outline import positions_of
from systolic.formats.program.model import ExportedProgram
from systolic.formats.source import Source
from systolic.job import Data, Job, Quantization

if TYPE_CHECKING:
    import jax


ROW_BYTES = 1 << 20
"""Least size of a row of the first dim, such as a layer, that is a piece of its own."""


@dataclass(frozen=True, kw_only=True)
class BundleSource(Source):
    """The model of a Bundle."""

    bundle: Bundle
    made_from: ImportedFrom | None = None
    """What it was made from, where it is a Bundle only for a step in between."""

    @property
    def dtype(self) -> str:
        """See :class:`Source`."""
        return self.bundle.record.dtype

    @property
    def quantization(self) -> Quantization:
        """See :class:`Source`."""
        return self.bundle.quantization

    def each(self, like: "Mapping[str, jax.ShapeDtypeStruct]") -> "Iterator[tuple[str, jax.Array]]":
        """See :class:`Source`."""
        return arrays(self.bundle, like)

    def dtypes(self) -> dict[str, np.dtype]:
        """See :class:`Source`."""
        return {path: tensor.dtype for path, tensor in self.bundle.tensors.items()}

    def pieces(self, path: str) -> Iterator[np.ndarray]:
        """See :class:`Source`."""
        tensor = self.bundle.tensors[path]
        if isinstance(tensor, RestoredTensor):
            yield from tensor.pieces()
            return
        rows = tensor.shape[0] if tensor.shape else 1
        if tensor.nbytes < ROW_BYTES * rows:
            yield tensor.read()
            return
        size, shape = tensor.nbytes // rows, tensor.shape[1:]
        for row in range(rows):
            yield replace(tensor, offset=tensor.offset + row * size, shape=shape).read()

    def files(self) -> dict[str, Path]:
        """See :class:`Source`."""
        own = [name for name in self.bundle.record.files if name != ORIGIN]
        skipped = (".safetensors", ".safetensors.index.json")
        return {name: self.path / name for name in own if not name.endswith(skipped)}

    def verify(self) -> None:
        """See :class:`Source`."""
        self.bundle.verify()

    def trained_job(self) -> Job | None:
        """See :class:`Source`."""
        job = read_job(self.bundle.record, self.model, self.path / MANIFEST)
        if job is None or self.tokenizer is None:
            return job
        data = _with_tokenizer(job.data, self.path)
        if isinstance(data, Instructions) and not data.positions:
            # A Bundle of an earlier version says it in the config.json of its base alone.
            data = replace(data, positions=positions_of(self.config, self.model, str(self.path)))
        return replace(job, data=data)

    def fingerprint(self) -> str:
        """See :class:`Source`."""
        return digest({name: about.sha256 for name, about in self.bundle.record.files.items()})


def _with_tokenizer(data: Data, folder: Path) -> Data:
    """Data that reads texts with the tokenizer in a folder; unchanged if it reads none."""
    if isinstance(data, TextData | Recordings):
        return data.with_tokenizer(folder)
    return replace(data, tokenizer=folder) if isinstance(data, Sentences) else data


def open_bundled(folder: Path) -> BundleSource:
    """A Bundle.

    Raises: as :func:`systolic.artifact.bundle.open_bundle`.
    """
    bundle = open_bundle(folder)
    origin, model = folder / ORIGIN, bundle.model
    if isinstance(model, ExportedProgram):
        model = replace(model, folder=folder)
    return BundleSource(
        path=folder,
        model=model,
        config=json.loads(origin.read_bytes()) if ORIGIN in bundle.record.files else {},
        kind="bundle",
        licence=bundle.record.source.licence,
        bundle=bundle,
    )
