"""Quantized matrices in the files of a Bundle: codes, those of 4 bits two to a byte, scales and factors of inputs, a tensor each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from systolic.core.errors import DataError, OptionError
from systolic.job import MatrixFormat, Quantization, WeightFormat
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.runs.bundle.tensors import MappedTensor

PACKED = "uint8"
"""Dtype that two codes of 4 bits are stored in, the one at the even place in the low half."""


class QuantizedRecord(msgspec.Struct, frozen=True):
    """A quantized matrix in bundle.json, by the path of its parameter."""

    format: str
    """``int8``, ``int4``, ``fp8``, ``nf4`` or ``w8a8``."""
    group: int
    """Inputs that share a scale; 0 for all of an output channel."""
    shape: list[int]
    dtype: str
    """Numpy name of the dtype that the matrix had."""

    @classmethod
    def of(cls, how: MatrixFormat, shape: tuple[int, ...], dtype: np.dtype) -> "QuantizedRecord":
        """Record of a matrix in a format."""
        return cls(how.format.value, how.group, list(shape), dtype.name)

    def how(self) -> MatrixFormat:
        """The format.

        Raises:
            ValueError: it is not known.
            OptionError: its group is out of range.
        """
        return MatrixFormat(format=WeightFormat(self.format), group=self.group)


def quantization_of(records: Mapping[str, QuantizedRecord]) -> Quantization:
    """Formats by path."""
    return Quantization.of({path: record.how() for path, record in records.items()})


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits [..., n] as uint8[..., ceil(n / 2)]; wider ones as they are."""
    if codes.dtype.name not in ("int4", "uint4"):
        return codes
    raw = codes.astype(np.int8).view(np.uint8) & 15
    if raw.shape[-1] % 2:
        raw = np.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, 1)])
    return raw[..., ::2] | raw[..., 1::2] << 4


