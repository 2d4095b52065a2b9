"""Matrices of one layer in the stack of all, for kernels that would need a copy of a part of it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from systolic.models.quantized.codes import Quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Layered:
    """The experts' matrices of a layer, read where they lie."""

    stack: jax.Array | Quantized
    """[layers, experts, depth, columns]."""
    number: jax.Array
    """int32[]: the layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's matrices."""
        return self.stack.shape[1:]

    def __getitem__(self, key: Any) -> "Layered":
        """The matrices, as a parameter is read: takes ``...`` alone."""
        assert key is Ellipsis
        return self

    def grouped(self, sizes: jax.Array) -> tuple[jax.Array | Quantized, jax.Array]:
        """The matrices of all layers [layers x experts, depth, columns], and the rows of each: those of other layers have none.

        sizes: int32[experts], rows of each of the layer's experts.
        """
        layers, experts = self.stack.shape[:2]
        flat = jax.tree.map(lambda a: a.reshape(layers * experts, *a.shape[2:]), self.stack)
        none = jnp.zeros((layers * experts,), sizes.dtype)
        return flat, jax.lax.dynamic_update_slice(none, sizes, (self.number * experts,))
