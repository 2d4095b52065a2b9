"""Codes of 4 bits of the least error: of the weights, or of a product with known inputs.

Without inputs each group's scale is the one of :data:`FACTORS` whose restored weights are nearest to the matrix. With the
second moments of a product's inputs, inputs are rounded one after another and those still to come make up for each error
(GPTQ: Frantar et al. 2023, https://arxiv.org/abs/2210.17323, in the order of the inputs).
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from systolic.job import MatrixFormat, WeightFormat
from systolic.models.quantized.codes import NF4_VALUES, SCALES_DTYPE, Quantized, scales_shape

FACTORS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0, 1.04, 1.08, 1.13, 1.18, 1.25)
"""Scales that are tried, over the one whose outermost code is the largest weight of the group; each with both signs."""
DAMPING = 0.01
"""Share of the mean second moment that is added to each one, as in GPTQ's own code."""
INT4_RANGE = -8, 7


class _Grid(NamedTuple):
    """Numbers that codes of 4 bits stand for."""

    values: jax.Array
    """float32[16], rising."""
    first: int
    """The code of the lowest value."""

    @classmethod
    def of(cls, kind: WeightFormat) -> "_Grid":
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
    flat, grid = _flat(value.astype(jnp.float32), inputs), _Grid.of(how.format)
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
    flat, grid = _flat(value.astype(jnp.float32), inputs), _Grid.of(how.format)
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
    grid, count = _Grid.of(kind), flat.shape[0]

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


def _scales(groups: jax.Array, weights: jax.Array, grid: _Grid) -> jax.Array:
    """Scales [groups, 1, outputs] of the least weighted squared error of [groups, group, outputs]."""
    largest = jnp.max(jnp.abs(groups), axis=1, keepdims=True)
    outer = largest / jnp.max(jnp.abs(grid.values))
    tried = jnp.array([sign * factor for factor in FACTORS for sign in (1, -1)], jnp.float32)

    def one(best: tuple[jax.Array, jax.Array], factor: jax.Array) -> tuple[tuple, None]:
        scales = (outer * factor).astype(SCALES_DTYPE).astype(jnp.float32)
        restored = grid.values[grid.places(groups / _safe(scales))] * scales
        error = jnp.sum(weights * (restored - groups) ** 2, axis=1, keepdims=True)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scales, best[1])), None

    start = jnp.full_like(outer, jnp.inf), outer
    return jax.lax.scan(one, start, tried)[0][1]


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
    grid: _Grid,
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
