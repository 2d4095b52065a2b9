"""Attention by target platform: splash on TPU, cuDNN on GPU, XLA elsewhere; with its masks, what changes its logits, and the order of a sequence over the context axis.

The kernel is chosen from where the program *will run* and from the shapes, never from the devices
of the machine that traces it. A shape that rules a kernel out is reported with ``target.note``.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as name

from systolic.job import ContextOrder, Target

LEAST_TOKENS = 4096
"""Rows from which on balanced order pays on a TPU (``ContextOrder.auto``).

By schedule, two layers of width 2,048 with 131,072 tokens a step on v5e-8 with context 4, natural against balanced: 1,024
tokens 213 and 233 ms, 2,048 216 and 230, 4,096 240.4 and 240.5, 8,192 279 and 267, 16,384 354 and 318. Moving the pieces takes as
long for any row, what equal work saves grows with it.
"""
ATTENDED = "attention"
"""Name of attention's result for policies of rematerialisation."""
CUDNN_PLAIN = "cuDNN attention has neither soft caps nor sinks: using plain attention, whose memory grows with the square of the sequence"
"""Note on a decoder with soft caps or sinks on a GPU."""
CUDNN_UNEVEN = "cuDNN attention takes values as wide as queries and keys only: using plain attention, whose memory grows with the square of the sequence"
"""Note on latent attention on a GPU."""


@dataclass(frozen=True)
class BalancedOrder:
    """A sequence of ``2 * ways`` chunks, over ``ways`` devices.

    In natural order the device with the end of the sequence compares its queries with all keys, the one
    with the start with few: of ``n`` devices the last does ``2 - 1 / n`` times the mean. Here each device
    holds two chunks, one from the start and one from the end (0 and 2n-1, 1 and 2n-2, ...), whose work
    adds up to the same. Only attention, and what looks at neighbours, has to know.
    """

    ways: int

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The natural number of the chunk at each place: 0, 2n-1, 1, 2n-2, ..."""
        last = 2 * self.ways - 1
        return tuple(chunk for first in range(self.ways) for chunk in (first, last - first))

    def indices(self, sequence: int) -> np.ndarray:
        """int32[sequence]: the natural index of what lies at each place."""
        natural = np.arange(sequence, dtype=np.int32).reshape(len(self.chunks), -1)
        return natural[list(self.chunks)].reshape(-1)

    def arrange(self, array: jax.Array, axis: int = 1) -> jax.Array:
        """``array`` with its natural sequence dim in this order."""
        return _take(array, axis, self.chunks)

    def restore(self, array: jax.Array, axis: int = 1) -> jax.Array:
        """Inverse of :meth:`arrange`."""
        return _take(array, axis, tuple(int(place) for place in np.argsort(self.chunks)))


def balanced(target: Target, sequence: int) -> BalancedOrder | None:
    """The order for a causal decoder; None where the sequence stays as it is.

    On a TPU each chunk must hold whole blocks of the attention kernel. On a GPU, cuDNN masks by place.
    """
    ways = target.layout.context
    multiple = 2 * ways * (128 if target.platform == "tpu" else 1)
    order = target.layout.context_order
    if ways == 1 or order is ContextOrder.natural:
        return None
    if order is ContextOrder.auto and target.platform == "tpu" and sequence < LEAST_TOKENS:
        return None
    if target.platform == "gpu" or sequence % multiple:
        return None
    return BalancedOrder(ways)


def _take(array: jax.Array, axis: int, chunks: tuple[int, ...]) -> jax.Array:
    # Slices that the compiler sees through, not a gather.
    parts = jnp.split(array, len(chunks), axis=axis)
    return jnp.concatenate([parts[chunk] for chunk in chunks], axis=axis)


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Positions that each position attends to."""

    segments: jax.Array | None = None
    """int32[batch, sequence]: a position sees its own segment only."""
    causal: bool = False
    """Whether a position sees only itself and earlier ones."""
    window: int = 0
    """Causal only: itself and the ``window - 1`` before it; 0 sees all."""
    order: BalancedOrder | None = None
    """Order of queries, keys, values and segments; causality follows their natural order."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Transformation of the products of queries and keys before the softmax."""

    scale: float | None = None
    """Factor of the products; 1/sqrt(head_dim) by default."""
    cap: float = 0.0
    """Soft cap: ``cap * tanh(logit / cap)`` (Gemma 2, section 2); 0 has none."""
    sinks: jax.Array | None = None
    """f32[heads]: one more logit per head, in the softmax's denominator only."""

    @property
    def plain(self) -> bool:
        """Whether there is neither a soft cap nor a sink."""
        return not self.cap and self.sinks is None


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """``cap * tanh(logits / cap)``, same dtype; the logits themselves where the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


EVERYTHING, AS_THEY_ARE = Masking(), Logits()


class Kernel(enum.Enum):
    """An implementation of scaled dot product attention."""

    splash = "splash"
    """Pallas block-sparse flash attention for TPU."""
    cudnn = "cudnn"
    """cuDNN flash attention for NVIDIA GPUs."""
    xla = "xla"
    """Plain matmuls and softmax: any shape, memory grows with the square of the sequence."""


def choose_kernel(
    platform: str, num_queries: int, num_keys: int, head_dim: int, context_ways: int = 1
) -> tuple[Kernel, str]:
    """The kernel for these shapes and, when it is not the platform's fast one, the reason."""
    if platform == "tpu":
        local = num_queries // context_ways
        if local % 128 or num_keys % 128:
            return (
                Kernel.xla,
                f"splash attention needs sequences of a multiple of 128 per device, not {local} and {num_keys}: using plain attention, whose memory grows with the square of the sequence",
            )
        return Kernel.splash, ""
    if platform == "gpu":
        if context_ways > 1:
            return (
                Kernel.xla,
                f"cuDNN attention takes whole sequences, not {context_ways} parts of one on as many devices: using plain attention, whose memory grows with the square of the sequence",
            )
        if head_dim % 8 or head_dim > 128:
            return (
                Kernel.xla,
                f"cuDNN attention needs head dims of a multiple of 8 up to 128, not {head_dim}: using plain attention",
            )
        return Kernel.cudnn, ""
    return Kernel.xla, ""