def unpacked(raw: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
    """Codes [..., count] of uint8[..., ceil(count / 2)]; inverse of :func:`packed`."""
    both = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)[..., :count]
    if dtype.name == "int4":
        both = ((both ^ 8).astype(np.int8) - 8).astype(np.int8)
    return both.astype(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTensor:
    """Codes of 4 bits in a file, read as :class:`MappedTensor` is."""

    raw: MappedTensor
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.raw.nbytes

    def read(self) -> np.ndarray:
        """All codes."""
        return unpacked(self.raw.read(), self.shape[-1], self.dtype)

    def part(self, index: tuple[slice, ...] | None, dtype: np.dtype) -> np.ndarray:
        """See :meth:`MappedTensor.part`."""
        index = index if index is not None else (slice(None),) * len(self.shape)
        rows = self.raw.part((*index[:-1], slice(None)), np.dtype(np.uint8))
        return unpacked(rows, self.shape[-1], self.dtype)[..., index[-1]].astype(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredTensor:
    """A quantized matrix of a file as the floats that its codes stand for."""

    codes: MappedTensor | PackedTensor
    scales: MappedTensor
    inputs: MappedTensor | None = None
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its codes, scales and factors in the file."""
        return self.codes.nbytes + self.scales.nbytes + (self.inputs.nbytes if self.inputs else 0)

    @property
    def stacked(self) -> bool:
        """Whether the first dim is of matrices that have scales of their own; that of an embedding is of rows."""
        return len(self.shape) > 2 and self.scales.shape[0] == self.shape[0]

    def read(self) -> np.ndarray:
        """The whole matrix."""
        inputs = None if self.inputs is None else self.inputs.read()
        return self._restored(self.codes.read(), self.scales.read(), inputs)

    def pieces(self) -> Iterator[np.ndarray]:
        """Consecutive pieces of the first dim: rows of a stack, each of whose matrices has its own scales."""
        if not self.stacked:
            yield self.read()
            return
        for row in range(self.shape[0]):
            cut = (slice(row, row + 1), *(slice(None) for _ in self.shape[1:]))
            codes, scales, inputs = (
                None if tensor is None else tensor.part(cut, tensor.dtype)
                for tensor in (self.codes, self.scales, self.inputs)
            )
            assert codes is not None
            assert scales is not None
            yield self._restored(codes, scales, inputs)[0]

    def part(self, index: tuple[slice, ...] | None, dtype: np.dtype) -> np.ndarray:
        """See :meth:`MappedTensor.part`."""
        out = np.empty(self.shape, dtype)
        if self.stacked:
            for row, piece in enumerate(self.pieces()):
                out[row] = piece
        else:
            out[...] = self.read()
        return out if index is None else out[index]

    def _restored(
        self, codes: np.ndarray, scales: np.ndarray, inputs: np.ndarray | None
    ) -> np.ndarray:
        import jax.numpy as jnp

        from systolic.models.quantized.codes import Quantized

        quantized = Quantized(
            codes=jnp.asarray(codes),
            scales=jnp.asarray(scales),
            inputs=None if inputs is None else jnp.asarray(inputs),
        )
        return np.asarray(quantized.restored(np.float32)).astype(self.dtype)


StoredTensor = MappedTensor | PackedTensor
AnyTensor = MappedTensor | RestoredTensor


def views(
    stored: Mapping[str, MappedTensor], records: Mapping[str, QuantizedRecord], where: Any
) -> tuple[dict[str, AnyTensor], dict[str, StoredTensor]]:
    """Tensors of files by the paths of the plain model, and codes and scales of its quantized matrices by theirs.

    Args:
        stored: Tensors by name.
        records: Quantized matrices.
        where: The file that says so, for an error.

    Raises:
        DataError: a matrix lacks its codes or scales, or they have other sizes than it says.
    """
    plain: dict[str, AnyTensor] = dict(stored)
    parts: dict[str, StoredTensor] = {}
    for path, record in records.items():
        names = f"{path}/{CODES}", f"{path}/{SCALES}"
        codes, scales = (plain.pop(name, None) for name in names)
        try:
            how = record.how()
        except (ValueError, OptionError) as error:
            raise DataError(
                f"{where} has {path} in a format that is not known ({error}); upgrade Systolic, or quantize the model again"
            ) from error
        shape = tuple(record.shape)
        narrow = how.format.bits == 4
        wanted = (*shape[:-1], -(-shape[-1] // 2)) if narrow else shape
        dtype = PACKED if narrow else how.format.dtype
        if not isinstance(codes, MappedTensor) or not isinstance(scales, MappedTensor):
            raise DataError(
                f"{where} says {path} is quantized, and its codes or scales are missing"
            )
        fits = [size % count == 0 for size, count in zip(shape, scales.shape, strict=False)]
        if (codes.shape, codes.dtype.name) != (wanted, dtype) or not (
            all(fits) and len(scales.shape) == len(shape)
        ):
            raise DataError(
                f"{where} says {path} is {how} of {shape}, and its codes are {codes.dtype.name}{list(codes.shape)}; quantize the model again"
            )
        stored_codes: StoredTensor = codes
        if narrow:
            stored_codes = PackedTensor(raw=codes, shape=shape, dtype=np.dtype(how.format.dtype))
        parts |= {names[0]: stored_codes, names[1]: scales}
        inputs = _factors(plain, path, record, where) if how.format.activations else None
        if inputs is not None:
            parts[f"{path}/{INPUTS}"] = inputs
        plain[path] = RestoredTensor(
            codes=stored_codes, scales=scales, inputs=inputs, dtype=np.dtype(record.dtype)
        )
    return plain, parts


def _factors(
    plain: dict[str, AnyTensor], path: str, record: QuantizedRecord, where: Any
) -> MappedTensor:
    """The factors of a matrix's inputs, taken out of the plain tensors."""
    factors = plain.pop(f"{path}/{INPUTS}", None)
    sizes = () if factors is None else factors.shape
    if not isinstance(factors, MappedTensor) or not (
        len(sizes) == len(record.shape)
        and all(size in (1, whole) for size, whole in zip(sizes, record.shape, strict=True))
    ):
        raise DataError(
            f"{where} says {path} is {record.format} of {tuple(record.shape)}, and the factors of its inputs are missing or of another size; quantize the model again"
        )
    return factors
