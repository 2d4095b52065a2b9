"""Arrays of a key-value cache in pages, of one layer: how they lie, are written and are read.

``table`` int32[rows, pages of a row] says where each row's positions lie: the first page has positions
0 to ``page_size - 1``, and so on. PageRows are either one token each (decode) or a chunk of a prompt that
starts at the first position of a page.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from systolic.job import ServedCache, Target
from systolic.models.attention import Logits, soft_cap
from systolic.models.decoder.cache import coded
from systolic.models.linear import alone_on_gpu

SPLITS = 8
"""Most parts of a text that are read side by side."""
BUSY = 512
"""Blocks that fill a GPU: with as many texts and heads no text is read in parts."""
FEW = 16
"""Most queries of a key-value head and text whose products on a CPU have the keys as the left operand."""
TOGETHER = 128
"""Positions that the GPU's kernel reads at once."""


class LayerPages(NamedTuple):
    """Keys and values of a layer."""

    key: jax.Array
    """[kv_heads, pages, page_size, head_dim]; with latent attention the rotated key of all heads."""
    value: jax.Array
    """[kv_heads, pages, page_size, head_dim]; with latent attention the latents."""
    scales: tuple[jax.Array, jax.Array] | None = None
    """Scales of keys and of values in int8, f32[kv_heads, pages, page_size] each."""

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.value.shape[2]


def gpu_kernel_takes(target: Target, sizes: tuple[int, int], window: int, logits: Logits) -> bool:
    """Whether the GPU's kernel does this: one token a text, a head of a power of two, no window, no sinks, one device.

    Args:
        target: The platform.
        sizes: Tokens of a text and elements of a head.
        window: See :meth:`systolic.models.decoder.page_arrays.PageArrays.read`.
        logits: Likewise.
    """
    length, head = sizes
    fits = length == 1 and head >= 16 and head & (head - 1) == 0
    return alone_on_gpu(target) and fits and not window and logits.sinks is None


def kernel_of_gpus() -> Any:
    """JAX's module with the kernel, which JAX 0.12 deprecates and names no other for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention
    return paged_attention


def attend_on_gpu(
    query: jax.Array, pages: LayerPages, table: jax.Array, positions: jax.Array, logits: Logits
) -> jax.Array:
    """Attention [texts, heads, head_dim] by JAX's Pallas kernel for GPUs.

    Args:
        query: [texts, heads, head_dim].
        pages: Of the layer, with the tokens themselves.
        table: int32[texts, pages of a text].
        positions: int32[texts]: of the tokens.
        logits: Scale and soft cap.
    """
    heads, _, size, _ = pages.value.shape
    splits = max(1, min(SPLITS, BUSY // (heads * table.shape[0])))
    together = max(1, TOGETHER // size)
    # Pages beyond a text's length are not read; the kernel wants whole parts of whole blocks.
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * together))))
    assert logits.scale is not None
    scales = pages.scales or (None, None)
    return kernel_of_gpus().paged_attention(
        (query * logits.scale).astype(query.dtype),
        pages.key,
        pages.value,
        table,
        positions + 1,
        k_scales_pages=scales[0],
        v_scales_pages=scales[1],
        pages_per_compute_block=together,
        k_splits=splits,
        attn_logits_soft_cap=logits.cap or None,
    )


def cudnn_takes(target: Target, dtype: jnp.dtype, head: int, logits: Logits) -> bool:
    """Whether cuDNN's attention does this: 16-bit floats, a head of at most 128 elements, plain logits, one device."""
    fits = dtype.itemsize == 2 and head <= 128 and head % 8 == 0
    return alone_on_gpu(target) and fits and logits.plain


def attend_by_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, logits: Logits
) -> jax.Array:
    """Attention [texts, n, heads, head_dim] over gathered pages, no product of which is stored.

    Args:
        query: [texts, n, heads, head_dim].
        key: [kv_heads, texts, positions, head_dim].
        value: Like key.
        seen: bool[texts, n, positions].
        logits: Scale.
    """
    by_text = (1, 2, 0, 3)
    return jax.nn.dot_product_attention(
        query,
        key.transpose(by_text),
        value.transpose(by_text),
        mask=seen[:, None],
        scale=logits.scale,
        implementation="cudnn",
    )


