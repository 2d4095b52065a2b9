"""Splash attention (JAX's Pallas TPU kernel) partitioned over the mesh by hand.

GSPMD can't partition a custom kernel, so the call is wrapped in ``shard_map``: batch over the batch
axes, heads over ``tensor``, queries over ``context``. Keys and values are gathered along it inside,
so that their gradients are summed straight into shards.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.sharding import NamedSharding, PartitionSpec

from systolic.job import AttentionBackward, Target
from systolic.models.attention import ATTENDED, BalancedOrder, Logits, Masking

FUSED_BLOCKS = 4
"""Blocks of keys up to which the fused backward kernel is the default: each holds an array of queries."""


def is_fused(backward: AttentionBackward, blocks: int) -> bool:
    """Whether one kernel computes all gradients, of keys in so many blocks."""
    if backward is AttentionBackward.auto:
        return blocks <= FUSED_BLOCKS
    return backward is AttentionBackward.fused


def block_size(sequence: int, largest: int) -> int:
    """The largest multiple of 128 up to ``largest`` that divides ``sequence`` (a multiple of 128).

    The forward and backward working sets of a 512 x 512 block (f32 logits, their gradient, q, k, v,
    output) stay under 8 MiB at head dim 256, half the scoped VMEM of every generation.
    """
    return max(size for size in range(128, largest + 1, 128) if sequence % size == 0)


class LongCausalMask(mask_lib._ComputableMask):
    """A causal mask, of a window where one is given, its blocks off the diagonal from a cache.

    The kernel asks for each block while it is traced; comparing them position by position takes minutes
    from 100,000 tokens on.
    """

    def __init__(self, sequence: int, order: BalancedOrder | None = None, window: int = 0) -> None:
        # A window as long as the sequence is none, and a comparison less in the kernel.
        self.window = window if window < sequence else 0

        def seen(queries: Any, keys: Any) -> Any:
            if not self.window:
                return queries >= keys
            return (queries >= keys) & (queries - keys < self.window)

        super().__init__((sequence, sequence), seen)
        if order is not None:
            self.q_sequence = order.indices(sequence)

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        queries, keys = idx
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        # A block lies in one chunk of the order, where indices ascend.
        first, last = self.q_sequence[queries.start], self.q_sequence[queries.stop - 1]
        window = self.window or self.shape[1]
        if keys.start > last or first - (keys.stop - 1) >= window:
            return _constant(False, shape)
        if keys.stop <= first + 1 and last - keys.start < window:
            return _constant(True, shape)
        return super().__getitem__(idx)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LongCausalMask)
            and (self.shape, self.window) == (other.shape, other.window)
            and np.array_equal(self.q_sequence, other.q_sequence)
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.window, self.q_sequence.tobytes()))


@functools.lru_cache(maxsize=8)
def _constant(value: bool, shape: tuple[int, int]) -> np.ndarray:
    block = np.full(shape, value)
    block.setflags(write=False)
    return block


def splash_attention(
    target: Target,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masking: Masking,
    logits: Logits,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See :func:`systolic.models.attention.attention`; sequences are multiples of 128 per device.

    ``interpret`` runs the kernel in the Pallas interpreter, for checks without a TPU.
    """
    sequence, heads = query.shape[1], query.shape[2]
    layout, order = target.layout, masking.order
    scale = query.shape[3] ** -0.5 if logits.scale is None else logits.scale
    # A prompt alone is on every device.
    batch_axes, sequence_axis, head_axis = target.fit(
        query.shape[:3], ("batch", "sequence", "heads")
    )
    head_axes = head_axis if isinstance(head_axis, tuple) else (head_axis,) if head_axis else ()
    whole = (sequence, sequence)
    mask = (
        LongCausalMask(sequence, order, masking.window)
        if masking.causal
        else mask_lib.FullMask(whole)
    )
    largest = layout.attention_block
    chunk = sequence // (layout.context if order is None else len(order.chunks))
    block_q = block_size(chunk, largest)
    block_kv = block_size(sequence, largest)
    fused = is_fused(layout.attention_backward, sequence // block_kv)
    sizes = kernel_lib.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
    )
    kernel = kernel_lib.make_splash_mha(
        mask=mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=math.prod(target.mesh.shape[axis] for axis in head_axes),
        q_seq_shards=layout.context,
        # Names its result and the sums of its softmax: a policy that saves the first alone runs the kernel again. It is
        # a percent of a step over short sequences that see both ways, whose permutes XLA then no longer hides.
        residual_checkpoint_name=ATTENDED if masking.causal else None,
        attn_logits_soft_cap=logits.cap or None,
        interpret=interpret,
    )
    kernel_spec = kernel.manual_sharding_spec(
        NamedSharding(target.mesh, PartitionSpec(head_axis, sequence_axis))
    )
    spec = PartitionSpec(batch_axes, head_axis, sequence_axis, None)
    segments = masking.segments
    if segments is None:
        segments = jnp.ones(query.shape[:2], jnp.int32)

    def natural(part: jax.Array, axis: int) -> jax.Array:
        """The whole sequence from this device's part of it."""
        if sequence_axis is not None:
            part = jax.lax.all_gather(part, sequence_axis, axis=axis, tiled=True)
        return part if order is None else order.restore(part, axis)

    active, blocks = active_blocks(mask, layout.context, (block_q, block_kv))

    def local(kernel, q, k, v, segments, sinks):
        ids = kernel_lib.SegmentIds(segments, natural(segments, 1))
        k, v = natural(k, 2), natural(v, 2)
        # The mask is data to the kernel; a forecast reads from the name how much work it leaves.
        with jax.named_scope(f"blocks_{active}_of_{blocks}"):
            return jax.vmap(lambda *each: kernel(*each, sinks=sinks))(q, k, v, ids)

    out = jax.shard_map(
        local,
        mesh=target.mesh,
        in_specs=(
            kernel_spec,
            spec,
            spec,
            spec,
            PartitionSpec(batch_axes, sequence_axis),
            PartitionSpec(head_axis),
        ),
        out_specs=spec,
        check_vma=False,
    )(
        kernel,
        (query * scale).swapaxes(1, 2),
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        segments,
        logits.sinks,
    )
    return out.swapaxes(1, 2)


def active_blocks(mask: mask_lib.Mask, ways: int, block: tuple[int, int]) -> tuple[int, int]:
    """Blocks (of queries x keys) that a head computes on the device with most of them, and all of a device.

    Args:
        mask: [sequence, sequence].
        ways: Devices over which the queries lie.
        block: Queries and keys of a block.
    """
    rows, columns = mask.shape[0] // block[0], mask.shape[1] // block[1]
    if not isinstance(mask, LongCausalMask):
        return rows // ways * columns, rows // ways * columns
    first, last = mask.q_sequence[:: block[0]], mask.q_sequence[block[0] - 1 :: block[0]]
    earliest = np.maximum(first - (mask.window or mask.shape[1]) + 1, 0)
    active = (last // block[1] - earliest // block[1] + 1).reshape(ways, -1).sum(axis=1)
    return int(active.max()), rows // ways * columns
