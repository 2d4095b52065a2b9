"""GGUF files of llama.cpp: metadata as a config.json, tensors dequantized one at a time under transformers' names.

What is particular to an architecture is in :mod:`systolic.formats.gguf.reader`.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from systolic.core.errors import DataError, OptionError, SystolicError, misspelt
from systolic.formats.gguf.header import GgufPlace
from systolic.formats.gguf.reader import (
    ARCHITECTURES,
    FREQUENCIES,
    NONE,
    Architecture,
    Edit,
    Reader,
)
from systolic.formats.source import TransformersSource
from systolic.models.decoder.config import Decoder
from systolic.models.families import family

PLAIN = ("F32", "F16", "BF16")
"""Kinds of numbers that are read as they are."""
LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
EMBEDDING, OUTPUT, LAST_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
WHOLE = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT: "lm_head.weight",
    LAST_NORM: "model.norm.weight",
}
"""Tensors outside the layers to transformers' names."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file, mapped and dequantized when it is read."""

    file: Path
    offset: int
    stored: tuple[int, ...]
    """Shape of the stored bytes."""
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""
    shape: tuple[int, ...]
    dtype: np.dtype
    change: Edit

    def read(self) -> np.ndarray:
        """The tensor as transformers has it."""
        import gguf

        raw = np.memmap(self.file, np.uint8, "r", self.offset, self.stored)
        if self.kind.name in PLAIN:
            return self.change(raw.view(self.dtype))
        return self.change(gguf.quants.dequantize(raw, self.kind))


def open_gguf(path: Path) -> TransformersSource:
    """A GGUF file as a source; its tokenizer is rebuilt once and kept in the cache.

    Raises:
        MissingExtraError: the package ``gguf`` or ``tokenizers`` is not installed.
        DataError: the file is damaged, or tensors are missing or unknown.
        OptionError: an architecture, a tokenizer or a field that is not known.
    """
    reader = Reader(path)
    try:
        return _opened(reader)
    except SystolicError:
        raise
    except (
        Exception
    ) as error:  # A file may say anything; the library of tokenizers raises bare Exception.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"{path} has metadata that contradict themselves or are damaged ({reason}); copy or convert it again"
        ) from error


def _opened(reader: Reader) -> TransformersSource:
    from systolic.formats.gguf.tokenizer import tokenizer_folder, unknown_ids

    path, kind = reader.path, reader.need("general.architecture")
    if kind not in ARCHITECTURES:
        raise OptionError(
            f"{path} has the architecture {str(kind)[:60]!r}{misspelt(str(kind), ARCHITECTURES)}; read are {', '.join(ARCHITECTURES)}: import the Hugging Face folder of this model"
        )
    architecture = ARCHITECTURES[kind]
    config = architecture.config(reader.fields, reader)
    known = family(config, str(path))
    model, conversion = known.model(config), known.conversion(config)
    assert isinstance(model, Decoder)
    tensors = _tensors(reader, architecture, model)
    conversion.check(tensors, str(path))
    licence = reader.fields.get("general.license")
    return TransformersSource(
        path=path,
        model=model,
        config=config,
        kind="gguf",
        tensors=tensors,
        conversion=conversion,
        weight_files=reader.files,
        folder=tokenizer_folder(path, reader.fields),
        licence=licence if isinstance(licence, str) else None,
        notes=unknown_ids(path, reader.fields),
    )


def _tensors(reader: Reader, architecture: Architecture, model: Decoder) -> dict[str, GgufTensor]:
    """Tensors by transformers' names; unknown ones keep theirs, for the check to name."""
    changes = architecture.changes(model)
    made = {}
    for theirs, tensor in reader.tensors.items():
        if theirs == FREQUENCIES:
            continue  # part of the configuration
        name, change = WHOLE.get(theirs, theirs), NONE
        if theirs == LAST_NORM:
            change = architecture.norm
        elif (parts := LAYER.fullmatch(theirs)) and parts[2] in architecture.layer:
            part = architecture.layer[parts[2]]
            name, change = f"model.layers.{parts[1]}.{part}.{parts[3]}", changes.get(part, NONE)
        if not _is_read(tensor.kind):
            raise OptionError(
                f"{tensor.file} has {theirs} stored as {tensor.kind.name}, which is not read; convert the model again as F16 or Q8_0"
            )
        made[name] = _tensor(tensor, change.read)
    return made


@lru_cache
def _is_read(kind: Any) -> bool:
    """Whether the package ``gguf`` makes floats of a kind of stored numbers."""
    import gguf

    _, size = gguf.constants.GGML_QUANT_SIZES[kind]
    if kind.name in PLAIN:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (NotImplementedError, ValueError, KeyError):
        return False
    return True


def _tensor(place: GgufPlace, change: Edit) -> GgufTensor:
    kept = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    rows = place.shape[:-1]
    return GgufTensor(
        file=place.file,
        offset=place.offset,
        stored=(*rows, place.bytes // max(math.prod(rows), 1)),
        kind=place.kind,
        shape=place.shape,
        dtype=kept.get(place.kind.name, np.dtype(np.float32)),
        change=change,
    )
