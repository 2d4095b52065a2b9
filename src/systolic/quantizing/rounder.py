"""Codes of a model's matrices, and a Bundle's weights made of them.

Without inputs each group's scale is the one of :data:`FACTORS` whose restored weights are nearest to the matrix. With the
second moments of a product's inputs, inputs are rounded one after another and those still to come make up for each error
(GPTQ: Frantar et al. 2023, https://arxiv.org/abs/2210.17323, in the order of the inputs).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from systolic.core.errors import DataError
from systolic.formats.matrices import Matrix, planned_tensors
from systolic.formats.source import Source
from systolic.formats.weights import matrices_of
from systolic.job import MatrixFormat, WeightFormat
from systolic.job.precision import INPUTS, SCALES
from systolic.models.quantized.activations import w8a8
from systolic.models.quantized.codes import (
    NF4_VALUES,
    SCALES_DTYPE,
    Quantized,
    quantized,
    scales_shape,
)
from systolic.runs.bundle.folder import BundleDraft
from systolic.runs.bundle.record import QuantizedRecord, packed
from systolic.runs.weights import Weights

FACTORS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0, 1.04, 1.08, 1.13, 1.18, 1.25)
"""Scales that are tried, over the one whose outermost code is the largest weight of the group; each with both signs."""
DAMPING = 0.01
"""Share of the mean second moment that is added to each one, as in GPTQ's own code."""
INT4_RANGE = -8, 7
Asked = tuple[str, MatrixFormat]
"""Path of a matrix, and a format."""


class _CodeGrid(NamedTuple):
    """Numbers that codes of 4 bits stand for."""

    values: jax.Array
    """float32[16], rising."""
    first: int
    """The code of the lowest value."""

    @classmethod
    def of(cls, kind: WeightFormat) -> "_CodeGrid":
        """Grid of int4 or nf4."""
        if kind is WeightFormat.nf4:
            return cls(jnp.array(NF4_VALUES, jnp.float32), 0)
        low, high = INT4_RANGE
        return cls(jnp.arange(low, high + 1, dtype=jnp.float32), low)

    def places(self, scaled: jax.Array) -> jax.Array:
        """int32: places of the nearest values."""
        if self.first:  # whole numbers
            low, high = INT4_RANGE
            return jnp.clip(jnp.round(scaled), low, high).astype(jnp.int32) - low
        middles = (self.values[1:] + self.values[:-1]) / 2
        return jnp.sum(scaled[..., None] > middles, axis=-1, dtype=jnp.int32)


def least_error(value: jax.Array, inputs: tuple[int, ...], how: MatrixFormat) -> Quantized:
    """A matrix in 4 bits, or a stack of them, each group's scale chosen by the error of its weights.

    Args:
        value: The matrix.
        inputs: Dims that products sum over.
        how: Format and group.
    """
    flat, grid = _flat(value.astype(jnp.float32), inputs), _CodeGrid.of(how.format)
    groups = flat.reshape(-1, math.gcd(value.shape[inputs[-1]], how.group), flat.shape[1])
    scales = _scales(groups, jnp.ones((1, 1, 1)), grid)
    places = grid.places(groups / _safe(scales))
    return _matrix(places.reshape(flat.shape), scales[:, 0], value.shape, inputs, how, grid)


def compensated(
    value: jax.Array,
    moments: np.ndarray,
    inputs: tuple[int, ...],
    how: MatrixFormat,
) -> Quantized:
    """One matrix in 4 bits, rounded so that its product with the inputs changes little.

    Args:
        value: The matrix.
        moments: [inputs, inputs], the sum of x x^T over inputs x of the product, its dims in the matrix's order.
        inputs: Dims that products sum over.
        how: Format and group.
    """
    flat, grid = _flat(value.astype(jnp.float32), inputs), _CodeGrid.of(how.format)
    group = math.gcd(value.shape[inputs[-1]], how.group)
    factor, weights = inverse_factor(moments)
    places, scales = _compensated(
        flat, jnp.asarray(factor), jnp.asarray(weights), how.format, group
    )
    return _matrix(places, scales, value.shape, inputs, how, grid)