def attention(
    target: Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking = EVERYTHING,
    logits: Logits = AS_THEY_ARE,
) -> jax.Array:
    """Multi-head attention with grouped keys and values; what its gradient needs of its result has the name ``attention``.

    Args:
        target: Where the program will run.
        query: [batch, sequence, heads, head_dim].
        key: [batch, sequence, kv_heads, head_dim]; heads is a multiple of kv_heads.
        value: [batch, sequence, kv_heads, size]; with latent attention of another size than keys.
        masking: Positions that each position attends to.
        logits: Scale, soft cap and sinks of the products of queries and keys.

    Returns:
        [batch, sequence, heads, size] in the dtype of ``query``.
    """
    if logits.scale is None:
        logits = replace(logits, scale=query.shape[-1] ** -0.5)
    kernel, reason = choose_kernel(
        target.platform, query.shape[1], key.shape[1], query.shape[-1], target.layout.context
    )
    by_hand = query.shape[-1] != value.shape[-1] or not logits.plain
    if kernel is Kernel.cudnn and by_hand:
        kernel, reason = Kernel.xla, CUDNN_UNEVEN if logits.plain else CUDNN_PLAIN
    if reason:
        target.note(reason)
    if kernel is Kernel.splash:
        from systolic.models.splash import splash_attention

        attended = splash_attention(target, query, key, value, masking, logits)
        return attended if masking.causal else name(attended, ATTENDED)
    key, value = (target.constrain(part, "batch", None, "kv_heads", None) for part in (key, value))
    mask, causal, window = _mask(masking, query.shape[1], whole=by_hand)
    attend = partial(
        jax.nn.dot_product_attention,
        mask=mask,
        is_causal=causal,
        local_window_size=(window - 1, 0) if window else None,
        scale=logits.scale,
    )
    if kernel is Kernel.cudnn:
        try:
            return name(_by_cudnn(attend, query, key, value), ATTENDED)
        except RuntimeError as error:
            # JAX asks for the library while tracing, also for another machine.
            target.note(
                f"{error} On this machine the program is built with plain attention; install systolic[cuda] to build it with cuDNN's"
            )
    wide = plain_dtype(target, query.dtype)
    plain = (query.astype(wide), key.astype(wide), value.astype(wide))
    if by_hand:
        return name(attend_plainly(*plain, mask, logits).astype(query.dtype), ATTENDED)
    return name(attend(*plain, implementation="xla").astype(query.dtype), ATTENDED)


