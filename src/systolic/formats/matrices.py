"""Matrices of a model that may be quantized: their formats, the bytes and the tensors of these."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from systolic.core.errors import OptionError, nearest
from systolic.core.units import with_article
from systolic.formats.source import Source
from systolic.formats.weights import structure_of
from systolic.job import Job, MatrixFormat, Model, Quantization, WeightFormat
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.adapters import CONVOLVED, EXPERTS, STACKED, factored_of, inputs_of
from systolic.models.quantized.activations import factors_shape, largest_shape
from systolic.models.quantized.codes import SCALES_DTYPE, scales_shape
from systolic.models.quantized.placement import fitting
from systolic.runs.bundle.record import PACKED
from systolic.runs.bundle.tensors import TensorSpec
from systolic.steps.network import ModelStructure

SCALE_BYTES = jnp.dtype(SCALES_DTYPE).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A parameter that may be quantized."""

    path: str
    shape: tuple[int, ...]
    stacked: bool
    """Whether its first dim is of layers."""
    inputs: tuple[int, ...]
    """Dims that products sum over."""
    dtype: np.dtype
    """Dtype in the source."""

    fewest_bits: int = 4
    """Fewest bits of its codes."""
    watched: bool
    """Whether :func:`systolic.quantizing.calibration.moments_of` sees second moments of its inputs: not those of convolutions and experts."""
    factored: tuple[int, ...] = ()
    """Dims whose inputs have factors where activations are rounded too; () where they stay."""

    def how(self, wanted: MatrixFormat) -> MatrixFormat:
        """See :func:`systolic.models.quantized.placement.fitting`."""
        size, factored = self.shape[self.inputs[-1]], bool(self.factored)
        return fitting(wanted, size, self.fewest_bits, factored=factored)

    @property
    def moments_shape(self) -> tuple[int, ...]:
        """[inputs, inputs], after the number of layers of a stack."""
        count = math.prod(self.shape[dim] for dim in self.inputs)
        return (*self.shape[: int(self.stacked)], count, count)

    @property
    def factors_shape(self) -> tuple[int, ...]:
        """Shape of the factors of its inputs."""
        return factors_shape(self.shape, self.factored, self.stacked)

    @property
    def largest_shape(self) -> tuple[int, ...]:
        """Shape of the largest magnitudes of its inputs."""
        return largest_shape(self.shape, self.factored, self.stacked)

    def bytes(self, how: MatrixFormat | None) -> int:
        """Bytes of codes, scales and factors in a format, or of the matrix as it is."""
        count = math.prod(self.shape)
        if how is None:
            return count * self.dtype.itemsize
        scales = math.prod(scales_shape(self.shape, self.inputs, how))
        if how.format.activations:
            scales += math.prod(self.factors_shape)
        return count * how.format.bits // 8 + SCALE_BYTES * scales


def matrices_in(source: Source) -> dict[str, Matrix]:
    """The parameters of a source that may be quantized, by path.

    Raises:
        OptionError: it has none, or they are quantized already.
    """
    if source.quantization:
        (path, how), *_ = source.quantization.matrices
        raise OptionError(
            f"{source.path} is quantized already ({path} in {how}); quantize the model that it was made from"
        )
    dtypes = source.dtypes()
    known = _matrices(source.model, structure_of(source.model), dtypes)
    matrices = {path: matrix for path, matrix in known.items() if path in dtypes}
    if not matrices:
        raise OptionError(
            f"{source.path} is {with_article(type(source.model).__name__)}, which has no matrices to quantize here"
        )
    return matrices


def _matrices(
    model: Model, structure: ModelStructure, dtypes: Mapping[str, np.dtype]
) -> dict[str, Matrix]:
    """The parameters of a model that may be quantized, float32 where nothing else is known."""
    matrices: dict[str, Matrix] = {}
    for path, axes in structure.axes.items():
        if axes is None or not model.quantizable(path):
            continue
        shape, stacked = structure.params[path].shape, axes[0] in STACKED
        if len(shape) - stacked < 2:
            continue
        matrices[path] = Matrix(
            path=path,
            shape=shape,
            stacked=stacked,
            inputs=inputs_of(axes),
            dtype=dtypes.get(path, np.dtype(np.float32)),
            fewest_bits=model.fewest_bits(path),
            watched=EXPERTS not in axes and axes[-1] != CONVOLVED,
            factored=factored_of(axes),
        )
    return matrices


def matrices_of_model(model: Model) -> dict[str, Matrix]:
    """The parameters of a model that may be quantized, by path, float32 each; {} where it has none."""
    return _matrices(model, structure_of(model), {})


def whole(model: Model, kind: WeightFormat) -> Quantization:
    """All matrices of a model in a format, with its usual groups."""
    how = MatrixFormat(format=kind, group=kind.group)
    matrices = matrices_of_model(model)
    return Quantization.of({path: matrix.how(how) for path, matrix in matrices.items()})


def saved_bytes(job: Job, item: int) -> int:
    """Bytes that a job's quantized matrices take less than in elements of ``item`` bytes."""
    if not job.quantization:
        return 0
    matrices = matrices_of_model(job.model)
    return sum(
        math.prod(matrices[path].shape) * item - matrices[path].bytes(how)
        for path, how in job.quantization.matrices
    )


def formats_of(
    matrices: Mapping[str, Matrix], wanted: MatrixFormat, keep: Sequence[str]
) -> dict[str, MatrixFormat]:
    """Formats of all matrices but those whose path, or a part of it, fits a pattern of ``keep``.

    Raises:
        OptionError: a pattern fits none, or all are kept.
    """
    kept: set[str] = set()
    for pattern in keep:
        fitting = {path for path in matrices if _fits(path, pattern)}
        if not fitting:
            raise OptionError(
                f"--keep {pattern} fits none of the matrices{nearest(pattern, matrices)}; they are {', '.join(matrices)}"
            )
        kept |= fitting
    if len(kept) == len(matrices):
        raise OptionError("--keep leaves no matrix to quantize; keep fewer")
    return {path: matrix.how(wanted) for path, matrix in matrices.items() if path not in kept}


def _fits(path: str, pattern: str) -> bool:
    """Whether a pattern is the path, one of its parts, or fits the whole as in a shell."""
    return pattern in path.split("/") or fnmatch.fnmatchcase(path, pattern)


def planned_tensors(
    source: Source, matrices: Mapping[str, Matrix], formats: Mapping[str, MatrixFormat]
) -> list[TensorSpec]:
    """Tensors of the Bundle: codes and scales of what is quantized, all others as they are."""
    structure = structure_of(source.model)
    shapes = {
        path: array.shape for path, array in {**structure.params, **structure.model_state}.items()
    }
    specs: list[TensorSpec] = []
    for path, dtype in source.dtypes().items():
        if path not in formats:
            specs.append(TensorSpec(name=path, shape=shapes[path], dtype=dtype))
            continue
        matrix, how = matrices[path], formats[path]
        narrow = how.format.bits == 4
        last = -(-matrix.shape[-1] // 2) if narrow else matrix.shape[-1]
        kind = np.dtype(PACKED if narrow else how.format.dtype)
        codes = TensorSpec(name=f"{path}/{CODES}", shape=(*matrix.shape[:-1], last), dtype=kind)
        beside = {SCALES: scales_shape(matrix.shape, matrix.inputs, how)}
        if how.format.activations:
            beside[INPUTS] = matrix.factors_shape
        specs.append(codes)
        specs += [
            TensorSpec(name=f"{path}/{name}", shape=shape, dtype=np.dtype(SCALES_DTYPE))
            for name, shape in beside.items()
        ]
    return specs