def inverse_factor(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper Cholesky factor of the inverse of damped moments, and their diagonal; float32.

    An input that was always zero counts for nothing. The factor is computed in float64: a few inputs of a transformer are
    thousands of times larger than the others.
    """
    wide = np.asarray(moments, np.float64)
    unused = wide.diagonal() <= 0
    wide = wide + np.diag(np.where(unused, 1.0, DAMPING * wide.diagonal().mean()))
    factor = np.linalg.cholesky(np.linalg.inv(wide)).T
    return factor.astype(np.float32), wide.diagonal().astype(np.float32)


@partial(jax.jit, static_argnames=("kind", "group"))
def _compensated(
    flat: jax.Array,
    factor: jax.Array,
    weights: jax.Array,
    kind: WeightFormat,
    group: int,
) -> tuple[jax.Array, jax.Array]:
    """Places int32[inputs, outputs] and scales [groups, outputs] of a matrix."""
    grid, count = _CodeGrid.of(kind), flat.shape[0]

    def one_group(flat: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        rows = jax.lax.dynamic_slice_in_dim(flat, start, group)
        own = jax.lax.dynamic_slice_in_dim(weights, start, group)
        across = jax.lax.dynamic_slice_in_dim(factor, start, group)
        square = jax.lax.dynamic_slice_in_dim(across, start, group, axis=1)
        scales = _scales(rows[None], own[None, :, None], grid)[0]

        def one_input(
            rows: jax.Array, number: jax.Array
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            row = rows[number]
            place = grid.places(row / _safe(scales[0]))
            error = (row - grid.values[place] * scales[0]) / square[number, number]
            later = jnp.where(jnp.arange(group) > number, square[number], 0)
            return rows - later[:, None] * error, (place, error)

        _, (places, errors) = jax.lax.scan(one_input, rows, jnp.arange(group))
        later = jnp.where(jnp.arange(count) >= start + group, across, 0)
        return flat - later.T @ errors, (places, scales[0])

    _, (places, scales) = jax.lax.scan(one_group, flat, jnp.arange(0, count, group))
    return places.reshape(flat.shape), scales


def _scales(groups: jax.Array, weights: jax.Array, grid: _CodeGrid) -> jax.Array:
    """Scales [groups, 1, outputs] of the least weighted squared error of [groups, group, outputs]."""
    largest = jnp.max(jnp.abs(groups), axis=1, keepdims=True)
    outer = largest / jnp.max(jnp.abs(grid.values))
    tried = jnp.array([sign * factor for factor in FACTORS for sign in (1, -1)], jnp.float32)

    def better_scales(best: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[tuple, None]:
        scales = (outer * factor).astype(SCALES_DTYPE).astype(jnp.float32)
        restored = grid.values[grid.places(groups / _safe(scales))] * scales
        error = jnp.sum(weights * (restored - groups) ** 2, axis=1, keepdims=True)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

    start = jnp.full_like(outer, jnp.inf), outer
    return jax.lax.scan(better_scales, start, tried)[0][1]


def _safe(scales: jax.Array) -> jax.Array:
    """Scales to divide by: a group of zeros has none."""
    return jnp.where(scales == 0, 1, scales)


def _flat(value: jax.Array, inputs: tuple[int, ...]) -> jax.Array:
    """[inputs, outputs]: a matrix with its input dims first, in order; neighbours in the last of them stay neighbours."""
    outputs = [dim for dim in range(value.ndim) if dim not in inputs]
    count = math.prod(value.shape[dim] for dim in inputs)
    return value.transpose(*inputs, *outputs).reshape(count, -1)


def _matrix(
    places: jax.Array,
    scales: jax.Array,
    shape: tuple[int, ...],
    inputs: tuple[int, ...],
    how: MatrixFormat,
    grid: _CodeGrid,
) -> Quantized:
    """Codes and scales in the dims of the matrix; inverse of :func:`_flat`."""
    outputs = [dim for dim in range(len(shape)) if dim not in inputs]
    order = [*inputs, *outputs]
    back = [order.index(dim) for dim in range(len(shape))]

    def put(flat: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        return flat.reshape([sizes[dim] for dim in order]).transpose(back)

    codes = put(places + grid.first, shape).astype(how.format.dtype)
    return Quantized(
        codes=codes, scales=put(scales, scales_shape(shape, inputs, how)).astype(SCALES_DTYPE)
    )


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
        for codes in self._made(path, how, map(jnp.asarray, pieces)):
            if not np.isfinite(np.asarray(codes.scales, np.float32)).all():
                raise DataError(
                    f"weights of {path} are too large for scales in {SCALES_DTYPE}; leave the matrix as it is with --keep {path}"
                )
            yield codes

    def _made(
        self, path: str, how: MatrixFormat, pieces: Iterable[jax.Array]
    ) -> Iterator[Quantized]:
        matrix, key = self.matrices[path], (path, how)
        inputs = tuple(dim - int(matrix.stacked) for dim in matrix.inputs)
        if how.format.activations:
            factored = tuple(dim - int(matrix.stacked) for dim in matrix.factored)
            make = _balanced(inputs, factored, how)
            largest = self.moments[path].reshape(-1, matrix.largest_shape[-1])
            for piece, own in zip(pieces, largest, strict=True):
                yield make(piece, jnp.asarray(own))
            return
        if path not in self.moments or how.format.bits != 4:
            program = _program(inputs, how, self.trained(path, how))
            yield from map(program, pieces)
            return
        if key not in self._kept:
            moments = self.moments[path].reshape(-1, *matrix.moments_shape[-2:])
            self._kept[key] = [
                jax.device_get(compensated(piece, own, inputs, how))
                for piece, own in zip(pieces, moments, strict=True)
            ]
        yield from self._kept[key]

    def rounded(self, weights: Weights, formats: Mapping[str, MatrixFormat]) -> Weights:
        """Weights with some matrices rounded to what their codes would stand for, in the dtype that they have; as codes where activations are rounded too."""
        params = dict(weights.params)
        for path, how in formats.items():
            value, stacked = params[path], self.matrices[path].stacked
            codes = self.codes(path, how, value if stacked else [value])
            if how.format.activations:
                stack: list[Any] = list(codes)
                params[path] = (
                    jax.tree.map(lambda *each: jnp.stack(each), *stack) if stacked else stack[0]
                )
                continue
            stack = [code.restored(value.dtype) for code in codes]
            params[path] = jax.device_put(jnp.stack(stack) if stacked else stack[0], value.sharding)
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
        matrix = matrices[path]
        matrix_pieces = matrices_of(source, path, matrix.shape, int(matrix.stacked))
        for draft in rounder.codes(path, formats[path], matrix_pieces):
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
