"""Attention is chosen by where the program will run, and every kernel computes the same thing."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info_lib

from systolic import recipes
from systolic.chips import slice
from systolic.compiling import Compiler
from systolic.compiling.gpu_compiler import take_cudnn_as_there
from systolic.forecasting import forecast_job
from systolic.job import AttentionBackward, ContextOrder, Layout
from systolic.models.attention import (
    BalancedOrder,
    Kernel,
    Logits,
    Masking,
    attention,
    balanced,
    choose_kernel,
)
from systolic.models.splash import (
    LongCausalMask,
    active_blocks,
    block_size,
    is_fused,
    splash_attention,
)
from systolic.steps.target import MeshTarget, make_mesh
from tests.devices import virtual_devices
from tests.tiers import some


def target(platform: str) -> MeshTarget:
    layout = Layout().on(1)
    mesh = make_mesh(layout, jax.devices()[:1])
    return MeshTarget(platform=platform, layout=layout, dtype="bfloat16", mesh=mesh)


def inputs(sequence: int, head_dim: int, dtype: str = "float32"):
    draw = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(draw.normal(size=(2, sequence, heads, head_dim)), dtype) for heads in (4, 2, 2)
    )
    segments = np.repeat(np.array([[1, 2], [1, 1]], np.int32), sequence // 2, axis=1)
    return query, key, value, jnp.asarray(segments)


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
    masking = Masking(segments=segments, causal=True)
    found = jax.jit(lambda *given: attention(target("cpu"), *given, masking))(query, key, value)
    np.testing.assert_allclose(found, by_hand(query, key, value, segments), atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "segmented"),
    [
        (37, 37, True, 0, True),
        (300, 300, True, 0, False),
        (300, 300, True, 70, True),
        (600, 600, True, 0, True),
        (300, 300, False, 0, True),
        (40, 90, False, 0, False),
    ],
)
def test_attention_on_a_cpu_has_the_gradients_of_jax(
    queries: int, keys: int, causal: bool, window: int, segmented: bool
) -> None:
    draw = np.random.default_rng(queries)
    shapes = [(2, queries, 4, 8), (2, keys, 2, 8), (2, keys, 2, 8)]
    arrays = [jnp.asarray(draw.normal(size=shape), "float32") for shape in shapes]
    segments = jnp.asarray(np.sort(draw.integers(0, 3, (2, queries)))) if segmented else None
    masking = Masking(segments=segments, causal=causal, window=window)
    weights = draw.normal(size=shapes[0])

    def of(platform: str, serves: bool = False):
        where = replace(target(platform), serves=serves)
        call = jax.value_and_grad(
            lambda *given: (attention(where, *given, masking) * weights).sum(), argnums=(0, 1, 2)
        )
        return jax.jit(call)

    own, known = of("cpu"), of("cpu", serves=True)  # a server's attention is JAX's
    assert "custom_vjp" not in str(jax.make_jaxpr(known)(*arrays))
    near = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5)
    jax.tree.map(near, own(*arrays), known(*arrays))
    # Keys that no query of a span sees are not multiplied.
    multiplied = own.lower(*arrays).cost_analysis()["flops"]
    assert (multiplied < 0.9 * known.lower(*arrays).cost_analysis()["flops"]) == (
        queries > 256 and causal
    )


def test_splash_attention_is_softmax_attention() -> None:
    query, key, value, segments = inputs(128, 64)
    where, scale = target("tpu"), 64**-0.5
    masking = Masking(segments=segments, causal=True)
    found = splash_attention(where, query, key, value, masking, Logits(scale=scale), interpret=True)
    plain = attention(target("cpu"), query, key, value, Masking(segments=segments, causal=True))
    np.testing.assert_allclose(found, plain, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backward",
    some([AttentionBackward.fused, AttentionBackward.split], [AttentionBackward.split]),
)
def test_both_backward_kernels_give_the_gradients_of_plain_attention(
    backward: AttentionBackward,
) -> None:
    query, key, value, segments = inputs(256, 64)
    layout = Layout(attention_block=128, attention_backward=backward).on(1)
    where = replace(target("tpu"), layout=layout)
    masking = Masking(segments=segments, causal=True)

    def splash(*arrays: jax.Array) -> jax.Array:
        return (splash_attention(where, *arrays, masking, Logits(), interpret=True) ** 2).sum()

    def plain(*arrays: jax.Array) -> jax.Array:
        return (attention(target("cpu"), *arrays, masking) ** 2).sum()

    found = jax.grad(splash, argnums=(0, 1, 2))(query, key, value)
    wanted = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(query, key, value)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    traced = str(jax.make_jaxpr(jax.grad(splash, argnums=(0, 1, 2)))(query, key, value))
    assert ("dq_no_residuals" in traced or "splash_mha_dq" in traced) == (
        backward is AttentionBackward.split
    )


@pytest.mark.parametrize(
    ("names", "runs"), [(("attention",), 2), (("query",), 4)], ids=["saved", "recomputed"]
)
def test_a_kernel_whose_result_is_saved_runs_once(
    names: tuple[str, ...], runs: int, tmp_path: Path
) -> None:
    """Of two layers, in the schedule of the TPU's compiler."""
    model = {"layers": 2, "d_model": 256, "heads": 2, "kv_heads": 2, "head_dim": 128}
    layout = {"remat": "save-names", "remat_names": list(names)}
    options = {"model": model | {"d_ff": 256, "vocab": 384}, "layout": layout}
    recipe = recipes.find("lm")
    job = recipe(recipes.typed(recipe, options | {"sequence": 1024, "batch": 2}))
    made = forecast_job(job, slice("v5e-1"), compiler=Compiler(root=tmp_path).quick())
    assert made.timeline is not None
    spans = [(span.name, times) for span, times in made.timeline.leaves()]
    assert sum(times for name, times in spans if name.startswith("splash_mha_fwd")) == runs


