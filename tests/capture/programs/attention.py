"""Gradients of flash attention with a causal mask and without a mask."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

BLOCK, INNER = 1024, 512
sizes = BlockSizes(
    block_q=BLOCK,
    block_k_major=BLOCK,
    block_k=INNER,
    block_b=1,
    block_q_major_dkv=BLOCK,
    block_k_major_dkv=BLOCK,
    block_k_dkv=INNER,
    block_q_dkv=INNER,
    block_k_major_dq=BLOCK,
    block_k_dq=INNER,
    block_q_dq=BLOCK,
)


def moved(state, causal):
    def loss(q, k, v):
        made = flash_attention(q, k, v, causal=causal, block_sizes=sizes)
        return jnp.sum(made.astype(jnp.float32))

    slopes = jax.grad(loss, argnums=(0, 1, 2))(*state)
    return tuple(one - slope for one, slope in zip(state, slopes, strict=True))


@jax.jit
def step(state):
    return moved(moved(state, True), False)


state = (jnp.ones((1, 8, 8192, 128), jnp.bfloat16),) * 3
for _ in range(1000):
    state = step(state)
