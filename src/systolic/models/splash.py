"""Splash attention (JAX's Pallas TPU kernel) partitioned over the mesh by hand.

GSPMD can't partition a custom kernel, so the call is wrapped in ``shard_map``: batch over the batch
axes, heads over ``tensor``, queries over ``context`` with keys and values gathered along it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.sharding import NamedSharding, PartitionSpec

from systolic.job import Target


def block_size(sequence: int, largest: int) -> int:
    """The largest multiple of 128 up to ``largest`` that divides ``sequence`` (a multiple of 128).

    The forward and backward working sets of a 512 x 512 block (f32 logits, their gradient, q, k, v,
    output) stay under 8 MiB at head dim 256, half the scoped VMEM of every generation.
    """
    return max(size for size in range(128, largest + 1, 128) if sequence % size == 0)


class LongCausalMask(mask_lib.CausalMask):
    """JAX's causal mask, its blocks off the diagonal from a cache.

    The kernel asks for each block while it is traced; comparing them position by position takes minutes
    from 100,000 tokens on.
    """

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        queries, keys = idx
        shape = (queries.stop - queries.start, keys.stop - keys.start)
        if keys.start >= queries.stop:
            return _constant(False, shape)
        if keys.stop <= queries.start + 1:
            return _constant(True, shape)
        return super().__getitem__(idx)


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
    *,
    segments: jax.Array | None,
    causal: bool,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """See :func:`systolic.models.attention.attention`; sequences are multiples of 128 per device.

    ``interpret`` runs the kernel in the Pallas interpreter, for checks without a TPU.
    """
    sequence, heads = query.shape[1], query.shape[2]
    layout = target.layout
    mesh_axes = target.spec("batch", "sequence", "heads")
    batch_axes, sequence_axis, head_axis = mesh_axes
    mask = (
        LongCausalMask((sequence, sequence)) if causal else mask_lib.FullMask((sequence, sequence))
    )
    largest = layout.attention_block
    block_q = block_size(sequence // layout.context, largest)
    block_kv = block_size(sequence, largest)
    sizes = kernel_lib.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    kernel = kernel_lib.make_splash_mha(
        mask=mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=math.gcd(layout.tensor, heads),
        q_seq_shards=layout.context,
        interpret=interpret,
    )
    kernel_spec = kernel.manual_sharding_spec(
        NamedSharding(target.mesh, PartitionSpec(head_axis, sequence_axis))
    )
    q_spec = PartitionSpec(batch_axes, head_axis, sequence_axis, None)
    kv_spec = PartitionSpec(batch_axes, head_axis, None, None)
    if segments is None:
        segments = jnp.ones(query.shape[:2], jnp.int32)

    def local(kernel, q, k, v, q_segments, kv_segments):
        return jax.vmap(kernel)(q, k, v, kernel_lib.SegmentIds(q_segments, kv_segments))

    out = jax.shard_map(
        local,
        mesh=target.mesh,
        in_specs=(
            kernel_spec,
            q_spec,
            kv_spec,
            kv_spec,
            PartitionSpec(batch_axes, sequence_axis),
            PartitionSpec(batch_axes, None),
        ),
        out_specs=q_spec,
        check_vma=False,
    )(
        kernel,
        (query * scale).swapaxes(1, 2),
        key.swapaxes(1, 2),
        value.swapaxes(1, 2),
        segments,
        segments,
    )
    return out.swapaxes(1, 2)
