"""Attention of one new token over pages by a platform's own kernel, which reads them where they lie."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from systolic.job import Target
from systolic.models.masking import Logits

SPLITS = 8
"""Most parts of a text that are read side by side."""
BUSY = 512
"""Blocks that fill a GPU: with as many texts and heads no text is read in parts."""
TOGETHER = 128
"""Positions that the GPU's kernel reads at once."""


class LayerPages(NamedTuple):
    """Keys and values of a layer."""

    key: jax.Array
    """[kv_heads, pages, page_size, head_dim], or with the last two turned round: see :attr:`PageArrays.turned`.
    With latent attention the rotated key of all heads."""
    value: jax.Array
    """[kv_heads, pages, page_size, head_dim]; with latent attention the latents."""
    scales: tuple[jax.Array, jax.Array] | None = None
    """Of keys and of values in int8, f32[kv_heads, pages, page_size] each."""

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
    alone = target.platform == "gpu" and target.layout.num_devices == 1
    return alone and fits and not window and logits.sinks is None


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
    alone = target.platform == "gpu" and target.layout.num_devices == 1
    return alone and dtype.itemsize == 2 and head <= 128 and head % 8 == 0 and logits.plain


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
