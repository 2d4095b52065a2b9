"""The header of a GGUF file: metadata and places of tensors, without the tensors.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here rather than by the package ``gguf``,
which makes an array of each of the 100,000 words of a vocabulary and takes seconds.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import refuse_pointer

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
"""Kinds of numbers, in :mod:`struct`'s words."""
ALIGNMENT = 32
"""Default of ``general.alignment``, in bytes."""
MOST_DIMS = 8
MOST_DEPTH = 4
"""Lists within lists of a field."""
PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part of a split file, counted from 1 (llama.cpp's ``gguf-split``)."""
COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
"""Fields of a part: parts in all, its own number from 0, and the tensors of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufPlace:
    """A tensor's place in a file."""

    shape: tuple[int, ...]
    """Outermost dim first."""
    kind: Any
    """Quantization (``GGMLQuantizationType``)."""
    offset: int
    """Place of its first byte in the file."""
    bytes: int
    file: Path
    """The file itself, or the part of it that has the tensor."""


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Metadata of a GGUF file, and the places of its tensors."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufPlace]

    @classmethod
    def of(cls, path: Path) -> "GgufHeader":
        """The header of a file.

        Raises:
            ValueError: the file is none, or damaged.
        """
        refuse_pointer(path)
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC):
                raise ValueError("it is too short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(content, path).header()


def read_parts(path: Path) -> tuple[GgufHeader, tuple[Path, ...]]:
    """The header of a file, of all its parts where it is split, and the files; any part names them all.

    Raises:
        NotFoundError: a part is missing.
        DataError: the parts are not those of one file.
        ValueError: a file is none, or damaged.
    """
    first = GgufHeader.of(path)
    count = first.fields.get(COUNT, 1)
    if not isinstance(count, int) or count <= 1:
        return first, (path,)
    number = first.fields.get(NUMBER)
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise DataError(
            f"{path} is one of {count} parts of a split model (its {NUMBER} is {number}), and its name is not that of a part, such as model-00001-of-{count:05}.gguf; give the parts their names back"
        )
    files = [
        path.with_name(f"{named['name']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)
    ]
    if missing := [file.name for file in files if not file.is_file()]:
        raise NotFoundError(
            f"{path} is one of {count} parts of a split model, and {len(missing)} are missing beside it, first {missing[0]}; copy all parts into one folder"
        )
    headers = [first if file == path else _part(file) for file in files]
    places: dict[str, GgufPlace] = {}
    for place, (file, header) in enumerate(zip(files, headers, strict=True)):
        if header.fields.get(COUNT) != count or header.fields.get(NUMBER) != place:
            raise DataError(
                f"{file} says that it is part {header.fields.get(NUMBER)} (from 0) of {header.fields.get(COUNT)}, and its name says {place} of {count}; copy the parts again"
            )
        if twice := next((name for name in header.tensors if name in places), None):
            raise DataError(f"{file} has {twice}, which another part has too; copy the parts again")
        places |= header.tensors
    whole = headers[0].fields.get(TENSORS, len(places))
    if whole != len(places):
        raise DataError(
            f"the {count} parts of {path} have {len(places)} tensors and should have {whole}; copy them again"
        )
    return GgufHeader(fields=headers[0].fields, tensors=places), tuple(files)


def _part(file: Path) -> GgufHeader:
    try:
        return GgufHeader.of(file)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{file} is no intact part of a GGUF file ({error}); copy it again"
        ) from error


class _Cursor:
    """A place in a file that moves over what is read."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content, self.at, self.path = content, 0, path

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
        unit = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(unit, int) or unit < 1:
            raise ValueError(f"general.alignment is {str(unit)[:40]}")
        start = -(-self.at // unit) * unit
        tensors: dict[str, GgufPlace] = {}
        for name, shape, kind, offset, size in infos:
            if name in tensors:
                raise ValueError(f"it has two tensors {name}")
            if start + offset + size > len(self.content):
                raise ValueError(f"it ends within {name}")
            tensors[name] = GgufPlace(
                shape=shape, kind=kind, offset=start + offset, bytes=size, file=self.path
            )
        return GgufHeader(fields=fields, tensors=tensors)

    def _info(self) -> tuple[str, tuple[int, ...], Any, int, int]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name, dims = self.text(), self.number("<I")
        if dims > MOST_DIMS:
            raise ValueError(f"{name} has {dims} dims")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        at, number = self.at, self.number("<I")
        if number not in GGML_QUANT_SIZES:
            raise ValueError(f"{name[:80]} is of the unknown kind {number}, at byte {at:,}")
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        return name, shape, kind, self.number("<Q"), elements // block * size

    def taken(self, count: int) -> bytes:
        # Asked before anything is copied: a damaged length may be that of the whole file.
        if count > len(self.content) - self.at:
            raise ValueError("it ends within its header")
        content = self.content[self.at : self.at + count]
        self.at += count
        return content

    def number(self, kind: str) -> Any:
        (number,) = struct.unpack(kind, self.taken(struct.calcsize(kind)))
        return number

    def text(self) -> str:
        content = self.taken(self.number("<Q"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            place = self.at - len(content) + error.start
            raise ValueError(f"damaged at byte {place:,}: text there is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            if depth > MOST_DEPTH:
                raise ValueError("a field is a list of lists of lists")
            return self._array(self.number("<I"), self.number("<Q"), depth + 1)
        if kind not in SCALARS:
            raise ValueError(f"a field is of the unknown kind {kind}")
        return self.number(SCALARS[kind])

    def _array(self, kind: int, count: int, depth: int) -> list[Any]:
        if count > len(self.content) - self.at:
            raise ValueError("it ends within its header")
        if kind in SCALARS and kind != BOOL:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self.taken(count * dtype.itemsize), dtype).tolist()
        read: Callable[[], Any] = self.text if kind == STRING else lambda: self.value(kind, depth)
        return [read() for _ in range(count)]