class PageRows(NamedTuple):
    """PageRows of a step that have as many tokens each."""

    table: jax.Array
    """int32[rows, pages of a row]."""
    positions: jax.Array
    """int32[rows, n]: consecutive; those of a chunk begin with a page."""
    count: jax.Array
    """int32[rows]: how many are real."""


class DraftRows(PageRows):
    """Rows of tokens that begin anywhere in a page, so that each token is written by itself."""

    __slots__ = ()

    @property
    def single(self) -> PageRows:
        """The same tokens as rows of one each."""
        length = self.positions.shape[1]
        table, count = (jnp.repeat(part, length, axis=0) for part in (self.table, self.count))
        return PageRows(table, self.positions.reshape(-1, 1), count)


class PageArrays:
    """How pages lie on a platform.

    Args:
        target: The platform; its mesh splits the heads.
        kv_heads: Heads of keys and values.
        sizes: Elements of a key and of a value of one head.
        page_size: Positions of a page.
        unsuited: Why the platform's kernel does not take the model, where that is known beforehand.
        cache: Format of keys and values.
    """

    def __init__(
        self,
        target: Target,
        kv_heads: int,
        sizes: tuple[int, int],
        page_size: int,
        unsuited: str = "",
        cache: ServedCache = ServedCache.plain,
    ) -> None:
        self.cache = cache
        self.target, self.kv_heads, self.sizes, self.page_size = target, kv_heads, sizes, page_size
        self._unsuited = unsuited

    @property
    def kernel(self) -> str:
        """Name of the kernel that reads the pages, for a log."""
        if self.target.platform == "gpu":
            return "a kernel where it takes the step, or XLA"
        return f"XLA: {self._unsuited}" if self._unsuited else "XLA"

    def shapes(self, pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two arrays of a layer."""
        key, value = ((self.kv_heads, pages, self.page_size, size) for size in self.sizes)
        return key, value

    def axes(self, dims: int = 4) -> tuple[str | None, ...]:
        """Logical names of the dims of both, or of their 3 of scales."""
        return ("kv_heads", *[None] * (dims - 1))

    def empty(self, pages: int, dtype: jnp.dtype) -> LayerPages:
        """Pages of zeros."""
        key, value = self.shapes(pages)
        kept = self.kept(dtype)
        scales = None
        if self.cache is ServedCache.int8:
            scales = (jnp.zeros(value[:3], jnp.float32), jnp.zeros(value[:3], jnp.float32))
        return LayerPages(jnp.zeros(key, kept), jnp.zeros(value, kept), scales)

    def kept(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype of the arrays: bits of narrow floats on a CPU, where XLA converts all pages to float32 and back to write one."""
        if self.cache is ServedCache.int8:
            return jnp.dtype(jnp.int8)
        kept = self._floats(dtype)
        if self.target.platform != "cpu" or kept.itemsize > 2:
            return kept
        return jnp.dtype(f"uint{8 * kept.itemsize}")

    def _floats(self, dtype: jnp.dtype) -> jnp.dtype:
        """Dtype of pages that are not int8."""
        return jnp.dtype(jnp.float8_e4m3fn if self.cache is ServedCache.fp8 else dtype)

    def attend(
        self,
        pages: LayerPages,
        groups: Sequence[PageRows],
        cache_rows: tuple[tuple[jax.Array, ...], tuple[jax.Array, jax.Array]],
        window: int,
        logits: Logits,
    ) -> tuple[LayerPages, jax.Array]:
        """The pages with the rows of new tokens, and attention over them [tokens, heads, size of a value].

        Args:
            pages: Of the layer.
            groups: Where the tokens are, in order.
            cache_rows: Queries of keys and, with latents, of values, [tokens, heads, size] each, and new keys and values
                [tokens, kv_heads, size].
            window: Number of latest positions that are visible; 0 for all.
            logits: Scale, soft cap and sinks.
        """
        queries, new = cache_rows
        outputs, first = [], 0
        for group in groups:
            count, length = group.positions.shape
            some = slice(first, first := first + count * length)

            def part(
                array: jax.Array, some: slice = some, shape: tuple[int, int] = (count, length)
            ) -> jax.Array:
                return array[some].reshape(*shape, *array.shape[1:])

            pages = self.write(pages, group, (part(new[0]), part(new[1])))
            seen = self.read([part(query) for query in queries], pages, group, window, logits)
            outputs.append(seen.reshape(-1, *seen.shape[2:]))
        return pages, jnp.concatenate(outputs)

    def write(
        self, pages: LayerPages, rows: PageRows, new: tuple[jax.Array, jax.Array]
    ) -> LayerPages:
        """Pages with the keys and values of new tokens, [rows, n, kv_heads, size] each."""
        if isinstance(rows, DraftRows):
            rows = rows.single
            new = jax.tree.map(lambda part: part.reshape(-1, 1, *part.shape[2:]), new)
        write = self._write_one if rows.positions.shape[1] == 1 else self._write_chunk
        scales = None
        if pages.scales is None:
            key, value = (self._as_kept(each, pages.key.dtype) for each in new)
        else:
            (key, of_key), (value, of_value) = (coded(each, jnp.float32) for each in new)

            def scaled(old: jax.Array, new: jax.Array) -> jax.Array:
                return self._split(write(old[..., None], rows, new[..., None]))[..., 0]

            scales = scaled(pages.scales[0], of_key), scaled(pages.scales[1], of_value)
        return LayerPages(
            self._split(write(pages.key, rows, key)),
            self._split(write(pages.value, rows, value)),
            scales,
        )

    def _as_kept(self, new: jax.Array, kept: jnp.dtype) -> jax.Array:
        floats = self._floats(jnp.dtype(self.target.dtype) if kept.kind == "u" else kept)
        new = narrowed(new, floats)
        return new if floats == kept else jax.lax.bitcast_convert_type(new, kept)

    def _as_floats(self, part: jax.Array) -> jax.Array:
        if part.dtype.kind != "u":
            return part
        return jax.lax.bitcast_convert_type(part, self._floats(jnp.dtype(self.target.dtype)))

    def _split(self, part: jax.Array) -> jax.Array:
        return self.target.constrain(part, *self.axes())

    def _write_one(self, part: jax.Array, rows: PageRows, new: jax.Array) -> jax.Array:
        place, offset = jnp.divmod(rows.positions[:, 0], self.page_size)
        page = pages_at(rows.table, place[:, None])[:, 0]
        return part.at[:, page, offset].set(new[:, 0].swapaxes(0, 1))

    def _write_chunk(self, part: jax.Array, rows: PageRows, new: jax.Array) -> jax.Array:
        count, length, heads, width = new.shape
        size, pages = self.page_size, -(-length // self.page_size)
        new = jnp.pad(new, ((0, 0), (0, pages * size - length), (0, 0), (0, 0)))
        new = new.reshape(count * pages, size, heads, width).transpose(2, 0, 1, 3)
        place = rows.positions[:, :1] // size + jnp.arange(pages)
        return part.at[:, pages_at(rows.table, place).reshape(-1)].set(new)

    def read(
        self,
        queries: Sequence[jax.Array],
        pages: LayerPages,
        rows: PageRows,
        window: int,
        logits: Logits,
    ) -> jax.Array:
        """Attention over pages that hold the tokens themselves: [rows, n, heads, size of a value].

        Args:
            queries: Of keys and, with latents, of values, [rows, n, heads, size] each.
            pages: Of the layer.
            rows: Where the tokens are.
            window: Number of latest positions that are visible; 0 for all.
            logits: Scale, soft cap and sinks.
        """
        count, length, heads, size = queries[0].shape
        kernel = gpu_kernel_takes(self.target, (length, size), window, logits)
        if kernel and len(queries) == 1 and self.cache is not ServedCache.fp8:
            return attend_on_gpu(queries[0][:, 0], pages, rows.table, rows.positions[:, 0], logits)[
                :, None
            ]
        dtype, group = queries[0].dtype, heads // self.kv_heads
        key, value, (of_key, of_value) = self._gathered(pages, rows.table)
        value = value.reshape(self.kv_heads, count, -1, value.shape[-1]).astype(dtype)

        places, own = jnp.arange(value.shape[2]), rows.positions[:, :, None]
        seen = places <= own
        if window:
            seen &= own - places < window
        if len(queries) == 1 and cudnn_takes(self.target, jnp.dtype(dtype), size, logits):
            key = key.reshape(value.shape).astype(dtype)
            if pages.scales is not None:
                key = (key.astype(jnp.float32) * of_key.swapaxes(2, 3)).astype(dtype)
                value = (value.astype(jnp.float32) * of_value.swapaxes(2, 3)).astype(dtype)
            return attend_by_cudnn(queries[0], key, value, seen, logits)

        def by_head(query: jax.Array) -> jax.Array:
            """[kv_heads, rows, group x n, size]."""
            split = query.reshape(count, length, self.kv_heads, group, -1)
            return split.transpose(2, 0, 3, 1, 4).reshape(self.kv_heads, count, group * length, -1)

        split_queries = [by_head(query) for query in queries]
        total = self._products(split_queries[0], key.astype(dtype)) * of_key
        if len(split_queries) == 2:
            latent = jnp.einsum(
                "krme,krse->krms", split_queries[1], value, preferred_element_type=jnp.float32
            )
            total = total + latent * of_value
        assert logits.scale is not None
        total = soft_cap(total * logits.scale, logits.cap)
        total = jnp.where(jnp.tile(seen, (1, group, 1)), total, jnp.finfo(jnp.float32).min)
        shares = _softmax(total, _sinks(logits, self.kv_heads, length))
        shares = (shares * of_value).astype(dtype)
        # XLA's CPU kernels of 16-bit operands make float32; other results would convert all values first.
        wide = jnp.float32 if self.target.platform == "cpu" else None
        weighted = jnp.einsum("krms,krse->krme", shares, value, preferred_element_type=wide)
        weighted = weighted.astype(dtype).reshape(self.kv_heads, count, group, length, -1)
        return weighted.transpose(1, 3, 0, 2, 4).reshape(count, length, heads, -1)

    def _gathered(
        self, pages: LayerPages, table: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[Any, Any]]:
        """Keys and values of a table's pages, and what their products are scaled by: f32[kv_heads, rows, 1, positions], or 1."""
        key, value, scales = jax.lax.optimization_barrier(
            jax.tree.map(lambda part: part[:, table], tuple(pages))
        )
        key, value = self._as_floats(key), self._as_floats(value)
        if scales is None:
            return key, value, (1.0, 1.0)
        of_key, of_value = (each.reshape(*each.shape[:2], 1, -1) for each in scales)
        return key, value, (of_key, of_value)

    def _products(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """f32[kv_heads, rows, queries, positions] of keys [kv_heads, rows, pages of a row, ...]."""
        heads, count, many, size = query.shape
        key, wide = key.reshape(heads, count, -1, size), jnp.float32
        if self.target.platform != "cpu" or many > FEW:
            return jnp.einsum("krme,krse->krms", query, key, preferred_element_type=wide)
        # XLA's CPU kernels copy the right operand; without the barrier the compiler would exchange them again.
        products = jnp.einsum("krse,krme->krsm", key, query, preferred_element_type=wide)
        return jax.lax.optimization_barrier(products).swapaxes(2, 3)


def narrowed(new: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """New keys or values in another float dtype; float8, which has no infinity, is given its largest number for what is larger."""
    if dtype.itemsize > 1 or dtype == new.dtype:
        return new.astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(new, -most, most).astype(dtype)


def pages_at(table: jax.Array, place: jax.Array) -> jax.Array:
    """Pages of places int32[rows, n]; a place beyond the table is padding's, whose page nobody reads."""
    pages = jnp.take_along_axis(table, jnp.minimum(place, table.shape[1] - 1), axis=1)
    return jnp.where(place < table.shape[1], pages, 0)


def _sinks(logits: Logits, kv_heads: int, length: int) -> jax.Array | None:
    """f32[kv_heads, 1, group x n, 1]; None without sinks."""
    if logits.sinks is None:
        return None
    sinks = logits.sinks.astype(jnp.float32).reshape(kv_heads, 1, -1, 1)
    return jnp.repeat(sinks, length, axis=2)


def _softmax(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks)
    powers = jnp.exp(logits - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / (total if sinks is None else total + jnp.exp(sinks - largest))
