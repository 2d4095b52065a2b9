"""Attention by target platform: splash on TPU, cuDNN on GPU, XLA elsewhere; with its masks, what changes its logits, and the order of a sequence over the context axis.

The kernel is chosen from where the program *will run* and from the shapes, never from the devices
of the machine that traces it. A shape that rules a kernel out is reported with ``target.note``.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as name

from systolic.job import ContextOrder, Target
from systolic.models.linear import alone_on_cpu

LEAST_TOKENS = 4096
"""Rows from which on balanced order pays on a TPU (``ContextOrder.auto``).

By schedule, two layers of width 2,048 with 131,072 tokens a step on v5e-8 with context 4, natural against balanced: 1,024
tokens 213 and 233 ms, 2,048 216 and 230, 4,096 240.4 and 240.5, 8,192 279 and 267, 16,384 354 and 318. Moving the pieces takes as
long for any row, what equal work saves grows with it.
"""
LEAST_SPAN, MOST_SPANS = 128, 4
"""Queries of a span on a CPU at least, and spans at most."""
UNSEEN = float(np.finfo(np.float32).min) / 2
"""Logit of a key that is not seen; finite, so that a row that sees none has no NaN."""
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
    attend = partial(_attend, logits.scale, causal, window, mask=mask)
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
    if _is_trained_on_cpu(target, query.shape[1], wide):
        attended = _on_cpu(logits.scale, causal, window, *plain, mask)
        return name(attended.astype(query.dtype), ATTENDED)
    return name(attend(*plain, implementation="xla").astype(query.dtype), ATTENDED)


def _attend(
    scale: float | None, causal: bool, window: int, *arrays: jax.Array, **options: Any
) -> jax.Array:
    """JAX's attention of a query, key and value."""
    seen = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
        *arrays, is_causal=causal, local_window_size=seen, scale=scale, **options
    )


def _is_trained_on_cpu(target: Target, sequence: int, dtype: jnp.dtype) -> bool:
    """Whether attention is :func:`_on_cpu`: on one CPU in float32, of a length that the program does not leave open, unless a server's."""
    fixed = isinstance(sequence, int) and dtype == jnp.float32
    return fixed and alone_on_cpu(target) and not target.serves


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


class QuerySpan(NamedTuple):
    """Queries that are attended for at once on a CPU, and the keys that any of them sees."""

    first: int
    last: int
    """After the last query."""
    least: int
    most: int
    """After the last key."""
    causal: bool
    window: int
    """See :class:`Masking`."""

    def seen(self, mask: jax.Array | None) -> jax.Array | None:
        """bool, broadcast to [batch, 1, 1, queries, keys]: what is seen of a mask bool[batch or 1, 1, all queries, all keys]."""
        part = None
        if mask is not None:
            part = mask[:, :, None, self.first : self.last, self.least : self.most]
        if not self.causal:
            return part
        back = jnp.arange(self.first, self.last)[:, None] - jnp.arange(self.least, self.most)
        own = (back >= 0) & (back < (self.window or self.most))
        return own if part is None else part & own


