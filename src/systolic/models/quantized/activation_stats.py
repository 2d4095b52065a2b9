"""Second moments or largest magnitudes of the inputs of a module's matrices, as the gradient of arrays of zeros beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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
    return _watched(x, weights.moments, (*kept, *summed))


def watched_channels(x: jax.Array, kernel: Watched) -> jax.Array:
    """``x`` [..., channels], the input of a convolution, whose gradient adds to that of its largest magnitudes."""
    return _watched(x, kernel.moments, tuple(range(x.ndim)))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _watched(x: jax.Array, moments: jax.Array, order: tuple[int, ...]) -> jax.Array:
    del moments, order
    return x


def _forward(x: jax.Array, moments: jax.Array, order: tuple[int, ...]) -> tuple[jax.Array, Any]:
    del order
    return x, (x, moments)


def _backward(order: tuple[int, ...], kept: Any, change: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, moments = kept
    flat = x.transpose(order).reshape(-1, moments.shape[-1]).astype(jnp.float32)
    if moments.ndim == 1:
        return change, jnp.max(jnp.abs(flat), axis=0)
    return change, jnp.matmul(flat.T, flat, precision=jax.lax.Precision.HIGHEST)


_watched.defvjp(_forward, _backward)
