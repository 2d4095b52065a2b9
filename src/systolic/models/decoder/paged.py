"""A decoder over a cache in pages, and the pages as TPUs read them: each text has a list of pages, which it may share with others.

A step reads one token of some texts and a chunk of the prompt of others, all in one pass over the
weights. Layers lie in arrays of their own, so that no layer is copied out of a stack and each layer's
pages are written where they lie.

On a TPU attention is JAX's ragged paged attention, a Pallas kernel that reads pages where they lie.
A page is [page_size, 2 x rows, width] with a row of keys and a row of values in turn, and a row is a whole number of
128 lanes. Heads of 64 or fewer elements lie side by side in a row, since lanes that no head uses would be stored and
read all the same: a query then has its elements in the lanes of its own head and zeros in the others. A head of
another size is filled up with zeros.

The kernel has one scale for all positions. Pages in int8, with a scale for each position and head, are restored for the
texts of a step, one layer at a time, and the kernel reads what was restored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as Order
from jax.sharding import NamedSharding, PartitionSpec

from systolic.chips import usual
from systolic.job import ServedCache, Target
from systolic.job.precision import CODES, INPUTS, SCALES
from systolic.models.adapters import BASE, EXPERTS, STACKED, A, num_inputs
from systolic.models.attention import Logits
from systolic.models.decoder.cache import coded
from systolic.models.decoder.page_arrays import (
    DraftRows,
    LayerPages,
    PageArrays,
    PageRows,
    narrowed,
    pages_at,
)
from systolic.models.linear import Joined, MatrixParts, Turned, joined_matrices
from systolic.models.quantized.codes import Quantized

if TYPE_CHECKING:
    from systolic.models.decoder.block import DecoderBlock
    from systolic.models.decoder.config import Decoder
    from systolic.models.decoder.module import DecoderModule


LANES, SUBLANES = usual("tpu")["vpu_shape"].value[1], usual("tpu")["vpu_shape"].value[0]
VMEM_BYTES: int = usual("tpu")["kernel_vmem_bytes"].value
"""Memory of the kernel's windows and sums."""
SMEM_BYTES: int = usual("tpu")["kernel_smem_bytes"].value
"""Scalar memory for a call's page table."""
TOGETHER = 1024
"""Positions of a text that the kernel computes at once; JAX's table of tuned sizes has 512 to 2048."""
MOST_PAGES = 16
"""Pages of a text that are fetched at once: each has a transfer of its own, whose addresses fill the scalar registers."""
QUERIES = (128, 64, 32, 16, 8)
"""Tokens of a prompt that the kernel computes at once, the most that fit."""
DECODE_QUERIES = 8
"""Texts of one token that share a block of queries. Each computes the whole block: the fewest that fill a tile."""
TURNED = ("query", "key", "value", "out", "gate", "up", "down")
"""Names of the matrices of a layer that are turned for a CPU: those that a product reads in one way alone."""
JOINED = ((("query",), ("key",), ("value",)), (("mlp", "gate"), ("mlp", "up")))
"""Paths of the matrices of a layer that read the same activations, and are multiplied as one on one GPU; on one CPU those of these last names, wherever they lie in a layer."""


