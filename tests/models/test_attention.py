"""Attention is chosen by where the program will run, and every kernel computes the same thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from systolic.job import Layout
from systolic.models.attention import Kernel, attention, choose_kernel
from systolic.models.splash import LongCausalMask, block_size, splash_attention
from systolic.steps.mesh import make_mesh
from systolic.steps.target import MeshTarget


def target(platform: str) -> MeshTarget:
    layout = Layout().on(1)
    mesh = make_mesh(layout, jax.devices()[:1])
    return MeshTarget(platform=platform, layout=layout, dtype="bfloat16", mesh=mesh)


def inputs(sequence: int, head_dim: int, dtype: str = "float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, sequence, 4, head_dim), dtype)
    key = jax.random.normal(keys[1], (2, sequence, 2, head_dim), dtype)
    value = jax.random.normal(keys[2], (2, sequence, 2, head_dim), dtype)
    segments = jnp.repeat(jnp.array([[1, 2], [1, 1]], jnp.int32), sequence // 2, axis=1)
    return query, key, value, segments


def by_hand(query, key, value, segments):
    """Softmax attention, one head and position at a time in float64."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    segments = np.asarray(segments)
    out = np.zeros_like(query)
    batch, sequence, heads, head_dim = query.shape
    for b, s, h in np.ndindex(batch, sequence, heads):
        group = h // (heads // key.shape[2])
        seen = (np.arange(sequence) <= s) & (segments[b] == segments[b, s])
        scores = key[b, seen, group] @ query[b, s, h] / head_dim**0.5
        chances = np.exp(scores - scores.max())
        out[b, s, h] = chances @ value[b, seen, group] / chances.sum()
    return out


def test_plain_attention_is_softmax_attention() -> None:
    query, key, value, segments = inputs(16, 8)
    found = attention(target("cpu"), query, key, value, segments=segments, causal=True)
    np.testing.assert_allclose(found, by_hand(query, key, value, segments), atol=1e-5)


def test_splash_attention_is_softmax_attention() -> None:
    query, key, value, segments = inputs(128, 64)
    where, scale = target("tpu"), 64**-0.5
    found = splash_attention(
        where, query, key, value, segments=segments, causal=True, scale=scale, interpret=True
    )
    plain = attention(target("cpu"), query, key, value, segments=segments, causal=True)
    np.testing.assert_allclose(found, plain, atol=2e-5)


@pytest.mark.parametrize(
    ("platform", "lowering", "call"),
    [("tpu", "tpu", "tpu_custom_call"), ("gpu", "cuda", "cudnn"), ("cpu", "cpu", None)],
)
def test_a_program_lowered_on_a_cpu_host_has_the_kernel_of_its_target(
    platform: str, lowering: str, call: str | None
) -> None:
    query, key, value, segments = inputs(256, 64, "bfloat16")
    where = target(platform)
    attend = jax.jit(lambda *a: attention(where, *a[:3], segments=a[3], causal=True))
    text = attend.trace(query, key, value, segments).lower(lowering_platforms=(lowering,)).as_text()
    if platform == "gpu" and call not in text:
        assert (
            "cuDNN" in where.notes[0]
        )  # JAX cannot trace it without the library, and that is said.
        return
    assert where.notes == []
    assert "custom_call" not in text if call is None else call in text


@pytest.mark.parametrize(
    ("platform", "sequence", "head_dim", "word"),
    [("tpu", 100, 64, "128"), ("gpu", 128, 80 + 4, "multiple of 8")],
)
def test_a_shape_that_rules_the_kernel_out_falls_back_and_says_so(
    platform: str, sequence: int, head_dim: int, word: str
) -> None:
    kernel, reason = choose_kernel(platform, sequence, sequence, head_dim)
    assert kernel is Kernel.xla
    assert word in reason
    query, key, value, segments = inputs(sequence, head_dim)
    where = target(platform)
    attention(where, query, key, value, segments=segments, causal=True)
    attention(where, query, key, value, segments=segments, causal=True)
    assert where.notes == [reason]


def test_blocks_divide_the_sequence() -> None:
    for sequence in range(128, 128 * 70, 128):
        size = block_size(sequence, 512)
        assert sequence % size == 0
        assert size % 128 == 0
        assert size <= 512


def test_context_shards_count_for_the_kernel() -> None:
    assert choose_kernel("tpu", 256, 256, 64, context_ways=1)[0] is Kernel.splash
    assert choose_kernel("tpu", 256, 256, 64, context_ways=4)[0] is Kernel.xla


@pytest.mark.parametrize("queries", [128, 256, 384])
@pytest.mark.parametrize("keys", [128, 256, 384])
@pytest.mark.parametrize("process", [info_lib.process_mask, info_lib.process_mask_dkv])
def test_the_mask_for_long_sequences_is_the_causal_mask(queries, keys, process) -> None:
    shape = (1536, 1536)

    def processed(mask):
        heads = mask_lib.MultiHeadMask([mask] * 4)
        return process(heads, (queries, keys), head_shards=2, q_seq_shards=2)[0]

    for ours, theirs in zip(
        processed(LongCausalMask(shape)), processed(mask_lib.CausalMask(shape)), strict=True
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours, theirs)
