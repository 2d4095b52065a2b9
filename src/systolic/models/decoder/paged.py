"""A decoder over a cache in pages: each text has a list of pages, which it may share with others.

A step reads one token of some texts and a chunk of the prompt of others, all in one pass over the
weights. Layers lie in arrays of their own, so that no layer is copied out of a stack and each layer's
pages are written where they lie.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import NamedSharding, PartitionSpec

from systolic.job import ServedCache
from systolic.models.decoder.page_arrays import LayerPages, PageArrays, PageRows
from systolic.models.decoder.page_ragged import RaggedArrays, RaggedPages, unsuited

if TYPE_CHECKING:
    from systolic.models.decoder.block import DecoderBlock
    from systolic.models.decoder.module import DecoderModule


AnyPages = LayerPages | RaggedPages


class Reading(NamedTuple):
    """Tokens that a step reads: those of decode rows, then the chunks."""

    tokens: jax.Array
    """int32[rows + chunks x n], chunks padded at the end."""
    recent: jax.Array
    """int32[rows + chunks x n, history]: the tokens before each, -1 for none, for n-gram lookups."""
    start: jax.Array
    """int32[rows + chunks]: position of the first token; that of a chunk begins a page."""
    count: jax.Array
    """int32[rows + chunks]: how many are real; 0 in a row of padding."""
    table: jax.Array
    """int32[rows + chunks, pages of a row]: their pages; 0 beyond the last."""


class Layer(NamedTuple):
    """Static settings of a layer."""

    graph: Any
    window: int


def one_of(stacked: Any, number: int) -> Any:
    """Layer ``number`` of an array [layers, ...], or its sharding of the stack's."""
    if isinstance(stacked, NamedSharding):
        return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))
    if isinstance(stacked, Format):
        outer, *inner = stacked.layout.major_to_minor
        assert outer == 0
        return Format(Order(tuple(dim - 1 for dim in inner)), one_of(stacked.sharding, number))
    return stacked[number]


def layers_of(module: "DecoderModule") -> tuple[list[Layer], list[nnx.State]]:
    """Each layer, in order, and its weights (or their shardings), taken out of the stacks."""
    layers, states = [], []
    for stretch in module.stretches:
        split = [nnx.split(blocks) for blocks, _ in stretch.kinds]
        kinds = [kind for kind, (_, count) in enumerate(stretch.kinds) for _ in range(count)]
        for number in range(stretch.units * stretch.size):
            unit, place = divmod(number, stretch.size)
            kind = kinds[place]
            graph, state = split[kind]
            own = unit * stretch.kinds[kind][1] + place - kinds.index(kind)
            layers.append(Layer(graph, stretch.windows[number % len(stretch.windows)]))
            states.append(jax.tree.map(lambda a, own=own: one_of(a, own), state))
    return layers, states


def page_arrays(
    module: "DecoderModule", page_size: int, cache: ServedCache = ServedCache.plain
) -> PageArrays | RaggedArrays:
    """How the pages of one layer lie: by the platform's kernel where it takes the model."""
    config, latent, target = module.config, module.config.latent, module.target
    reason = ""
    if target.platform == "tpu":
        if not (reason := unsuited(target, config)):
            return RaggedArrays(target, config, page_size, cache)
        target.note(f"pages are read by XLA, not by ragged paged attention: {reason}")
    if latent:
        sizes = (latent.qk_rope_head_dim, latent.kv_lora_rank)
        return PageArrays(target, 1, sizes, page_size, reason, cache)
    sizes = (config.head_dim, config.value_dim)
    return PageArrays(target, config.kv_heads, sizes, page_size, reason, cache)


def read(
    module: "DecoderModule",
    layers: Sequence[tuple[Layer, nnx.State]],
    reading: Reading,
    pages: Sequence[AnyPages],
    chunk: tuple[int, int],
    cache: ServedCache = ServedCache.plain,
) -> tuple[jax.Array, list[Any]]:
    """Runs tokens over the pages of their rows, with theirs in them.

    Args:
        module: Its embedding and last norm; the blocks' weights are not used.
        layers: See :func:`layers_of`.
        reading: The tokens.
        pages: Of each layer.
        chunk: How many chunks there are, and tokens of each; (0, 0) for decode rows alone.
        cache: Format of the pages.

    Returns:
        Input of the output matrix, [tokens, d_model], and the pages.
    """
    rows = reading.start.shape[0] - chunk[0]
    groups = _groups(reading, rows, chunk)
    positions = jnp.concatenate([group.positions.reshape(-1) for group in groups])
    # int32[tokens]: 1 for those that are no padding.
    inside = jnp.arange(chunk[1]) < reading.count[rows:, None]
    parts = [reading.count[:rows], inside.reshape(-1).astype(jnp.int32)]
    real = jnp.concatenate(parts)
    arrays: Any = page_arrays(module, pages[0].page_size, cache)
    x = module.embed(reading.tokens[:, None], positions[:, None], reading.recent)
    written = []
    for (layer, state), own in zip(layers, pages, strict=True):
        block: DecoderBlock = nnx.merge(layer.graph, state)
        cache_rows = block.ask(x, positions[:, None], layer.window)
        new_rows = jax.tree.map(lambda a: a[:, 0], tuple(cache_rows))
        new_rows, bad = _finite(new_rows)
        own, weighted = arrays.attend(own, groups, new_rows, layer.window, block.attention_logits)
        # Attention [tokens, heads, size] with NaN where a token's own keys or values were not finite.
        heads = weighted.reshape(*bad.shape, -1, weighted.shape[-1])
        weighted = jnp.where(bad[:, :, None, None], jnp.nan, heads).reshape(weighted.shape)
        written.append(own)
        attended = block.answer(weighted[:, None].astype(x.dtype))
        x, _ = block.merge(x, attended, real)
    return _spread(module.normed(x)[:, 0], real, rows, chunk), written


def _finite(rows: Any) -> tuple[Any, jax.Array]:
    """New keys and values with 0 for what is not finite, and of which tokens and heads that is.

    Pages outlive a text, and reading weighs what is beyond a text with 0, which makes NaN of NaN: one text's
    overflow would become that of others. bool[tokens, kv_heads].
    """
    queries, new = rows
    right = [jnp.isfinite(each) for each in new]
    kept = tuple(jnp.where(ok, each, 0) for ok, each in zip(right, new, strict=True))
    return (queries, kept), ~(right[0].all(-1) & right[1].all(-1))


def _spread(hidden: jax.Array, real: jax.Array, rows: int, chunk: tuple[int, int]) -> jax.Array:
    """``hidden`` with NaN in all of a chunk where one of its tokens is not finite: those after it were not read right."""
    if not chunk[0]:
        return hidden
    bad = ~jnp.isfinite(hidden[rows:]).all(-1) & (real[rows:] > 0)
    lost = jnp.repeat(bad.reshape(chunk).any(-1), chunk[1])
    return hidden.at[rows:].set(jnp.where(lost[:, None], jnp.nan, hidden[rows:]))


def _groups(reading: Reading, rows: int, chunk: tuple[int, int]) -> list[PageRows]:
    """Decode rows and chunks, as far as there are any."""
    chunks, length = chunk
    groups = []
    if rows:
        positions = reading.start[:rows, None]
        groups.append(PageRows(reading.table[:rows], positions, reading.count[:rows]))
    if chunks:
        positions = reading.start[rows:, None] + jnp.arange(length)
        groups.append(PageRows(reading.table[rows:], positions, reading.count[rows:]))
    return groups