def test_the_fused_backward_kernel_is_the_default_for_few_blocks_of_keys() -> None:
    assert is_fused(AttentionBackward.auto, 4)
    assert not is_fused(AttentionBackward.auto, 5)
    assert is_fused(AttentionBackward.fused, 64)
    assert not is_fused(AttentionBackward.split, 1)


@pytest.mark.parametrize(
    ("platform", "lowering", "call"),
    [("tpu", "tpu", "tpu_custom_call"), ("gpu", "cuda", "cudnn"), ("cpu", "cpu", None)],
)
def test_a_program_lowered_on_a_cpu_host_has_the_kernel_of_its_target(
    platform: str, lowering: str, call: str | None
) -> None:
    query, key, value, segments = inputs(256, 64, "bfloat16")
    where = target(platform)
    attend = jax.jit(lambda *a: attention(where, *a[:3], Masking(segments=a[3], causal=True)))
    text = attend.trace(query, key, value, segments).lower(lowering_platforms=(lowering,)).as_text()
    if platform == "gpu" and call not in text:
        assert (
            "cuDNN" in where.notes[0]
        )  # JAX cannot trace it without the library, which is reported.
        return
    assert where.notes == []
    assert "custom_call" not in text if call is None else call in text


def test_cudnn_writes_no_gradient_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two documents in a row: four results, queries', keys' and values' gradients and a workspace."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    for check in names:
        monkeypatch.setattr(cudnn, check, getattr(cudnn, check))
    take_cudnn_as_there(slice("8xh100"))
    query, key, value, segments = inputs(256, 64, "bfloat16")
    masking = Masking(segments=segments, causal=True)

    def total(*arrays: jax.Array) -> jax.Array:
        return attention(target("gpu"), *arrays, masking).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total, (0, 1, 2)))
    text = gradient.trace(query, key, value).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"(\S+):(\d+) = stablehlo.custom_call @__cudnn\S*Backward", text)
    assert call[1] == "4"


def test_a_sequence_over_several_gpus_is_not_cudnns() -> None:
    """JAX's partitioner of its attention refuses one that is split ("Sharding on sequence dim is not allowed")."""
    kernel, reason = choose_kernel("gpu", 1024, 1024, 64, context_ways=2)
    assert kernel is Kernel.xla
    assert "not 2 parts" in reason
    assert choose_kernel("gpu", 1024, 1024, 64) == (Kernel.cudnn, "")


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
    attention(where, query, key, value, Masking(segments=segments, causal=True))
    attention(where, query, key, value, Masking(segments=segments, causal=True))
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
    sequence = 1536

    def processed(mask):
        heads = mask_lib.MultiHeadMask([mask] * 4)
        return process(heads, (queries, keys), head_shards=2, q_seq_shards=2)[0]

    for ours, theirs in zip(
        processed(LongCausalMask(sequence)),
        processed(mask_lib.CausalMask((sequence, sequence))),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours, theirs)


@pytest.mark.parametrize("queries", [128, 256])
@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize("process", [info_lib.process_mask, info_lib.process_mask_dkv])
def test_the_mask_of_a_balanced_sequence_is_the_causal_mask_of_its_indices(
    queries, ways, process
) -> None:
    sequence, order = 512 * ways, BalancedOrder(ways)

    class Plain(mask_lib.NumpyMask):
        """All of it, position by position."""

    index = order.indices(sequence)
    plain = Plain(index[:, None] >= np.arange(sequence)[None, :])

    def processed(mask):
        heads = mask_lib.MultiHeadMask([mask] * 4)
        return process(heads, (queries, 128), head_shards=2, q_seq_shards=ways)[0]

    ours, theirs = processed(LongCausalMask(sequence, order)), processed(plain)
    assert np.array_equal(ours.block_mask, theirs.block_mask)
    assert np.array_equal(ours.data_next, theirs.data_next)
    assert np.array_equal(ours.q_sequence, index)


