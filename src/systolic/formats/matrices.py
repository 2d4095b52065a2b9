"""Matrices of a source in fewer bits: which there are, and their codes and scales written into a Bundle."""

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError, OptionError, nearest
from systolic.formats.source import Source
from systolic.formats.weights import matrices_of, structure_of
from systolic.job import Job, MatrixFormat, Model, Quantization, WeightFormat
from systolic.models.adapters import (
    CODES,
    CONVOLVED,
    EXPERTS,
    INPUTS,
    SCALES,
    STACKED,
    factored_of,
    inputs_of,
)
from systolic.models.quantized.codes import SCALES_DTYPE, Quantized, quantized, scales_shape
from systolic.models.quantized.placement import fitting
from systolic.models.quantized.rounding import compensated, least_error
from systolic.models.quantized.w8a8 import factors_shape, largest_shape, w8a8
from systolic.runs.bundle.folder import BundleDraft
from systolic.runs.bundle.packed import PACKED, QuantizedRecord, packed
from systolic.runs.bundle.tensors import TensorSpec
from systolic.runs.weights import Weights
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
    """Whether :func:`systolic.training.activation_stats.input_moments` sees second moments of its inputs: not those of convolutions and experts."""
    factored: tuple[int, ...] = ()
    """Dims whose inputs have factors where activations are rounded too; () where they stay."""

    def how(self, asked: MatrixFormat) -> MatrixFormat:
        """See :func:`systolic.models.quantized.placement.fitting`."""
        size, factored = self.shape[self.inputs[-1]], bool(self.factored)
        return fitting(asked, size, self.fewest_bits, factored=factored)

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
    matrices = {path: one for path, one in known.items() if path in dtypes}
    if not matrices:
        raise OptionError(
            f"{source.path} is a {type(source.model).__name__}, which has no matrices to quantize here"
        )
    return matrices


def _matrices(
    model: Model, made: ModelStructure, dtypes: Mapping[str, np.dtype]
) -> dict[str, Matrix]:
    """The parameters of a model that may be quantized, float32 where nothing else is known."""
    matrices: dict[str, Matrix] = {}
    for path, axes in made.axes.items():
        if axes is None or not model.quantizable(path):
            continue
        shape, stacked = made.params[path].shape, axes[0] in STACKED
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
    return Quantization.of({path: one.how(how) for path, one in matrices.items()})


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
    matrices: Mapping[str, Matrix], asked: MatrixFormat, keep: Sequence[str]
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
    return {path: matrix.how(asked) for path, matrix in matrices.items() if path not in kept}


def _fits(path: str, pattern: str) -> bool:
    """Whether a pattern is the path, one of its parts, or fits the whole as in a shell."""
    return pattern in path.split("/") or fnmatch.fnmatchcase(path, pattern)