def _by_cudnn(
    attend: Callable[..., jax.Array], query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """Attention in a dtype that cuDNN takes, whose gradient leaves out that of the mask.

    JAX passes a mask as a bias and, from 0.5 to 0.12 at least, always has cuDNN write its gradient: as many numbers as there
    are scores, which nobody reads. A version that decides in another way keeps its own answer.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    dtype = query.dtype if query.dtype in (jnp.bfloat16, jnp.float16) else jnp.bfloat16
    narrow = (query.astype(dtype), key.astype(dtype), value.astype(dtype))
    has_gradient = vars(cudnn).get("should_export_dbias")
    try:
        if has_gradient is not None:
            vars(cudnn)["should_export_dbias"] = lambda *_: False
        return attend(*narrow, implementation="cudnn").astype(query.dtype)
    finally:
        if has_gradient is not None:
            vars(cudnn)["should_export_dbias"] = has_gradient


def attend_plainly(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, logits: Logits
) -> jax.Array:
    """Attention by matmuls and a softmax in float32, with soft caps and sinks.

    Args:
        query: [batch, queries, heads, head_dim].
        key: [batch, keys, kv_heads, head_dim].
        value: [batch, keys, kv_heads, size].
        mask: bool, broadcast to [batch, heads or 1, queries, keys]: what is seen; None sees all.
        logits: With a scale.

    Returns:
        [batch, queries, heads, size] in the dtype of ``query``.
    """
    batch, queries, heads, _ = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, queries, kv_heads, heads // kv_heads, -1)
    scores = jnp.einsum("bqkge,bske->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    assert logits.scale is not None
    scores = soft_cap(scores * logits.scale, logits.cap)
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    sinks = None
    if logits.sinks is not None:
        sinks = logits.sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
        largest = jnp.maximum(largest, jax.lax.stop_gradient(sinks))
    chances = jnp.exp(scores - largest)
    total = chances.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    weights = (chances / total).astype(value.dtype)
    return jnp.einsum("bkgqs,bske->bqkge", weights, value).reshape(batch, queries, heads, -1)


def plain_dtype(target: Target, dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of plain attention: XLA's CPU matmul has no float16 form with float32 accumulation, which the logits need."""
    return jnp.dtype(jnp.float32) if target.platform == "cpu" and dtype == jnp.float16 else dtype


def _mask(masking: Masking, sequence: int, whole: bool) -> tuple[jax.Array | None, bool, int]:
    """The mask bool[batch or 1, 1, sequence, sequence], and what of it is left to the kernel: causal, window.

    ``whole`` leaves nothing.
    """
    segments, order = masking.segments, masking.order
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    # JAX's own window takes no length that an exported program leaves open.
    free = bool(masking.window) and not isinstance(sequence, int)
    if not masking.causal or not (whole or free or order is not None):
        return mask, masking.causal, masking.window
    if order is None:
        # An exported program may leave the length open.
        index = np.arange(sequence) if isinstance(sequence, int) else jnp.arange(sequence)
    else:
        index = order.indices(sequence)
    back = index[:, None] - index[None, :]
    seen = (back >= 0) & (back < (masking.window or sequence))
    seen = jnp.asarray(seen[None, None])
    return seen if mask is None else mask & seen, False, 0
