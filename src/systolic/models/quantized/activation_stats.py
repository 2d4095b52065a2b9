"""Second moments or largest magnitudes of the inputs of a module's matrices, as the gradient of arrays of zeros beside them."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

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
