"""Content of bundle.json as values, the job of a Bundle that was a run, and quantized matrices as the tensors of its files."""

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from systolic.core.errors import DataError, OptionError, RunError, SystolicError
from systolic.core.files import canonical
from systolic.job import (
    Adapter,
    Data,
    Job,
    Layout,
    MatrixFormat,
    Model,
    Quantization,
    Task,
    WeightFormat,
)
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.runs.bundle.tensors import MappedTensor
from systolic.runs.job_record import job_from_json, types_of

PACKED = "uint8"
"""Dtype that two codes of 4 bits are stored in, the one at the even place in the low half."""
KIND = "systolic-bundle"
FORMAT = 2
"""Raised when the files change in a way that older versions misread; 2 has quantized matrices, or a job of its own."""
PLAIN_FORMAT = 1
"""Format of a Bundle with neither, which older versions read."""
DIGEST = "digest"
"""The entry with the digest of all others."""
PACKAGES = ("systolic", "jax", "jaxlib", "flax", "numpy")
"""Packages whose versions are recorded."""
MODEL = "model"
"""The field that a Bundle has beside its job."""
OWN = "systolic."


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


class FileRecord(msgspec.Struct, frozen=True):
    """A file of a Bundle."""

    bytes: int
    sha256: str


class ImportedFrom(msgspec.Struct, frozen=True, omit_defaults=False):
    """Source of a Bundle."""

    kind: str
    """``hugging-face``, ``gguf``, ``run`` …"""
    name: str
    digest: str
    """Fingerprint of its files."""
    licence: str | None = None


class RecipeRecord(msgspec.Struct, frozen=True):
    """The recipe of a run."""

    name: str
    """Name that the user gave."""
    options: dict[str, Any]


class EvaluationRecord(msgspec.Struct, frozen=True):
    """Metrics of the weights of a Bundle, measured before they were written."""

    on: str
    """Split of the run's data, or the name of other data."""
    metrics: dict[str, float | None]
    """Means by name; ``None`` for what is no number."""
    step: int
    """Training step of the weights."""
    batches: int | None = None
    """Batches that were read."""
    of: int | None = None
    """Batches of the split; ``None`` where that is unknown."""
    data: str | None = None
    """Digest of the split's data, see ``data``; ``None`` where the split comes out of the training split's files."""
    before: dict[str, float | None] | None = None
    """Metrics of the weights before quantization on the same batches; ``None`` for weights that are not quantized."""


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a record has them: ``None`` for what is no number."""
    return {name: number if math.isfinite(number) else None for name, number in metrics.items()}


class Recorded(msgspec.Struct, frozen=True):
    """Inputs with the model's outputs for them."""

    file: str
    precision: str
    """Compute dtype under which the outputs were made."""
    tolerance: float
    """Largest difference of a replay over the largest recorded output."""
    platform: str
    """``cpu``, ``gpu`` or ``tpu``."""


class BundleHead(msgspec.Struct, frozen=True):
    """Entries of a bundle.json of any version, which tell whether this one reads it."""

    kind: Any = None
    format: Any = None
    systolic: Any = None
    """Version that wrote it."""


class BundleRecord(msgspec.Struct, frozen=True):
    """Content of bundle.json."""

    kind: str
    format: int
    systolic: str
    """Version that wrote it."""
    model: dict[str, Any]
    """``type`` and fields."""
    source: ImportedFrom
    dtype: str
    """Numpy name of the dtype of most weights."""
    files: dict[str, FileRecord]
    parity: dict[str, Any] | None = None
    """Largest and mean differences from the source framework's outputs; ``None`` where none were computed."""
    quantization: dict[str, QuantizedRecord] = {}
    """Matrices that are stored as codes and scales, by the paths of their parameters."""
    versions: dict[str, str] = {}
    """Versions of Python and of the packages that wrote it."""
    job: dict[str, Any] | None = None
    """The job of a run, less its model: task, data, precision, batch …; ``None`` for a model of another library."""
    types: dict[str, str] = {}
    """Dotted fields of the job to the full names of their classes."""
    recipe: RecipeRecord | None = None
    """``None`` for what no recipe made."""
    data: dict[str, dict[str, Any]] = {}
    """By split: fingerprint of the data that the run was trained and evaluated on."""
    evaluations: list[EvaluationRecord] = []
    recorded: Recorded | None = None
    """Inputs to replay; ``None`` where none were recorded."""
    digest: str | None = None
    """SHA-256 of all other entries; ``None`` in Bundles of versions that wrote none."""


def carried(record: BundleRecord) -> dict[str, Any]:
    """Record of a Bundle that is made from another one, apart from its weights."""
    return {
        "job": record.job,
        "types": record.types,
        "recipe": record.recipe,
        "data": record.data,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of :data:`PACKAGES`, those that are installed."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def seal(plain: Mapping[str, Any]) -> str:
    """Digest of a bundle.json's entries, less that of the digest itself."""
    rest = {name: value for name, value in plain.items() if name != DIGEST}
    return hashlib.sha256(canonical(rest)).hexdigest()


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle.json with its digest."""
    return {**plain, DIGEST: seal(plain)}


def write_job(job: Job, run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A job less its model, layout, start and adapter, as JSON, and the types of its parts.

    Args:
        job: Of the run.
        run: The run, for messages.

    Raises:
        OptionError: a part of it is code, or data in memory.
    """
    whole = replace(job, layout=Layout(), adapter=Adapter(), start=None)
    types = types_of(whole)
    for part, name in types.items():
        if not name.startswith(OWN):
            raise OptionError(
                f"the {part} of {run} is {name.rpartition('.')[2]}, code of its recipe, and a Bundle holds no code; systolic predict, eval and serve take the run itself, and systolic export {run} --to stablehlo writes what it computes without the code"
            )
    plain = json.loads(json.dumps(whole.to_json()))
    if _reads_as_another(plain, types, whole, run):
        raise OptionError(
            f"the data of {run} is {type(job.data).__name__} in memory, which a Bundle does not hold; use the run itself, or train on files"
        )
    own = {name: value for name, value in plain.items() if name != MODEL}
    return own, {name: kind for name, kind in types.items() if _part(name) != MODEL}


def _reads_as_another(
    plain: Mapping[str, Any], types: Mapping[str, str], job: Job, run: Path
) -> bool:
    try:
        return job_from_json(plain, types, run) != job
    except RunError:
        return True


def read_job(record: BundleRecord, model: Model, file: Path) -> Job | None:
    """The job of a Bundle; ``None`` where it has none.

    Args:
        record: The content of its bundle.json.
        model: Its model.
        file: The bundle.json, for messages.

    Raises:
        DataError: the job does not read in this version, or has a type that is no task or data.
    """
    if record.job is None:
        return None
    plain = {**record.job, MODEL: dict(record.model)}
    own = f"{type(model).__module__}.{type(model).__qualname__}"
    try:
        job = job_from_json(plain, {**record.types, MODEL: own}, file)
    except (SystolicError, KeyError, TypeError) as error:
        reason = str(error).partition(";")[0] if isinstance(error, SystolicError) else repr(error)
        raise DataError(
            f"the job in {file} can't be read ({reason}); export the run again with this version"
        ) from error
    if not isinstance(job.task, Task) or not isinstance(job.data, Data):
        raise DataError(f"the job in {file} has no task or no data; export the run again")
    return replace(job, model=model)


def _part(name: str) -> str:
    return name.partition(".")[0]
