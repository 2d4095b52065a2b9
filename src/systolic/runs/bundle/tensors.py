"""Safetensors files: tensors mapped when they are read, and files written one tensor at a time.

The format is a length, a JSON header and the bytes (https://github.com/huggingface/safetensors#format).
The ``safetensors`` package reads no float8 into numpy, copies each tensor, keeps a file mapped as long as
it is open, and writes from memory only, so the format is read and written here.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from systolic.core.errors import DataError, NotFoundError
from systolic.core.files import refuse_pointer
from systolic.models.mapping import ALIGNMENT, aligned

SUFFIX = ".safetensors"
HEADER_LIMIT = 100_000_000
"""Largest header in bytes, the limit of the ``safetensors`` package."""
CHUNK_BYTES = 1 << 26
"""Bytes of a tensor that are mapped at a time where rows of it are copied."""

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Names of dtypes in a header."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of a file, mapped into memory while what :meth:`read` returned is in use."""

    file: Path
    offset: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """A read-only view of the file.

        Raises:
            DataError: the file has gone or was cut since it was opened.
        """
        if not self.nbytes:
            return np.zeros(self.shape, self.dtype)
        try:
            raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.nbytes,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.file} has changed since it was opened ({error}); start again"
            ) from error
        return raw.view(self.dtype).reshape(self.shape)

    def part(self, index: tuple[slice, ...] | None, dtype: np.dtype) -> np.ndarray:
        """A part of the tensor in another dtype, aligned so that JAX on a CPU takes it without a copy.

        Rows of the first dim are mapped :data:`CHUNK_BYTES` at a time.
        """
        index = index if index is not None else (slice(None),) * len(self.shape)
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, self.shape, strict=True)]
        out = aligned(tuple(map(len, bounds)), dtype)
        if not self.shape:
            out[...] = self.read()
            return out
        row_bytes = self.nbytes // max(self.shape[0], 1)
        rows = max(1, CHUNK_BYTES // max(row_bytes, 1))
        first, last = bounds[0].start, bounds[0].stop
        for start in range(first, last, rows):
            stop = min(start + rows, last)
            offset, shape = self.offset + start * row_bytes, (stop - start, *self.shape[1:])
            chunk = replace(self, offset=offset, shape=shape).read()
            out[start - first : stop - first] = chunk[(slice(None), *index[1:])]
        return out


def read_header(file: Path) -> tuple[dict[str, MappedTensor], dict[str, str]]:
    """Tensors of a safetensors file by name, and its metadata; reads the header only.

    Raises:
        NotFoundError: there is no such file.
        DataError: it is no safetensors file, is cut short, or has a dtype without an array type.
    """
    refuse_pointer(file)
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise DataError(
                    f"{file} is no safetensors file, or is cut short ({size} bytes); copy it again"
                )
            header = json.loads(opened.read(length))
    except OSError as error:
        raise NotFoundError(f"{file} can't be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise DataError(f"the header of {file} is damaged ({error}); copy it again") from error
    if not isinstance(header, dict):
        raise DataError(f"the header of {file} is no JSON object; copy it again")
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _tensor(file, name, about, 8 + length, size) for name, about in header.items()}
    _check_covered(file, tensors, 8 + length, size)
    return tensors, metadata


def _check_covered(file: Path, tensors: Mapping[str, MappedTensor], start: int, size: int) -> None:
    """Whether the tensors follow each other and fill a file, as the format says.

    Raises:
        DataError: two overlap, or bytes belong to none.
    """
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            wrong = "shares bytes with another tensor" if tensor.offset < end else "follows a gap"
            raise DataError(f"the header of {file} is damaged: {name} {wrong}; copy it again")
        end += tensor.nbytes
    if end != size:
        raise DataError(
            f"{file} has {size} bytes and its tensors end at {end}; it is damaged, copy it again"
        )


def _tensor(file: Path, name: str, about: Any, start: int, size: int) -> MappedTensor:
    try:
        kind, shape = about["dtype"], tuple(int(dim) for dim in about["shape"])
        first, last = (int(offset) for offset in about["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"the header of {file} is damaged at {name}; copy it again") from error
    if kind not in DTYPES:
        raise DataError(
            f"{name} in {file} has the dtype {kind}, known are {', '.join(DTYPES)}; convert it to one of these"
        )
    tensor = MappedTensor(file=file, offset=start + first, shape=shape, dtype=DTYPES[kind])
    if min(shape, default=0) < 0 or first < 0 or last - first != tensor.nbytes:
        raise DataError(f"the header of {file} is damaged at {name}; copy it again")
    if start + last > size:
        raise DataError(
            f"{file} has {size} bytes and {name} ends at {start + last}; it is cut short, copy it again"
        )
    return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor that will be written: its place in the header."""

    name: str
    shape: Sequence[int]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    out: IO[bytes],
    planned: Sequence[TensorSpec],
    arrays: Iterable[Iterator[np.ndarray] | np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file, each tensor as it comes.

    Args:
        out: Binary file.
        planned: Tensors in order.
        arrays: The tensors in the same order; one may come as consecutive pieces of its first dims.
        metadata: Strings of the header.

    Raises:
        OSError: the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in planned:
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    out.write(len(text).to_bytes(8, "little") + text)
    for spec, pieces in zip(planned, arrays, strict=True):
        written = 0
        for piece in [pieces] if isinstance(pieces, np.ndarray) else pieces:
            assert piece.dtype == spec.dtype, (spec.name, piece.dtype, spec.dtype)
            flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            out.write(flat.data)
            written += flat.nbytes
            del piece, flat  # before the next one is made
        assert written == spec.nbytes, (spec.name, written, spec.nbytes)
