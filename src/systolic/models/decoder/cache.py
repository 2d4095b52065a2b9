"""Keys and values of the positions seen so far, and attention over them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from systolic.job import Target
from systolic.models.attention import Logits, soft_cap

LARGEST_CODE = 127
"""Largest code of a cache in int8, either sign."""
SCALES = jnp.bfloat16
"""Dtype of the scales of a cache in int8."""


class Coded(NamedTuple):
    """Rows of a cache in int8, in the place of an array."""

    codes: jax.Array
    """int8[..., capacity, size]."""
    scales: jax.Array
    """[..., capacity], of each row."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.codes.shape


Rows = jax.Array | Coded


def coded(rows: jax.Array, scale_dtype: DTypeLike = SCALES) -> Coded:
    """Rows [..., size] in int8, each scaled by its largest element: codes are the nearest ones for the scale as it is stored."""
    wide = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # XLA may leave out a cast to fewer bits and back.
    bits = jnp.finfo(scale_dtype)
    scales = jax.lax.reduce_precision(
        jnp.where(largest > 0, largest, 1.0) / LARGEST_CODE, bits.nexp, bits.nmant
    )
    codes = jnp.clip(jnp.round(wide / scales), -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8)
    return Coded(codes, scales[..., 0].astype(scale_dtype))


def no_rows(shape: tuple[int, ...], dtype: jnp.dtype) -> Rows:
    """A cache of zeros [..., capacity, size]."""
    zeros = jnp.zeros(shape, dtype)
    return Coded(zeros, jnp.zeros(shape[:-1], SCALES)) if dtype == jnp.int8 else zeros


class Cache(NamedTuple):
    """Keys and values of the positions seen so far."""

    key: Rows
    """[layers, batch, kv_heads, capacity, head_dim]: heads outside, as the matmuls of attention read them,
    so that a TPU reads a layer of it where it lies. With latent attention the rotated key of all heads,
    [layers, batch, 1, capacity, qk_rope_head_dim]. Where every layer has a window the capacity is at most that, and
    position p lies in row p modulo it."""
    value: Rows
    """Like key; with latent attention the latents, [layers, batch, 1, capacity, kv_lora_rank]."""
    length: jax.Array
    """int32[batch]: positions seen."""
    recent: jax.Array
    """int32[batch, n - 1]: the last tokens, for n-gram lookups; [batch, 0] without them."""


def stored(target: Target, new: jax.Array, capacity: int, dtype: jnp.dtype) -> jax.Array:
    """A layer's cache [batch, kv_heads, capacity, head_dim] that starts with new rows [batch, n, kv_heads, head_dim].

    Rows beyond the capacity are dropped.
    """
    rows = jnp.swapaxes(new[:, :capacity], 1, 2).astype(dtype)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, capacity - rows.shape[2]), (0, 0)))
    return target.constrain(rows, "batch", "kv_heads", None, None)


def stored_rows(target: Target, new: jax.Array, capacity: int, dtype: jnp.dtype) -> Rows:
    """:func:`stored`, in int8 with scales where that is the dtype."""
    narrow = dtype == jnp.int8
    rows = stored(target, new, capacity, new.dtype if narrow else dtype)
    return coded(rows) if narrow else rows


def latest(new: jax.Array, count: jax.Array, capacity: int) -> jax.Array:
    """The last ``capacity`` of ``count`` int32[batch] rows of each sequence, position p in row p modulo the capacity.

    new [batch, n, kv_heads, head_dim] to [batch, capacity, kv_heads, head_dim]; rows of no position hold anything.
    """
    last = (count - 1)[:, None]
    positions = last - (last - jnp.arange(capacity)) % capacity
    return jnp.take_along_axis(new, jnp.maximum(positions, 0)[:, :, None, None], axis=1)


