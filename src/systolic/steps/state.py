"""State that a train step reads and writes, and arrays kept in bf16 between steps: updated in float32, then rounded stochastically."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from systolic.job import Optimizer

LOW = 16
"""Bits of a float32 that bf16 lacks."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class GuardState:
    """State of the guard, on the device so that a bad step drops its own update."""

    mean: jax.Array
    """f32[]: running mean of the loss."""
    spread: jax.Array
    """f32[]: running mean of log(loss / mean) where positive, the spread of losses above the mean."""
    seen: jax.Array
    """int32[]: good steps in those means."""
    in_a_row: jax.Array
    """int32[]: bad steps since the last good one."""
    total: jax.Array
    """int32[]: bad steps so far."""
    frozen: jax.Array
    """bool[]: set by a bad step under the rule ``stop``; no later update is applied."""

    @classmethod
    def start(cls) -> "GuardState":
        """State before the first step."""
        zero = jnp.zeros((), jnp.int32)
        return cls(
            mean=jnp.zeros((), jnp.float32),
            spread=jnp.zeros((), jnp.float32),
            seen=zero,
            in_a_row=zero,
            total=zero,
            frozen=jnp.zeros((), bool),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018)."""

    scale: jax.Array
    """f32[]: factor of the loss, which gradients are divided by."""
    good: jax.Array
    """int32[]: finite steps since the scale last changed."""

    @classmethod
    def start(cls) -> "LossScale":
        """Starts at 2**15; the scale is doubled after 2000 finite steps and halved at an overflow."""
        return cls(scale=jnp.asarray(2.0**15, jnp.float32), good=jnp.zeros((), jnp.int32))

    def after(self, finite: jax.Array) -> "LossScale":
        """The scale for the next step."""
        grown = self.good + 1 >= 2000
        scale = jnp.where(
            finite, jnp.where(grown, self.scale * 2, self.scale), jnp.maximum(self.scale / 2, 1.0)
        )
        return LossScale(scale=scale, good=jnp.where(finite & ~grown, self.good + 1, 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRates:
    """Constants of the update rule that are inputs of the train step, so that another rate needs no other program."""

    learning_rate: Any
    """f32[] or a number: the peak."""
    adam_share: Any
    """muon only: AdamW's learning rate as a share of it."""
    weight_decay: Any

    @classmethod
    def of(cls, value: Optimizer) -> "UpdateRates":
        """Rates of an optimizer, as numbers."""
        adam = value.adam_learning_rate or value.learning_rate
        return cls(
            learning_rate=value.learning_rate,
            adam_share=adam / value.learning_rate,
            weight_decay=value.weight_decay,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """State of training; a checkpoint holds it, without the rates, and the position in the data."""

    step: jax.Array
    """int32[]: optimizer steps done."""
    params: dict[str, jax.Array]
    """Weights by path ("blocks/query"), in the job's dtype of parameters."""
    model_state: dict[str, jax.Array]
    """Other variables of the module by path: batch statistics, random keys."""
    optimizer: Any
    """Optax state."""
    ema: dict[str, jax.Array] | None
    """Moving average of the weights in float32, when the optimizer keeps one."""
    scale: LossScale | None
    """Loss scale, in float16 only."""
    guard: GuardState
    rates: UpdateRates | None
    """Rates of the job; None in checkpoints."""

    @property
    def evaluated(self) -> dict[str, jax.Array]:
        """The weights that evaluation and generation use: the average where there is one."""
        return self.params if self.ema is None else self.ema


def mixed(x: jax.Array) -> jax.Array:
    """A hash of uint32[...] in which each bit depends on all (Wellons, "Prospecting for hash functions", lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def noise(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """Uniform uint32[shape] below 2**16; another ``salt`` uint32[] gives other numbers.

    A hash of each element's index, so that it is the same under every sharding and needs no
    communication. JAX's threefry costs ten times the operations, and half a second of
    compile time for each shape.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return mixed(mixed(index) + salt) >> LOW


def salted(salt: jax.Array | int, number: jax.Array | int) -> jax.Array:
    """Separate salt uint32[] for each ``number``."""
    return mixed(mixed(jnp.asarray(number, jnp.uint32)) + jnp.asarray(salt, jnp.uint32))


def stochastic_round(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Rounds f32[...] to bf16[...] up or down at random, so that the expected value is ``x``.

    Values that bf16 can represent do not change, infinities and NaN included.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise(x.shape, salt)
    cut = jax.lax.bitcast_convert_type((bits >> LOW) << LOW, jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def widened(tree: Any) -> Any:
    """The same arrays, bf16 ones in float32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree
    )


def narrowed(tree: Any, like: Any, salt: jax.Array) -> Any:
    """The same arrays in the dtypes of ``like``, with stochastic rounding to bf16.

    Rounded to nearest, a bf16 array loses every change below about 1/256 of its value: weights under a
    small learning rate and averages with a slow decay would not change.
    """
    leaves, structure = jax.tree.flatten(tree)
    kinds = [leaf.dtype for leaf in jax.tree.leaves(like)]
    return jax.tree.unflatten(
        structure,
        [
            leaf if leaf.dtype == kind else stochastic_round(leaf, salted(salt, number))
            for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        ],
    )


def cast(tree: Any, dtype: str) -> Any:
    """The same arrays with float32 ones, except scalars, in ``dtype``, rounded to nearest; for initial values."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float32 and leaf.ndim else leaf, tree
    )