def _spans(queries: int, keys: int, causal: bool, window: int) -> tuple[QuerySpan, ...]:
    """One span, or up to :data:`MOST_SPANS` where later keys are unseen and need no products."""
    count = max(1, min(MOST_SPANS, queries // LEAST_SPAN)) if causal else 1
    size = -(-queries // count)
    spans = []
    for first in range(0, queries, size):
        last = min(first + size, queries)
        least = max(0, first - window + 1) if window else 0
        most = min(last, keys) if causal else keys
        spans.append(QuerySpan(first, last, least, most, causal, window))
    return tuple(spans)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _on_cpu(
    scale: float,
    causal: bool,
    window: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> jax.Array:
    """JAX's attention, for the gradient on a CPU in another form.

    XLA's CPU compiler copies the left side of a product that is not contiguous along what is summed, which are the
    probabilities in the gradients of keys and values: here the smaller side is the left one. Products of keys that no query of a
    span sees are left out.

    Args:
        scale: Factor of the products.
        causal: See :class:`Masking`; beside the mask.
        window: Likewise.
        query: [batch, queries, heads, head_dim].
        key: [batch, keys, kv_heads, head_dim].
        value: [batch, keys, kv_heads, head_dim].
        mask: bool[batch or 1, 1, queries, keys]; None sees all.

    Returns:
        [batch, queries, heads, head_dim].
    """
    return _attend(scale, causal, window, query, key, value, mask=mask, implementation="xla")


def _attend_spans(
    scale: float,
    causal: bool,
    window: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, Any]:
    spans = _spans(query.shape[1], key.shape[1], causal, window)
    query, key, value = _by_head(query, key.shape[2]), _by_head(key), _by_head(value)
    kept, outputs = [], []
    for span in spans:
        own = slice(span.least, span.most)
        rows = _flat(query[:, :, :, span.first : span.last]) * scale
        scores = _products(rows, key[:, :, own], 3, 3)
        seen = span.seen(mask)
        if seen is not None:
            apart = scores.reshape(*query.shape[:3], -1, span.most - span.least)
            scores = _flat(jnp.where(seen, apart, UNSEEN))
        chances = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        total = jnp.sum(chances, axis=-1, keepdims=True)
        output = _products(chances, value[:, :, own], 3, 2) / total
        outputs.append(output.reshape(*query.shape[:3], -1, value.shape[-1]))
        kept.append((rows, chances, total, output))
    return _by_position(outputs), (key, value, kept)


def _attended_gradient(
    scale: float,
    causal: bool,
    window: int,
    residuals: Any,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    key, value, kept = residuals
    spans = _spans(gradient.shape[1], key.shape[2], causal, window)
    gradient = _by_head(gradient, key.shape[1])
    queries = []
    keys, values = jnp.zeros_like(key), jnp.zeros_like(value)
    for span, (rows, chances, total, output) in zip(spans, kept, strict=True):
        own = slice(span.least, span.most)
        back = _flat(gradient[:, :, :, span.first : span.last]) / total
        change = _products(back, value[:, :, own], 3, 3)
        change = chances * (change - jnp.sum(back * output, axis=-1, keepdims=True))
        query = scale * _products(change, key[:, :, own], 3, 2)
        queries.append(query.reshape(*gradient.shape[:3], -1, key.shape[-1]))
        keys = keys.at[:, :, own].add(_summed_on_the_left(rows, change))
        values = values.at[:, :, own].add(_summed_on_the_left(back, chances))
    return _by_position(queries), keys.swapaxes(1, 2), values.swapaxes(1, 2), None


_on_cpu.defvjp(_attend_spans, _attended_gradient)


def _by_head(array: jax.Array, groups: int = 0) -> jax.Array:
    """[batch, sequence, heads, size] as [batch, heads, sequence, size], or as [batch, groups, heads of each, sequence, size]."""
    turned = array.swapaxes(1, 2)
    return turned.reshape(turned.shape[0], groups, -1, *turned.shape[2:]) if groups else turned


def _by_position(parts: Sequence[jax.Array]) -> jax.Array:
    """Parts [batch, groups, heads of each, positions, size] of a sequence as [batch, sequence, heads, size]."""
    array = jnp.concatenate(parts, axis=3).transpose(0, 3, 1, 2, 4)
    return array.reshape(*array.shape[:2], -1, array.shape[-1])


def _flat(array: jax.Array) -> jax.Array:
    """[batch, groups, heads of each, rows, size] with the rows of a group's heads one after the other."""
    return array.reshape(*array.shape[:2], -1, array.shape[-1])


def _products(left: jax.Array, right: jax.Array, summed: int, over: int) -> jax.Array:
    """Products of matrices [batch, heads, ...], over dim ``summed`` of the left side and ``over`` of the right."""
    return jax.lax.dot_general(left, right, (((summed,), (over,)), ((0, 1), (0, 1))))


def _summed_on_the_left(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """[batch, heads, keys, size] of ``rows`` [batch, heads, queries, size] and weights [batch, heads, queries, keys]."""
    # Without the barrier the transpose would become one of the operands, with the weights on the left.
    product = jax.lax.optimization_barrier(_products(rows, weights, 2, 2))
    return product.swapaxes(2, 3)


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
