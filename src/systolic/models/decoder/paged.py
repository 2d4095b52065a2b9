"""A decoder over a cache in pages: each text has a list of pages, which it may share with others.

One function reads any number of tokens of any number of texts, so that a decode step (one token a
text) and a chunk of a prompt are the same program at other sizes.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from systolic.job import Target
from systolic.models.decoder.stack import run_layers, stack
from systolic.models.decoder.stretch import Step

if TYPE_CHECKING:
    from systolic.models.decoder.module import DecoderModule


class Pages(NamedTuple):
    """Keys and values of all texts."""

    key: jax.Array
    """[layers, pages, kv_heads, page_size, head_dim]; with latent attention the rotated key of all heads, [layers, pages, 1, page_size, qk_rope_head_dim]."""
    value: jax.Array
    """Like key; with latent attention the latents."""


class Reading(NamedTuple):
    """What a step reads: some tokens of each row."""

    tokens: jax.Array
    """int32[batch, n], padded at the end."""
    recent: jax.Array
    """int32[batch, history]: the tokens before them, -1 for none, for n-gram lookups."""
    start: jax.Array
    """int32[batch]: position of the first; the pages hold all before it."""
    count: jax.Array
    """int32[batch]: how many are real; 0 in a row of padding."""
    table: jax.Array
    """int32[batch, pages of a row]: pages with positions 0 to page_size - 1, and so on; any number beyond the last."""


def empty_pages(module: "DecoderModule", pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
    """Pages of zeros."""
    config, latent = module.config, module.config.latent
    heads, key, value = config.kv_heads, config.head_dim, config.head_dim
    if latent:
        heads, key, value = 1, latent.qk_rope_head_dim, latent.kv_lora_rank
    shape = (config.layers, pages, heads, page_size)
    return Pages(jnp.zeros((*shape, key), dtype), jnp.zeros((*shape, value), dtype))


def read(module: "DecoderModule", reading: Reading, pages: Pages) -> tuple[jax.Array, Pages]:
    """Runs tokens over the pages of their rows and writes theirs.

    Returns:
        Input of the output matrix, [batch, n, d_model], and the pages with the tokens in them.
    """
    count = reading.tokens.shape[1]
    positions = reading.start[:, None] + jnp.arange(count)
    x, parts = module.embed(reading.tokens, positions, reading.recent), []
    number = pages.key.shape[1]

    def step(graph: Any, window: int) -> Step:
        def layer(x: jax.Array, state: nnx.State, own: Any) -> tuple[jax.Array, Any]:
            block = nnx.merge(graph, state)
            cached = tuple(_gathered(part, own * number + reading.table) for part in pages)
            attended, new = block.attend_next(x, positions, cached, window)
            return block.merge(x, attended, reading.count)[0], new

        return layer

    for stretch in module.stretches:
        graphs, stacked = stretch.split()
        period = [
            lambda x, given, unit=unit: unit(x, *given)
            for unit in stretch.period(graphs, step, stack)
        ]
        x, new = run_layers(period, x, (stacked, stretch.numbers), in_place=True)
        parts.append(stretch.flat(new))
    rows = parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    real = jnp.arange(count) < reading.count[:, None]
    written = (
        _written(module.target, part, reading.table, positions, real, new)
        for part, new in zip(pages, rows, strict=True)
    )
    return module.normed(x), Pages(*written)


def _gathered(part: jax.Array, table: jax.Array) -> jax.Array:
    """A row's pages one after the other, [batch, heads, positions, size].

    Args:
        part: [layers, pages, heads, page_size, size].
        table: int32[batch, pages of a row], counted over all layers.
    """
    flat = part.reshape(-1, *part.shape[2:])
    found = flat[table].swapaxes(1, 2)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


def _written(
    target: Target,
    part: jax.Array,
    table: jax.Array,
    positions: jax.Array,
    real: jax.Array,
    new: jax.Array,
) -> jax.Array:
    """Pages with the rows of new tokens, written where they lie; those of padding are dropped.

    Args:
        target: Its mesh splits the heads.
        part: [layers, pages, heads, page_size, size].
        table: int32[batch, pages of a row].
        positions: int32[batch, n].
        real: bool[batch, n].
        new: [layers, batch, n, heads, size].
    """
    size = part.shape[3]
    place = jnp.minimum(positions // size, table.shape[1] - 1)
    page = jnp.where(real, jnp.take_along_axis(table, place, axis=1), part.shape[1])

    def local(part: jax.Array, page: jax.Array, offset: jax.Array, new: jax.Array) -> jax.Array:
        layers, pages, heads, size, width = part.shape
        first = (jnp.arange(layers)[:, None] * pages)[:, :, None]
        block = (first + page)[..., None] * heads + jnp.arange(heads)
        rows = block * size + offset[..., None]
        rows = jnp.where(page[..., None] < pages, rows, math.prod(part.shape[:-1]))
        flat = part.reshape(-1, width)
        flat = flat.at[rows.reshape(-1)].set(
            new.reshape(-1, width).astype(part.dtype), mode="drop", unique_indices=True
        )
        return flat.reshape(part.shape)

    offset = positions % size
    if target.layout.num_devices == 1:
        return local(part, page, offset, new)
    (heads,) = target.fit(part.shape[2:3], ("kv_heads",))
    rows = PartitionSpec(None, None, heads, None, None)
    return jax.shard_map(
        local,
        mesh=target.mesh,
        in_specs=(rows, PartitionSpec(), PartitionSpec(), PartitionSpec(None, None, None, heads)),
        out_specs=rows,
        check_vma=False,
    )(part, page, offset, new)