@pytest.mark.parametrize("ways", [1, 2, 3, 8])
def test_a_balanced_sequence_gives_each_device_equal_work(ways: int) -> None:
    sequence = 96 * ways
    index = BalancedOrder(ways).indices(sequence)
    assert np.array_equal(np.sort(index), np.arange(sequence))
    pairs = (index + 1).reshape(ways, -1).sum(axis=1)
    assert (pairs == sequence * (sequence + 1) / 2 / ways).all()
    # In natural order the last device has 2 - 1 / ways times the mean.
    natural = np.arange(1, sequence + 1).reshape(ways, -1).sum(axis=1)
    assert natural.max() / natural.mean() == pytest.approx(2 - 1 / ways, rel=0.01)


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (128, 512)])
@pytest.mark.parametrize("order", [None, BalancedOrder(2)])
def test_the_blocks_of_the_busiest_device_are_those_of_the_mask(block, order) -> None:
    sequence = 4096
    index = np.arange(sequence) if order is None else order.indices(sequence)
    whole = index[:, None] >= np.arange(sequence)[None, :]
    kept = whole.reshape(sequence // block[0], block[0], sequence // block[1], block[1])
    counts = kept.any(axis=(1, 3)).reshape(2, -1).sum(axis=1)
    mask = LongCausalMask(sequence, order)
    active, total = active_blocks(mask, 2, block)
    assert (active, total) == (counts.max(), kept[:, 0, :, 0].size // 2)
    if order is not None:
        assert counts.min() == counts.max()
    full = mask_lib.FullMask((sequence, sequence))
    assert active_blocks(full, 2, block) == (total, total)


def test_arranging_and_restoring_are_inverse() -> None:
    order, array = BalancedOrder(3), jnp.arange(2 * 24).reshape(2, 24)
    assert order.chunks == (0, 5, 1, 4, 2, 3)
    assert np.array_equal(order.arrange(array)[0], order.indices(24))
    assert np.array_equal(order.restore(order.arrange(array)), array)
    assert np.array_equal(order.restore(order.arrange(array.T, 0), 0), array.T)


def test_which_sequences_are_balanced() -> None:
    def over(
        context: int, platform: str, order: ContextOrder = ContextOrder.balanced
    ) -> MeshTarget:
        layout = Layout(fsdp=1, context=context, context_order=order)
        mesh = jax.sharding.AbstractMesh(
            tuple(layout.mesh_shape.values()), tuple(layout.mesh_shape)
        )
        return MeshTarget(platform=platform, layout=layout, dtype="bfloat16", mesh=mesh)

    assert balanced(over(2, "tpu"), 512) == BalancedOrder(2)
    assert balanced(over(2, "tpu"), 256) is None, "a block of the kernel would lie in two chunks"
    assert balanced(over(2, "cpu"), 32) == BalancedOrder(2)
    assert balanced(over(2, "cpu"), 34) is None
    assert balanced(over(2, "gpu"), 512) is None
    assert balanced(over(1, "tpu"), 512) is None
    assert balanced(over(2, "tpu", ContextOrder.natural), 512) is None
    auto = ContextOrder.auto
    assert balanced(over(4, "tpu", auto), 2048) is None, "natural is 6 % faster by schedule"
    assert balanced(over(4, "tpu", auto), 4096) == BalancedOrder(4)
    assert balanced(over(2, "cpu", auto), 32) == BalancedOrder(2)


@pytest.mark.slow
@pytest.mark.parametrize("platform", some(["cpu", "tpu"], ["tpu"]))
def test_attention_over_a_balanced_sequence(platform: str) -> None:
    query, key, value, segments = inputs(512, 64)
    plain = attention(target("cpu"), query, key, value, Masking(segments=segments, causal=True))
    order = BalancedOrder(2)
    placed = [order.arrange(array) for array in (query, key, value, segments)]
    if platform == "cpu":
        found = attention(
            target("cpu"), *placed[:3], Masking(segments=placed[3], causal=True, order=order)
        )
    else:
        masking = Masking(segments=placed[3], causal=True, order=order)
        found = splash_attention(
            target("tpu"), *placed[:3], masking, Logits(scale=64**-0.5), interpret=True
        )
    np.testing.assert_allclose(order.restore(found), plain, atol=2e-5)


@pytest.mark.slow
def test_splash_attention_over_a_mesh_is_that_of_one_device() -> None:
    """Values and gradients: what is gathered along the context axis comes back summed into its shards."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.splash_child"],
        cwd=Path(__file__).parents[2],
        env=virtual_devices(8),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 3
    for each in found:
        assert max(each["worst"]) < 1e-4, each
