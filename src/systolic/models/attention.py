"""Attention by target platform: splash on TPU, cuDNN on GPU, XLA elsewhere.

The kernel is chosen from where the program *will run* and from the shapes, never from the devices
of the machine that traces it. A shape that rules a kernel out is said with ``target.note``.
"""

import enum
from functools import partial

import jax
import jax.numpy as jnp

from systolic.job import Target
from systolic.models.order import Order


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
    *,
    segments: jax.Array | None = None,
    causal: bool = False,
    order: Order | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Multi-head attention with grouped keys and values.

    Args:
        target: Where the program will run.
        query: [batch, sequence, heads, head_dim].
        key: [batch, sequence, kv_heads, head_dim]; heads is a multiple of kv_heads.
        value: Like key.
        segments: int32[batch, sequence]; a position sees only positions of its own segment.
        causal: Whether a position sees itself and earlier ones only.
        order: In which all sequences lie; what is earlier is so in their natural order.
        scale: Of the logits; 1/sqrt(head_dim) by default.

    Returns:
        [batch, sequence, heads, head_dim] in the dtype of ``query``.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel, reason = choose_kernel(
        target.platform, query.shape[1], key.shape[1], query.shape[-1], target.layout.context
    )
    if reason:
        target.note(reason)
    if kernel is Kernel.splash:
        from systolic.models.splash import Masking, splash_attention

        masking = Masking(segments=segments, causal=causal, order=order)
        return splash_attention(target, query, key, value, masking, scale=scale)
    key, value = (target.constrain(part, "batch", None, "kv_heads", None) for part in (key, value))
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    if causal and order is not None:
        earlier = _earlier(order, query.shape[1])
        mask, causal = earlier if mask is None else mask & earlier, False
    attend = partial(jax.nn.dot_product_attention, mask=mask, is_causal=causal, scale=scale)
    if kernel is Kernel.cudnn:
        dtype = query.dtype if query.dtype in (jnp.bfloat16, jnp.float16) else jnp.bfloat16
        narrow = (query.astype(dtype), key.astype(dtype), value.astype(dtype))
        try:
            return attend(*narrow, implementation="cudnn").astype(query.dtype)
        except (
            RuntimeError
        ) as error:  # JAX asks for the library while tracing, also for another machine.
            target.note(
                f"{error} On this machine the program is built with plain attention; install systolic[cuda] to build it with cuDNN's"
            )
    wide = plain_dtype(target, query.dtype)
    plain = (query.astype(wide), key.astype(wide), value.astype(wide))
    return attend(*plain, implementation="xla").astype(query.dtype)


def plain_dtype(target: Target, dtype: jnp.dtype) -> jnp.dtype:
    """What plain attention is computed in: XLA's CPU matmul has no float16 form with float32 accumulation, which the logits ask for."""
    return jnp.dtype(jnp.float32) if target.platform == "cpu" and dtype == jnp.float16 else dtype


def _earlier(order: Order, sequence: int) -> jax.Array:
    """bool[sequence, sequence]: whether a key's natural index is at most that of a query."""
    index = order.indices(sequence)
    return jnp.asarray(index[:, None] >= index[None, :])
