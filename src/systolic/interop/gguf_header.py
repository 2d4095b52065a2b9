"""The header of a GGUF file: metadata and places of tensors, without the tensors.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here rather than by the package ``gguf``,
which makes an array of each of the 100,000 words of a vocabulary and takes seconds.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
"""Kinds of numbers, in :mod:`struct`'s words."""
ALIGNMENT = 32
"""Of tensors, where ``general.alignment`` does not say."""
MOST_DIMS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufPlace:
    """A tensor's place in a file."""

    shape: tuple[int, ...]
    """Outermost dim first."""
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""
    offset: int
    """Of its first byte in the file."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says of its model."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufPlace]

    @classmethod
    def of(cls, path: Path) -> "GgufHeader":
        """The header of a file.

        Raises:
            ValueError: the file is none, or damaged.
        """
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC):
                raise ValueError("it is too short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(content).header()


class _Cursor:
    """A place in a file that moves over what is read."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def header(self) -> GgufHeader:
        if self.taken(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self.number("<I")) not in VERSIONS:
            raise ValueError(f"version {version} is not known")
        num_tensors, num_fields = self.number("<Q"), self.number("<Q")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self.text()
            if name in fields:
                raise ValueError(f"it has two fields {name}")
            fields[name] = self.value(self.number("<I"))
        infos = [self._info() for _ in range(num_tensors)]
        unit = int(fields.get("general.alignment", ALIGNMENT))
        start = -(-self.at // unit) * unit
        tensors: dict[str, GgufPlace] = {}
        for name, shape, kind, offset, size in infos:
            if name in tensors:
                raise ValueError(f"it has two tensors {name}")
            if start + offset + size > len(self.content):
                raise ValueError(f"it ends within {name}")
            tensors[name] = GgufPlace(shape=shape, kind=kind, offset=start + offset, bytes=size)
        return GgufHeader(fields=fields, tensors=tensors)

    def _info(self) -> tuple[str, tuple[int, ...], Any, int, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dims = self.text(), self.number("<I")
        if dims > MOST_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        kind = GGMLQuantizationType(self.number("<I"))
        block, size = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        return name, shape, kind, self.number("<Q"), elements // block * size

    def taken(self, count: int) -> bytes:
        found = self.content[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("it ends within its header")
        self.at += count
        return found

    def number(self, kind: str) -> Any:
        (found,) = struct.unpack(kind, self.taken(struct.calcsize(kind)))
        return found

    def text(self) -> str:
        return self.taken(self.number("<Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(self.number("<I"), self.number("<Q"))
        if kind not in SCALARS:
            raise ValueError(f"a field is of the unknown kind {kind}")
        return self.number(SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if count > len(self.content):
            raise ValueError("it ends within its header")
        if kind in SCALARS and kind != BOOL:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self.taken(count * dtype.itemsize), dtype).tolist()
        read: Callable[[], Any] = self.text if kind == STRING else lambda: self.value(kind)
        return [read() for _ in range(count)]