def planned_tensors(
    source: Source, matrices: Mapping[str, Matrix], formats: Mapping[str, MatrixFormat]
) -> list[TensorSpec]:
    """Tensors of the Bundle: codes and scales of what is quantized, all others as they are."""
    structure = structure_of(source.model)
    shapes = {
        path: one.shape for path, one in {**structure.params, **structure.model_state}.items()
    }
    specs: list[TensorSpec] = []
    for path, dtype in source.dtypes().items():
        if path not in formats:
            specs.append(TensorSpec(name=path, shape=shapes[path], dtype=dtype))
            continue
        one, how = matrices[path], formats[path]
        narrow = how.format.bits == 4
        last = -(-one.shape[-1] // 2) if narrow else one.shape[-1]
        kind = np.dtype(PACKED if narrow else how.format.dtype)
        codes = TensorSpec(name=f"{path}/{CODES}", shape=(*one.shape[:-1], last), dtype=kind)
        beside = {SCALES: scales_shape(one.shape, one.inputs, how)}
        if how.format.activations:
            beside[INPUTS] = one.factors_shape
        specs.append(codes)
        specs += [
            TensorSpec(name=f"{path}/{name}", shape=shape, dtype=np.dtype(SCALES_DTYPE))
            for name, shape in beside.items()
        ]
    return specs


class Rounder:
    """Makes codes of a model's matrices.

    Those of 4 bits are fitted to the inputs of their products where these are known, which takes a while, so that they are
    kept: by :data:`Asked`. Matrices that were trained as a format rounds them (``trained``) take the codes that they were trained with. Where
    activations are rounded too, the largest magnitudes of the inputs are known (``moments`` [inputs], after the layers of a stack).
    """

    def __init__(
        self,
        matrices: Mapping[str, Matrix],
        moments: Mapping[str, np.ndarray] | None = None,
        trained: MatrixFormat | None = None,
    ) -> None:
        self.matrices, self.moments = matrices, {} if moments is None else moments
        self._trained = trained
        self._kept: dict[Asked, list[Quantized]] = {}

    def trained(self, path: str, how: MatrixFormat) -> bool:
        """Whether a matrix was trained as a format rounds it, in the same groups."""
        return self._trained is not None and self.matrices[path].how(self._trained) == how

    def codes(
        self, path: str, how: MatrixFormat, pieces: Iterable[np.ndarray | jax.Array]
    ) -> Iterator[Quantized]:
        """Codes and scales of each matrix of a stack, or of the only one.

        Raises:
            DataError: a weight is larger than scales can be.
        """
        for made in self._made(path, how, map(jnp.asarray, pieces)):
            if not np.isfinite(np.asarray(made.scales, np.float32)).all():
                raise DataError(
                    f"weights of {path} are too large for scales in {SCALES_DTYPE}; leave the matrix as it is with --keep {path}"
                )
            yield made

    def _made(
        self, path: str, how: MatrixFormat, pieces: Iterable[jax.Array]
    ) -> Iterator[Quantized]:
        one, asked = self.matrices[path], (path, how)
        inputs = tuple(dim - int(one.stacked) for dim in one.inputs)
        if how.format.activations:
            factored = tuple(dim - int(one.stacked) for dim in one.factored)
            make = _balanced(inputs, factored, how)
            largest = self.moments[path].reshape(-1, one.largest_shape[-1])
            for piece, own in zip(pieces, largest, strict=True):
                yield make(piece, jnp.asarray(own))
            return
        if path not in self.moments or how.format.bits != 4:
            program = _program(inputs, how, self.trained(path, how))
            yield from map(program, pieces)
            return
        if asked not in self._kept:
            moments = self.moments[path].reshape(-1, *one.moments_shape[-2:])
            self._kept[asked] = [
                jax.device_get(compensated(piece, own, inputs, how))
                for piece, own in zip(pieces, moments, strict=True)
            ]
        yield from self._kept[asked]

    def rounded(self, weights: Weights, formats: Mapping[str, MatrixFormat]) -> Weights:
        """Weights with some matrices rounded to what their codes would stand for, in the dtype that they have; as codes where activations are rounded too."""
        params = dict(weights.params)
        for path, how in formats.items():
            value, stacked = params[path], self.matrices[path].stacked
            codes = self.codes(path, how, value if stacked else [value])
            if how.format.activations:
                made: list[Any] = list(codes)
                params[path] = (
                    jax.tree.map(lambda *each: jnp.stack(each), *made) if stacked else made[0]
                )
                continue
            made = [code.restored(value.dtype) for code in codes]
            params[path] = jax.device_put(jnp.stack(made) if stacked else made[0], value.sharding)
        return replace(weights, params=params)


@jax.jit
def _finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """bool[] for each array: whether all of its numbers are finite."""
    return {path: jnp.isfinite(array).all() for path, array in arrays.items()}


def check_finite(weights: Weights) -> None:
    """Refuses weights that are no finite numbers, quantized or not: no code stands for them, and no loss can be measured.

    Raises:
        DataError: there are some.
    """
    arrays = {
        path: array
        for path, array in {**weights.params, **weights.model_state}.items()
        if jnp.issubdtype(array.dtype, jnp.floating)
    }
    for path, finite in jax.device_get(_finite(arrays)).items():
        if not finite:
            raise DataError(
                f"{path} has weights that are NaN or infinite; check the model: what computes with it is no number either"
            )


Asked = tuple[str, MatrixFormat]
"""Path of a matrix, and a format."""


def write_quantized(
    source: Source,
    out: BundleDraft,
    rounder: Rounder,
    formats: Mapping[str, MatrixFormat],
    progress: Callable[[int], None],
) -> dict[str, QuantizedRecord]:
    """Writes a source's weights into a Bundle, one matrix in memory at a time.

    Returns:
        What bundle.json says of the quantized ones.
    """
    matrices = rounder.matrices
    specs = planned_tensors(source, matrices, formats)
    held: dict[str, list[np.ndarray]] = {}
    """Scales and factors of a matrix, or of those of a stack, until they are asked for."""

    def pieces(name: str) -> Iterator[np.ndarray]:
        path, _, last = name.rpartition("/")
        if path not in formats:
            yield from source.pieces(name)
            return
        if last in (SCALES, INPUTS):
            yield from held.pop(name)
            return
        one = matrices[path]
        given = matrices_of(source, path, one.shape, int(one.stacked))
        for draft in rounder.codes(path, formats[path], given):
            for part, array in ((SCALES, draft.scales), (INPUTS, draft.inputs)):
                if array is not None:
                    held.setdefault(f"{path}/{part}", []).append(np.asarray(array))
            yield packed(np.asarray(draft.codes))

    out.weights(specs, pieces, progress)
    return {
        path: QuantizedRecord.of(how, matrices[path].shape, matrices[path].dtype)
        for path, how in formats.items()
    }


@lru_cache
def _program(inputs: tuple[int, ...], how: MatrixFormat, nearest: bool) -> Any:
    """Codes of one matrix, compiled once a shape."""
    make = least_error if how.format.bits == 4 and not nearest else quantized
    return jax.jit(partial(make, inputs=inputs, how=how))


@lru_cache
def _balanced(inputs: tuple[int, ...], factored: tuple[int, ...], how: MatrixFormat) -> Any:
    """Codes of one matrix and factors of its inputs, compiled once a shape."""
    return jax.jit(partial(w8a8, inputs=inputs, factored=factored, how=how))