class RaggedPages(NamedTuple):
    """Keys and values of a layer."""

    both: jax.Array
    """[pages, page_size, 2 x rows, width]."""
    scales: jax.Array | None = None
    """Scales of pages in int8: f32[pages, rows of lanes, lanes], those of a page's heads position by position."""

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.both.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRows:
    """How the key-value heads of one device lie in rows."""

    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    packing: int
    """Elements of a register's 32 bits."""

    @property
    def beside(self) -> int:
        """Heads of a row."""
        return max(1, min(LANES // self.head_dim, self.kv_heads))

    @property
    def rows(self) -> int:
        """Rows of keys, some of them zeros: the kernel takes 1, 2, 4 or 8 tiles of registers, or a multiple of 8."""
        rows = -(-self.kv_heads // self.beside)
        while not _tiled(2 * rows, self.packing):
            rows += 1
        return rows

    @property
    def width(self) -> int:
        """Elements of a row."""
        return -(-self.beside * self.head_dim // LANES) * LANES

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.heads // self.kv_heads

    def pack(self, new: jax.Array) -> jax.Array:
        """Keys or values [tokens, kv_heads, head_dim] as [tokens, rows, width]."""
        new = jnp.pad(new, ((0, 0), (0, self.rows * self.beside - self.kv_heads), (0, 0)))
        return self._filled(new.reshape(-1, self.rows, self.beside * self.head_dim))

    @property
    def num_scales(self) -> int:
        """Scales of a position in int8: of each place of a head in a row."""
        return 2 * self.rows * self.beside

    def coded(self, new: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Keys and values [tokens, 2, kv_heads, head_dim] as [tokens, 2 x rows, width] and their scales f32[tokens, num_scales]."""
        scales = jnp.ones((len(new), self.num_scales), jnp.float32)
        if dtype == jnp.int8:
            new, of_heads = coded(new, jnp.float32)
            free = self.rows * self.beside - self.kv_heads
            of_heads = jnp.pad(of_heads, ((0, 0), (0, 0), (0, free)))
            by_row = of_heads.reshape(-1, 2, self.rows, self.beside).swapaxes(1, 2)
            scales = by_row.reshape(scales.shape)
        both = jnp.stack([self.pack(new[:, 0]), self.pack(new[:, 1])], axis=2)
        return narrowed(both.reshape(len(new), -1, self.width), dtype), scales

    def restored(self, codes: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Pages [n, page_size, 2 x rows, width] of codes int8 and scales f32[n, page_size x num_scales]."""
        count, size = codes.shape[:2]
        wide = scales.reshape(count, size, 2 * self.rows, self.beside)
        wide = jnp.repeat(wide, self.head_dim, axis=-1) if self.beside > 1 else wide
        if self.beside > 1:
            free = self.width - wide.shape[-1]
            wide = jnp.pad(wide, ((0, 0), (0, 0), (0, 0), (0, free)))
        return (codes.astype(jnp.float32) * wide).astype(dtype)

    def ask(self, query: jax.Array) -> jax.Array:
        """Queries [tokens, heads, head_dim] as [tokens, rows x beside x group, width]."""
        free = self.rows * self.beside - self.kv_heads
        query = query.reshape(-1, self.kv_heads, self.group, self.head_dim)
        query = jnp.pad(query, ((0, 0), (0, free), (0, 0), (0, 0)))
        if self.beside > 1:
            query = query.reshape(-1, self.rows, self.beside, self.group, 1, self.head_dim)
            own = jnp.eye(self.beside, dtype=bool)[:, None, :, None]
            query = jnp.where(own, query, 0)
        return self._filled(query.reshape(query.shape[0], -1, self.beside * self.head_dim))

    def answer(self, weighted: jax.Array) -> jax.Array:
        """Results [tokens, rows x beside x group, width] of :meth:`ask` as [tokens, heads, head_dim]."""
        weighted = weighted[:, :, : self.beside * self.head_dim]
        if self.beside > 1:
            split = (-1, self.rows, self.beside, self.group, self.beside, self.head_dim)
            weighted = weighted.reshape(split)
            weighted = jnp.stack([weighted[:, :, n, :, n] for n in range(self.beside)], axis=2)
        weighted = weighted.reshape(weighted.shape[0], -1, self.group, self.head_dim)
        return weighted[:, : self.kv_heads].reshape(-1, self.heads, self.head_dim)

    def _filled(self, rows: jax.Array) -> jax.Array:
        return jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[2])))


def _tiled(count: int, packing: int) -> bool:
    """Whether the kernel takes so many rows of keys and values together."""
    tiles, rest = divmod(count, packing)
    return not rest and (tiles in (1, 2, 4) or tiles % SUBLANES == 0)


def unsuited(target: Target, config: "Decoder") -> str:
    """Why the kernel does not take a model; empty where it does."""
    ways = _ways(target)
    if config.latent:
        return "latents are not keys and values of heads"
    if config.sinks:
        return "it has no attention sinks"
    if config.value_dim != config.head_dim:
        return f"heads have {config.head_dim} elements in keys and {config.value_dim} in values"
    if config.kv_heads % ways:
        return f"the tensor axis of {ways} does not divide the {config.kv_heads} key-value heads"
    if target.dtype not in ("bfloat16", "float32"):
        return f"it takes no {target.dtype}"
    return ""


def _ways(target: Target) -> int:
    """Devices that share the heads."""
    axes = target.spec("kv_heads")[0]
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(target.mesh.shape[name] for name in names)


class RaggedArrays:
    """How pages lie on a TPU, and attention over them.

    Args:
        target: The platform; its mesh splits the heads.
        config: A model that :func:`unsuited` has no word against.
        page_size: Positions of a page.
        cache: Format of keys and values.
    """

    def __init__(
        self,
        target: Target,
        config: "Decoder",
        page_size: int,
        cache: ServedCache = ServedCache.plain,
    ) -> None:
        self.target, self.page_size = target, page_size
        self.ways = _ways(target)
        self.cache = cache
        narrow = {ServedCache.int8: jnp.int8, ServedCache.fp8: jnp.float8_e4m3fn}
        self.dtype = jnp.dtype(narrow.get(cache, target.dtype))
        self.lying = HeadRows(
            heads=config.heads // self.ways,
            kv_heads=config.kv_heads // self.ways,
            head_dim=config.head_dim,
            packing=4 // self.dtype.itemsize,
        )

    @property
    def kernel(self) -> str:
        """Name of the kernel that reads the pages, for a log."""
        lying = self.lying
        if lying.beside > 1:
            return f"ragged paged attention, {lying.beside} heads of {lying.head_dim} elements in a row of {lying.width}"
        if lying.width != lying.head_dim:
            return f"ragged paged attention, heads of {lying.head_dim} elements filled up to {lying.width}"
        return "ragged paged attention"

    def axes(self, dims: int = 4) -> tuple[str | None, ...]:
        """Logical names of the dims of the pages, or of their 3 of scales."""
        return (*[None] * (dims - 2), "kv_heads", None)

    def empty(self, pages: int, dtype: jnp.dtype) -> RaggedPages:
        """Pages of zeros."""
        rows = 2 * self.lying.rows * self.ways
        kept = dtype if self.cache is ServedCache.plain else self.dtype
        both = jnp.zeros((pages, self.page_size, rows, self.lying.width), kept)
        if self.cache is not ServedCache.int8:
            return RaggedPages(both)
        lines = self.ways * -(-self.page_size * self.lying.num_scales // LANES)
        return RaggedPages(both, jnp.zeros((pages, lines, LANES), jnp.float32))

    def attend(
        self,
        pages: RaggedPages,
        groups: Sequence[PageRows],
        cache_rows: tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]],
        window: int,
        logits: Logits,
    ) -> tuple[RaggedPages, jax.Array]:
        """See :meth:`systolic.models.decoder.page_arrays.PageArrays.attend`."""
        ((query,), (key, value)) = cache_rows
        (heads,) = self.target.spec("kv_heads")
        whole, split = PartitionSpec(), PartitionSpec(None, heads)
        of_pages = jax.tree.map(lambda part: PartitionSpec(*[None] * (part.ndim - 2), heads), pages)

        def local(
            pages: RaggedPages,
            groups: Sequence[PageRows],
            query: jax.Array,
            key: jax.Array,
            value: jax.Array,
        ) -> tuple[RaggedPages, jax.Array]:
            lying = self.lying
            new, scales = lying.coded(jnp.stack([key, value], axis=1), pages.both.dtype)
            kept = None if pages.scales is None else write_scales(pages, groups, scales)
            pages = RaggedPages(write(pages.both, groups, new), kept)
            queries, outputs, first = lying.ask(query), [], 0
            for group in groups:
                some = slice(first, first := first + group.positions.size)
                outputs.append(attend(queries[some], pages, group, (window, lying), logits))
            return pages, lying.answer(jnp.concatenate(outputs))

        # The partitioner can't split a kernel: each device has its own heads.
        written, outputs = jax.shard_map(
            local,
            mesh=self.target.mesh,
            in_specs=(of_pages, whole, split, split, split),
            out_specs=(of_pages, split),
            check_vma=False,
        )(pages, list(groups), query, key, value)
        return written, outputs


def write(pages: jax.Array, groups: Sequence[PageRows], new: jax.Array) -> jax.Array:
    """Pages [pages, page_size, 2 x rows, width] with the rows of new tokens [tokens, 2 x rows, width]."""
    size, first = pages.shape[1], 0
    for rows in groups:
        group = rows.single if isinstance(rows, DraftRows) else rows
        count, length = group.positions.shape
        own = new[first : first + count * length]
        first += count * length
        if length == 1:
            place, offset = jnp.divmod(group.positions[:, 0], size)
            page = pages_at(group.table, place[:, None])[:, 0]
            pages = pages.at[page, offset].set(own)
            continue
        number = -(-length // size)
        own = own.reshape(count, length, *own.shape[1:])
        own = jnp.pad(own, ((0, 0), (0, number * size - length), (0, 0), (0, 0)))
        place = group.positions[:, :1] // size + jnp.arange(number)
        page = pages_at(group.table, place).reshape(-1)
        pages = _write_whole(pages, page, own.reshape(count * number, size, *own.shape[2:]))
    return pages


def write_scales(pages: RaggedPages, groups: Sequence[PageRows], new: jax.Array) -> jax.Array:
    """Scales of pages with those of new tokens f32[tokens, num_scales]."""
    assert pages.scales is not None
    scales, size, first = pages.scales, pages.page_size, 0
    kept, each = scales.shape[1:], new.shape[1]
    lanes = jnp.arange(math.prod(kept)) // each
    for group in groups:
        count, length = group.positions.shape
        own = new[first : first + count * length]
        first += count * length
        if length == 1 or isinstance(group, DraftRows):
            # One after another, since tokens of a text lie in the same page.
            for at in range(length):
                place, offset = jnp.divmod(group.positions[:, at], size)
                page = pages_at(group.table, place[:, None])[:, 0]
                wide = jnp.tile(own[at::length], (1, -(-lanes.size // each)))[:, : lanes.size]
                mine = (lanes == offset[:, None]).reshape(count, *kept)
                block = jnp.where(mine, wide.reshape(count, *kept), scales[page])
                scales = scales.at[page].set(block)
            continue
        number = -(-length // size)
        own = jnp.pad(
            own.reshape(count, length, each), ((0, 0), (0, number * size - length), (0, 0))
        )
        own = own.reshape(count * number, size * each)
        own = jnp.pad(own, ((0, 0), (0, lanes.size - size * each)))
        place = group.positions[:, :1] // size + jnp.arange(number)
        page = pages_at(group.table, place).reshape(-1)
        scales = _write_whole(scales, page, own.reshape(-1, *kept))
    return scales


def _write_whole(pages: jax.Array, page: jax.Array, new: jax.Array) -> jax.Array:
    """Pages with whole ones ``new`` [n, page_size, 2 x rows, width] at int32[n].

    One after another: for a scatter of pages with few rows XLA wants another tile, and copies all of them there and back.
    """

    def write_page(number: jax.Array, pages: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(pages, new[number], page[number], 0)

    return jax.lax.fori_loop(0, page.shape[0], write_page, pages)


def attend(
    query: jax.Array,
    pages: RaggedPages,
    rows: PageRows,
    sight: tuple[int, HeadRows],
    logits: Logits,
) -> jax.Array:
    """Attention [tokens, heads, width] over pages that hold the tokens themselves; zeros for padding.

    Args:
        query: [tokens, heads, width].
        pages: Of the layer.
        rows: Of the tokens, in order.
        sight: Number of latest positions that are visible, 0 for all; and how heads lie in rows.
        logits: Scale and soft cap.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    count, length = rows.positions.shape
    start, table, size, (window, lying) = rows.positions[:, 0], rows.table, pages.page_size, sight
    if window:
        # Pages before the window are not read. The kernel counts from the first page that it is given.
        before = jnp.maximum(start - window + 1, 0) // size
        seen = min(table.shape[1], (window + length - 3) // size + 2)
        table = pages_at(table, before[:, None] + jnp.arange(seen))
        start = start - before * size
    assert logits.scale is not None
    scale = float(logits.scale)

    def some(query: jax.Array, start: jax.Array, table: jax.Array) -> jax.Array:
        """Attention of as many texts as the tables of one call hold."""
        texts, (both, table) = table.shape[0], _readable(pages, table, lying, query.dtype)
        # The kernel makes floats of the queries' dtype of what it has scales for.
        unit = 1.0 if both.dtype.itemsize == 1 else None
        blocks = block_sizes(query.shape, both, length, table.shape[1])
        return ragged_paged_attention(
            query,
            both,
            (start + length).astype(jnp.int32),
            table.astype(jnp.int32),
            (jnp.arange(texts + 1) * length).astype(jnp.int32),
            jnp.array([texts], jnp.int32),
            sm_scale=scale,
            k_scale=unit,
            v_scale=unit,
            sliding_window=window or None,
            soft_cap=logits.cap or None,
            num_kv_pages_per_block=blocks[0],
            num_queries_per_block=blocks[1],
        )

    most = texts_at_once(table.shape[1])
    cuts = [slice(first, min(first + most, count)) for first in range(0, count, most)]
    queries = query.reshape(count, length, *query.shape[1:])
    outputs = jnp.concatenate(
        [some(queries[cut].reshape(-1, *query.shape[1:]), start[cut], table[cut]) for cut in cuts]
    )
    real = jnp.arange(length) < rows.count[:, None]
    # What padding reads is not defined, and would spread as NaN where tokens are mixed by products.
    return jnp.where(real.reshape(-1, 1, 1), outputs, 0)


def _readable(
    pages: RaggedPages, table: jax.Array, lying: HeadRows, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Pages that the kernel reads and the table of them: those in int8 are restored, each text's its own."""
    if pages.scales is None:
        return pages.both, table
    read = table.reshape(-1)
    scales = pages.scales[read].reshape(read.size, -1)[:, : pages.page_size * lying.num_scales]
    own = jnp.arange(read.size).reshape(table.shape)
    return lying.restored(pages.both[read], scales, dtype), own


def texts_at_once(pages: int) -> int:
    """Texts of so many pages whose table one call of the kernel holds; its rows are filled up to whole registers."""
    row_bytes = 4 * -(-pages // LANES) * LANES
    return max(1, SMEM_BYTES // row_bytes)


def block_sizes(
    queries: tuple[int, ...], pages: jax.Array, length: int, most: int
) -> tuple[int, int]:
    """Pages of a text and queries that the kernel takes at once, the most that its memory holds.

    Args:
        queries: [tokens, heads, width].
        pages: See :func:`attend`.
        length: Tokens of a text.
        most: Pages of a text.
    """
    _, size, combined, width = pages.shape
    tokens, heads, _ = queries
    item = pages.dtype.itemsize
    tile = SUBLANES * 4 // item
    parts = combined // tile if combined % tile == 0 else 1
    combined, heads = combined // parts, heads // parts
    wanted = (DECODE_QUERIES,) if length == 1 else QUERIES
    together = min(most, MOST_PAGES, max(1, TOGETHER // size))

    def need(number: int, query_count: int) -> int:
        kept = 2 * number * size * combined * width * item
        asking = query_count * heads * (width * (4 * item + 4) + 2 * LANES * 4)
        scores = 3 * query_count * heads // (combined // 2) * number * size * 4
        return kept + asking + scores

    for number in (together >> half for half in range(together.bit_length())):
        for query_count in wanted:
            if query_count <= max(tokens, wanted[-1]) and need(number, query_count) <= VMEM_BYTES:
                return number, min(query_count, tokens)
    return 1, min(wanted[-1], tokens)


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


def turned(state: nnx.State, *, wide: bool = False) -> nnx.State:
    """The weights of a layer with its dense matrices, plain or in int8 with a scale an output, as :class:`Turned`; latents' and experts' as they are.

    Matrices that read the same activations are one, in the place of the first; the others hold nothing.

    Args:
        state: Of one layer.
        wide: Whether plain ones are float32.
    """
    flat = dict(nnx.to_flat_state(state))

    def turns(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> bool:
        codes = path[-1] == CODES
        if (
            path[-2 if codes or path[-1] == BASE else -1] not in TURNED
            or "latent" in path
            or EXPERTS in axes
        ):
            return False
        scales = flat.get((*path[:-1], SCALES)) if codes else None
        if scales is None:
            return True
        return turns_alone(flat[path].get_value(), scales.get_value(), num_inputs(axes))

    for path, variable in list(flat.items()):
        axes = variable.get_metadata().get("out_sharding") or ()
        axes = tuple(axis for axis in axes if axis not in STACKED)
        if turns(path, axes):
            value = variable.get_value()
            value = value.astype(jnp.float32) if wide and path[-1] != CODES else value
            flat[path] = variable.replace(Turned.of(value, num_inputs(axes)))
    for names in ([path[-1] for path in paths] for paths in JOINED):
        first = [p for p in flat if p[-1] == names[0] or p[-2:] == (names[0], CODES)]
        for path in first:
            _join(flat, path, names)
    return nnx.from_flat_state(list(flat.items()))


def joined(state: nnx.State) -> nnx.State:
    """The weights of a layer with plain matrices of the same rows as :class:`Joined` in the first's place, the others without outputs.

    XLA's GPU compiler joins such products itself, and where cuBLAS runs them copies the matrices side by side for it in each step: a
    fifth of the step that reads 512 tokens of a prompt with a decoder of 1B parameters on H100, as forecast. The others stay, since
    shardings of weights that are not joined are given to the leaves in turn.
    """
    flat = dict(nnx.to_flat_state(state))
    for paths in JOINED:
        if any(path not in flat or _holds_experts(flat[path]) for path in paths):
            continue
        variables = [flat[path] for path in paths]
        arrays = [variable.get_value() for variable in variables]
        flat[paths[0]] = variables[0].replace(Joined.of(arrays))
        for path, variable, array in zip(paths[1:], variables[1:], arrays[1:], strict=True):
            flat[path] = variable.replace(array[:, :0])
    return nnx.from_flat_state(list(flat.items()))


def _holds_experts(variable: nnx.Variable) -> bool:
    return EXPERTS in (variable.get_metadata().get("out_sharding") or ())


def _join(flat: dict[Any, Any], first: tuple[Any, ...], names: Sequence[str]) -> None:
    """Puts matrices of which all were turned in the place of the first, and nothing in those of the others; changes the state."""
    block, parts = (first[:-2], (CODES, SCALES, INPUTS)) if first[-1] == CODES else (first[:-1], ())

    def values(each: str) -> list[Any]:
        paths = [(*block, each, part) for part in parts] or [(*block, each)]
        return [flat[path].get_value() if path in flat else None for path in paths]

    if any(path[: len(block)] == block and path[-1] == A for path in flat):
        return
    joined = joined_matrices([MatrixParts(*values(each)) for each in names])
    if joined is None:
        return
    for number, value in enumerate(joined[: max(len(parts), 1)]):
        for each in names:
            path = (*block, each, *parts[number : number + 1])
            if path in flat:
                flat[path] = flat[path].replace(value if each == names[0] else None)


def turns_alone(codes: jax.Array, scales: jax.Array, inputs: int) -> bool:
    """Whether a product with codes, whose first dims are inputs, is made of the codes alone, in int8, and its result scaled; not where each head has its own scales."""
    after = Quantized(codes=codes, scales=scales).scaled_after
    return codes.dtype == jnp.int8 and after and math.prod(scales.shape[:inputs]) == 1


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
    *,
    drafts: bool = False,
) -> tuple[jax.Array, list[Any]]:
    """Runs tokens over the pages of their rows, with theirs in them.

    Args:
        module: Its embedding and last norm; the blocks' weights are not used.
        layers: See :func:`layers_of`.
        reading: The tokens.
        pages: Of each layer.
        chunk: How many chunks there are, and tokens of each; (0, 0) for decode rows alone.
        cache: Format of the pages.
        drafts: Whether the chunks are proposals for texts, which begin anywhere in a page.

    Returns:
        Input of the output matrix, [tokens, d_model], and the pages.
    """
    rows = reading.start.shape[0] - chunk[0]
    groups = _groups(reading, rows, chunk, DraftRows if drafts else PageRows)
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
        new_rows, bad = _finite(module.target, new_rows)
        own, weighted = arrays.attend(own, groups, new_rows, layer.window, block.attention_logits)
        # Attention [tokens, heads, size] with NaN where a token's own keys or values were not finite.
        heads = weighted.reshape(*bad.shape[:2], -1, weighted.shape[-1])
        bad = bad[:, :, None, None] if bad.ndim == 2 else bad[:, :, None]
        weighted = jnp.where(bad, jnp.nan, heads).reshape(weighted.shape)
        written.append(own)
        attended = block.answer(weighted[:, None].astype(x.dtype))
        x, _ = block.merge(x, attended, real)
    hidden = module.normed(x)[:, 0]
    return hidden if drafts else _spread(hidden, real, rows, chunk), written


def _finite(target: Target, rows: Any) -> tuple[Any, jax.Array]:
    """New keys and values with 0 for what is not finite, and of which tokens and heads that is.

    Pages outlive a text, and reading weighs what is beyond a text with 0, which makes NaN of NaN: one text's
    overflow would become that of others. bool[tokens, kv_heads]; on a GPU of each element where keys are as wide as values:
    the product with the output matrix spreads one NaN over its token, and two reductions of each layer are two kernels less.
    """
    queries, new = rows
    right = [jnp.isfinite(each) for each in new]
    kept = tuple(jnp.where(ok, each, 0) for ok, each in zip(right, new, strict=True))
    if target.platform == "gpu" and new[0].shape == new[1].shape:
        return (queries, kept), ~(right[0] & right[1])
    return (queries, kept), ~(right[0].all(-1) & right[1].all(-1))


def _spread(hidden: jax.Array, real: jax.Array, rows: int, chunk: tuple[int, int]) -> jax.Array:
    """``hidden`` with NaN in all of a chunk where one of its tokens is not finite: those after it were not read right."""
    if not chunk[0]:
        return hidden
    bad = ~jnp.isfinite(hidden[rows:]).all(-1) & (real[rows:] > 0)
    lost = jnp.repeat(bad.reshape(chunk).any(-1), chunk[1])
    return hidden.at[rows:].set(jnp.where(lost[:, None], jnp.nan, hidden[rows:]))


def _groups(
    reading: Reading, rows: int, chunk: tuple[int, int], kind: type[PageRows]
) -> list[PageRows]:
    """Decode rows and chunks, as far as there are any."""
    chunks, length = chunk
    groups = []
    if rows:
        positions = reading.start[:rows, None]
        groups.append(PageRows(reading.table[:rows], positions, reading.count[:rows]))
    if chunks:
        positions = reading.start[rows:, None] + jnp.arange(length)
        groups.append(kind(reading.table[rows:], positions, reading.count[rows:]))
    return groups
