"""Activations of quantized models: products of int8 ones with int8 matrices, with sums in int32 (W8A8), and the second moments or largest magnitudes of a matrix's inputs."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from systolic.job import MatrixFormat
from systolic.models.quantized.codes import (
    SCALES_DTYPE,
    Make,
    Quantized,
    quantized,
    quantized_product,
    spread,
)

LARGEST = 127
"""Largest code of an activation; -128 has no counterpart."""
SHARE = 0.5
"""Exponent of an input's largest magnitude in its factor, the rest is the weights': SmoothQuant's alpha."""
LEAST = 1e-4
"""Least magnitude of an input, over the largest of all, that a factor is made of: one that calibration never saw may be larger later."""

_counted: ContextVar[Sequence[jax.Array]] = ContextVar("counted", default=())


@contextmanager
def counting(masks: Sequence[jax.Array]) -> Generator[None]:
    """Sets which inputs count while products are traced: those of examples and positions that are no padding.

    Args:
        masks: bool[batch, positions], the first whose shape is that of the inputs counts them; the last, bool[batch],
            inputs of whole examples.
    """
    token = _counted.set(masks)
    try:
        yield
    finally:
        _counted.reset(token)


def _counts(dims: tuple[int, ...]) -> jax.Array:
    """f32[inputs]: 1 for inputs that count, 0 for padding, of inputs with these dims before their features."""
    for mask in _counted.get():
        if dims[: mask.ndim] == mask.shape or dims == (mask.size,):
            each = mask.reshape(-1, 1).astype(jnp.float32)
            return jnp.broadcast_to(each, (mask.size, math.prod(dims) // mask.size)).ravel()
    return jnp.ones(math.prod(dims), jnp.float32)


def w8a8(
    value: jax.Array,
    largest: jax.Array,
    inputs: tuple[int, ...],
    factored: tuple[int, ...],
    how: MatrixFormat,
) -> Quantized:
    """A matrix in int8 with the factors of its inputs.

    Args:
        value: The matrix; of a stack one.
        largest: float32[inputs], the largest magnitude of each that calibration saw, in the order of the dims ``factored``.
        inputs: Dims that products sum over.
        factored: Dims whose inputs have factors, see :func:`systolic.models.adapters.factored_of`.
        how: Format.
    """
    wide = value.astype(jnp.float32)
    sizes = [size if dim in factored else 1 for dim, size in enumerate(value.shape)]
    seen = largest.reshape(sizes)
    seen = jnp.maximum(seen, jnp.maximum(LEAST * seen.max(), jnp.finfo(jnp.float32).tiny))
    if not set(factored) <= set(
        inputs
    ):  # a convolution of each channel by itself: no channel is in another's sum
        factors = seen / LARGEST
    else:
        others = tuple(dim for dim in range(value.ndim) if dim not in factored)
        weights = jnp.max(jnp.abs(wide), axis=others, keepdims=True)
        weights = jnp.maximum(weights, jnp.maximum(LEAST * weights.max(), 1e-20))
        factors = seen**SHARE / weights ** (1 - SHARE)
        factors = factors * (jnp.max(seen / factors) / LARGEST)
    factors = factors.astype(SCALES_DTYPE)
    return replace(quantized(wide * factors, inputs, how), inputs=factors)


def _sums(spec: str, x: jax.Array, codes: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, codes, preferred_element_type=jnp.int32)


def w8a8_product(
    spec: str,
    x: jax.Array,
    weights: Quantized,
    make: Make,
    sums_of: Make = _sums,
) -> jax.Array:
    """``einsum(spec, x, weights)`` in the dtype of ``x``: int8 times int8, each row of ``x`` with a scale of its own.

    Where what has factors isn't summed over, as in the absorbed matrix of latent attention, the activations stay as they are.

    Args:
        spec: Of the einsum.
        x: Activations.
        weights: With factors of its inputs.
        make: What multiplies two arrays of floats.
        sums_of: What multiplies two arrays of int8, with sums in int32.
    """
    assert weights.inputs is not None
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    factored = {
        letter for letter, size in zip(matrix, weights.inputs.shape, strict=True) if size > 1
    }
    scaled = {letter for letter, size in zip(matrix, weights.scales.shape, strict=True) if size > 1}
    if not factored.isdisjoint(out) or not scaled <= set(out):
        # The product with activations as they are; factors are taken back from the result where it has their dims.
        assert weights.inputs is not None
        operands, out = spec.split("->")
        _, matrix = operands.split(",")
        factored = {
            letter for letter, size in zip(matrix, weights.inputs.shape, strict=True) if size > 1
        }
        if not factored <= set(out):
            return make(spec, x, weights.restored(x.dtype))
        outputs = quantized_product(spec, x, replace(weights, inputs=None), make)
        return outputs * _inverse(spread(weights.inputs, matrix, out)).astype(x.dtype)
    summed = [operand.index(letter) for letter in operand if letter in matrix and letter not in out]
    wide = x.astype(jnp.float32) * _inverse(spread(weights.inputs, matrix, operand))
    codes, scales = row_codes(wide, summed)
    sums = sums_of(spec, codes, weights.codes)
    outputs = sums.astype(jnp.float32) * spread(scales, operand, out)
    return (outputs * spread(weights.scales, matrix, out).astype(jnp.float32)).astype(x.dtype)


def row_codes(wide: jax.Array, summed: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Codes int8 of activations that were divided by factors, and a scale for each row, over the dims ``summed``."""
    largest = jnp.max(jnp.abs(wide), axis=summed, keepdims=True)
    # A row with what is no number has no number in its results either.
    scales = jnp.where(largest == 0, LARGEST, largest) * (1 / LARGEST)
    return _rounded(wide / scales), scales


def joined_product(
    x: jax.Array, weights: Quantized, sums_of: Callable[[jax.Array, Any], jax.Array]
) -> jax.Array:
    """Product [..., outputs] of activations [..., inputs] with several matrices that are groups of one, each with factors of its inputs.

    Args:
        x: Activations.
        weights: Factors are [groups, inputs], and scales [1, outputs].
        sums_of: What multiplies codes [groups, rows, inputs] and those of the weights to int32[rows, groups, outputs].
    """
    assert weights.inputs is not None
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    codes, scales = row_codes(flat * _inverse(weights.inputs[:, None]), (2,))
    sums = sums_of(codes, weights.codes)
    outputs = (sums.astype(jnp.float32) * scales[..., 0].T[..., None]).reshape(len(flat), -1)
    outputs = outputs * weights.scales.astype(jnp.float32)
    return outputs.astype(x.dtype).reshape(*x.shape[:-1], -1)


def w8a8_convolution(
    convolution: Callable[..., jax.Array], x: jax.Array, kernel: Quantized, *how: Any
) -> jax.Array:
    """``convolution(x, kernel, *how)`` in the dtype of ``x``, x [batch, height, width, channels]: int8 times int8; inputs beyond what calibration saw are cut off.

    Args:
        convolution: Of int8 arrays, with sums in int32.
        x: Activations.
        kernel: With scales of its input channels.
        how: Its other arguments.
    """
    assert kernel.inputs is not None
    codes = _rounded(x.astype(jnp.float32) * _inverse(kernel.inputs.reshape(-1)))
    sums = convolution(codes, kernel.codes, *how)
    return (sums.astype(jnp.float32) * kernel.scales.reshape(-1).astype(jnp.float32)).astype(
        x.dtype
    )


def _rounded(wide: jax.Array) -> jax.Array:
    """int8 codes, none below -127."""
    return jnp.clip(jnp.round(wide), -LARGEST, LARGEST).astype(jnp.int8)


def _inverse(factors: jax.Array) -> jax.Array:
    return 1 / factors.astype(jnp.float32)


def factors_shape(
    shape: tuple[int, ...], factored: tuple[int, ...], stacked: bool
) -> tuple[int, ...]:
    """Shape of the factors of a matrix, or a stack of them: 1 in dims that have none."""
    kept = {*factored, *((0,) if stacked else ())}
    return tuple(size if dim in kept else 1 for dim, size in enumerate(shape))


def largest_shape(
    shape: tuple[int, ...], factored: tuple[int, ...], stacked: bool
) -> tuple[int, ...]:
    """Shape of the largest magnitudes of the inputs: flat, after the number of layers of a stack."""
    return (*shape[: int(stacked)], math.prod(shape[dim] for dim in factored))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A matrix, or a stack of them, with an array whose gradient is the sum of x x^T over the inputs x of its products, or the largest |x|."""

    value: jax.Array
    moments: jax.Array
    """Zeros: float32[inputs, inputs] for the sum, float32[inputs] for the largest."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.value.shape


class WatchedWeight(nnx.Module):
    """A matrix in the place of a parameter; reading it as a parameter is read gives a :class:`Watched`."""

    def __init__(self, value: nnx.Param, moments: nnx.Variable) -> None:
        self.value, self.moments = value, moments

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.value.get_value().shape

    def __getitem__(self, key: Any) -> Watched:
        """The matrix; takes ``...`` alone."""
        assert key is Ellipsis
        return Watched(value=self.value.get_value(), moments=self.moments.get_value())


def watch(module: nnx.Module, moments: Mapping[str, jax.Array]) -> None:
    """Puts arrays of zeros beside a module's matrices, by path; changes the module."""
    for path, holder in list(nnx.iter_modules(module)):
        for name, value in list(vars(holder).items()):
            full = "/".join(map(str, (*path, name)))
            if isinstance(value, nnx.Param) and full in moments:
                setattr(holder, name, WatchedWeight(value, nnx.Variable(moments[full])))


def watched_input(spec: str, x: jax.Array, weights: Watched) -> jax.Array:
    """``x``, the first operand of ``einsum(spec, x, weights)``, whose gradient adds to that of the moments."""
    operands, out = spec.split("->")
    operand, matrix = operands.split(",")
    summed = [operand.index(letter) for letter in matrix if letter not in out]
    kept = [dim for dim in range(x.ndim) if dim not in summed]
    counts = _counts(tuple(x.shape[dim] for dim in kept))
    return _watched(x, weights.moments, counts, (*kept, *summed))


def watched_channels(x: jax.Array, kernel: Watched) -> jax.Array:
    """``x`` [..., channels], the input of a convolution, whose gradient adds to that of its largest magnitudes."""
    return _watched(x, kernel.moments, _counts(x.shape[:-1]), tuple(range(x.ndim)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _watched(
    x: jax.Array, moments: jax.Array, counts: jax.Array, order: tuple[int, ...]
) -> jax.Array:
    del moments, counts, order
    return x


def _forward(
    x: jax.Array, moments: jax.Array, counts: jax.Array, order: tuple[int, ...]
) -> tuple[jax.Array, Any]:
    del order
    return x, (x, moments, counts)


def _backward(
    order: tuple[int, ...], kept: Any, change: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, moments, counts = kept
    flat = x.transpose(order).reshape(-1, moments.shape[-1]).astype(jnp.float32)
    flat = jnp.where(counts[:, None] > 0, flat, 0)
    if moments.ndim == 1:
        statistic = jnp.max(jnp.abs(flat), axis=0)
    else:
        statistic = jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)
    return change, statistic, jnp.zeros_like(counts)


_watched.defvjp(_forward, _backward)