def appended(target: Target, cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """A cache of all layers with one new row of each sequence, written where it lies.

    Each device writes its own rows of a table [layers x batch x kv_heads x capacity, head_dim]: the partitioner
    would gather the indices of a scatter, and a compiler relay the cache for one whose windows span layers.
    A position beyond the capacity is dropped.

    Args:
        target: Its mesh splits batch and kv_heads.
        cache: [layers, batch, kv_heads, capacity, head_dim].
        positions: int32[batch].
        new: [layers, batch, kv_heads, head_dim].
    """

    def local(cache: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        *outer, capacity, size = cache.shape
        first = jnp.arange(math.prod(outer), dtype=jnp.int32).reshape(outer) * capacity
        at = positions[None, :, None]
        rows = jnp.where((at >= 0) & (at < capacity), first + at, math.prod(outer) * capacity)
        table = cache.reshape(-1, size)
        table = table.at[rows.reshape(-1)].set(
            new.reshape(-1, size), mode="drop", unique_indices=True
        )
        return table.reshape(cache.shape)

    new = new.astype(cache.dtype)
    if target.layout.num_devices == 1:
        return local(cache, positions, new)
    batch, heads = target.fit(cache.shape[1:3], ("batch", "kv_heads"))
    rows = PartitionSpec(None, batch, heads, None)
    return jax.shard_map(
        local,
        mesh=target.mesh,
        in_specs=(PartitionSpec(*rows, None), PartitionSpec(batch), rows),
        out_specs=PartitionSpec(*rows, None),
        check_vma=False,
    )(cache, positions, new)


def appended_rows(target: Target, cache: Rows, positions: jax.Array, new: jax.Array) -> Rows:
    """:func:`appended`, to a cache in int8 too."""
    if not isinstance(cache, Coded):
        return appended(target, cache, positions, new)
    codes, scales = coded(new)
    own = jnp.arange(cache.scales.shape[-1]) == positions[:, None, None]
    return Coded(
        appended(target, cache.codes, positions, codes),
        jnp.where(own, scales[..., None], cache.scales),
    )


class Sight(NamedTuple):
    """Positions of a cache that new tokens attend to."""

    positions: jax.Array
    """int32[batch, n]: positions of the tokens; each sees its own position and those before."""
    window: int
    """Number of latest positions that are visible; 0 for all."""
    logits: Logits
    """Soft cap and sinks of the products with the keys, with a scale."""
    rolling: bool = False
    """Whether a position lies in the row of its number modulo the capacity, which is at most the window."""

    def before(self, capacity: int) -> jax.Array:
        """bool[batch, n, capacity]: rows that hold positions before the token's own, of those that it sees."""
        rows, own = jnp.arange(capacity)[None, None, :], self.positions[:, :, None]
        if self.rolling:
            # The row that the token will take holds one that has just left the window, or nothing.
            return (rows < own) & (rows != own % capacity)
        return self.visible(capacity) & ~(rows == own)

    def visible(self, capacity: int) -> jax.Array:
        """bool[batch, n, capacity]."""
        back = self.positions[:, :, None] - jnp.arange(capacity)
        return (back >= 0) & (back < (self.window or capacity))


class ScorePart(NamedTuple):
    """Some of the dims that queries and keys are compared in; the products of several parts add up."""

    query: jax.Array
    """[batch, 1, heads, size]."""
    own: jax.Array
    """Keys of the new token, [batch, 1, kv_heads, size]."""
    keys: Rows
    """Keys of the cache, [batch, kv_heads, capacity, size]."""


def attend_one(
    parts: Sequence[ScorePart], own_value: jax.Array, values: Rows, sight: Sight
) -> jax.Array:
    """Attention of one new token over a cache that does not hold it yet: [batch, 1, heads, size of a value].

    The cache is only read, so that a compiler needs no copy of it: rows are written once, after all layers.

    Args:
        parts: Queries and keys; the queries' dtype is that of the products.
        own_value: Of the token, [batch, 1, kv_heads, size].
        values: [batch, kv_heads, capacity, size].
        sight: Positions that the token sees, with a scale; of the cache those before its own.
    """
    batch, _, heads, _ = parts[0].query.shape
    kv_heads, capacity = values.shape[1:3]
    dtype = parts[0].query.dtype
    group = heads // kv_heads

    def grouped(query: jax.Array) -> jax.Array:
        split = query.reshape(batch, kv_heads, group, -1)
        return split if group > 1 else jnp.concatenate([split, jnp.zeros_like(split)], axis=2)

    def stored(own: jax.Array) -> jax.Array:
        return jnp.swapaxes(own, 1, 2).astype(dtype if isinstance(values, Coded) else values.dtype)

    queries = [grouped(part.query) for part in parts]
    own_value = stored(own_value)

    def scored(query: jax.Array, key: Rows) -> jax.Array:
        codes, scales = (key.codes, key.scales) if isinstance(key, Coded) else (key, None)
        scores = jnp.einsum(
            "bkgh,bksh->bkgs", query, codes.astype(dtype), preferred_element_type=jnp.float32
        )
        return scores if scales is None else scores * scales[:, :, None].astype(jnp.float32)

    def logits(keys: Sequence[Rows]) -> jax.Array:
        products = [scored(query, key) for query, key in zip(queries, keys, strict=True)]
        assert sight.logits.scale is not None
        return soft_cap(sum(products[1:], products[0]) * sight.logits.scale, sight.logits.cap)

    before = sight.before(capacity)[:, None]
    past = jnp.where(before, logits([part.keys for part in parts]), -jnp.inf)
    present = logits([stored(part.own) for part in parts])
    largest = jnp.maximum(jnp.max(past, axis=-1, keepdims=True), present)
    sinks = None
    if sight.logits.sinks is not None:
        sinks = sight.logits.sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        largest = jnp.maximum(largest, sinks)
    past, present = jnp.exp(past - largest), jnp.exp(present - largest)
    total = jnp.sum(past, axis=-1, keepdims=True) + present
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    shares, rows = past / total, values
    if isinstance(rows, Coded):
        shares, rows = shares * rows.scales[:, :, None].astype(jnp.float32), rows.codes
    attended = jnp.einsum("bkgs,bksh->bkgh", shares.astype(dtype), rows.astype(dtype)) + (
        present / total
    ).astype(dtype) * own_value.astype(dtype)
    return attended[:, :, :group].reshape(batch, 1, heads, -1)
