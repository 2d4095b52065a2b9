"""Prices of a GPU's kernels: by hand, and that what must grow grows."""

import random
from functools import partial

import jax
import numpy as np
import pytest

from systolic.chips import chip, slice
from systolic.core.errors import NotFoundError
from systolic.hlo import Groups
from systolic.sim import gpu

H100, B200 = chip("h100"), chip("b200")


def test_a_large_matmul_runs_at_the_clock_under_load() -> None:
    """2 x 16,384^3 FLOPs at 0.775 of 989 TFLOP/s; in fp8 at 0.69 of 1,979; 0.77 of it within a step."""
    flops = 2 * 16384**3
    seconds = gpu.matmul_seconds(H100, 1, 16384, 16384, 16384, "bf16", "bf16", "bf16")
    assert seconds == pytest.approx(flops / (0.77 * 0.775 * 989e12))
    narrow = gpu.matmul_seconds(H100, 1, 16384, 16384, 16384, "f8e4m3fn", "f8e4m3fn", "bf16")
    assert narrow == pytest.approx(flops / (0.77 * 0.69 * 1979e12))
    alone = gpu.matmul_alone_seconds(H100, 1, 16384, 16384, 16384, "bf16", "bf16", "bf16")
    assert alone < seconds


@pytest.mark.parametrize(
    ("known", "shape", "measured"),
    [
        (H100, (1, 256, 256, 256), 5.0e-6),
        (H100, (1, 1024, 1024, 1024), 8.5e-6),
        (H100, (4, 4096, 4096, 4096), 697e-6),
        (B200, (1, 2048, 4096, 4096), 51.2e-6),
    ],
)
def test_matmuls_of_the_table(known, shape, measured) -> None:
    """Measured by XLA's authors (benchmarks/gpu/matmul.csv)."""
    seconds = gpu.matmul_alone_seconds(known, *shape, "bf16", "bf16", "bf16")
    assert seconds == pytest.approx(measured, rel=0.2)


def test_tiles_beyond_the_multiprocessors_cost_a_part_of_a_wave() -> None:
    """11 x 12 tiles of 128 x 256 fill an H100's 132 once; 11 x 13 are a twelfth more work, and take over a fifth longer."""
    full, more = (
        gpu.matmul_alone_seconds(H100, 1, 11 * 128, columns * 256, 8192, "bf16", "bf16", "bf16")
        for columns in (12, 13)
    )
    assert 1.2 < more / full < 1.7


def test_a_matrix_with_a_row_reads_its_weights() -> None:
    """8,192 x 8,192 in bf16 at 0.87 of 3,350 GB/s."""
    seconds = gpu.matmul_seconds(H100, 1, 1, 8192, 8192, "bf16", "bf16", "bf16")
    assert seconds == pytest.approx(5.1e-6 + 8192 * 8192 * 2 / (0.87 * 3350e9), rel=0.01)


def attention(**changes) -> float:
    call = gpu.AttentionCall(
        batch=1,
        heads=64,
        kv_heads=8,
        q_len=16384,
        kv_len=16384,
        head_dim=128,
        causal=True,
        window=0,
        backward=False,
        dtype="bf16",
    )
    return gpu.attention_alone_seconds(chip("h200"), **{**call, **changes})


def test_attention_of_a_published_shape() -> None:
    """cuDNN 9.19 on H200 (NVIDIA/cudnn-frontend): 6.53 and 19.0 ms, 12.5 ms without a mask."""
    assert attention() == pytest.approx(6.53e-3, rel=0.1)
    assert attention(backward=True) == pytest.approx(19.0e-3, rel=0.1)
    assert attention(causal=False) == pytest.approx(12.5e-3, rel=0.1)


def test_a_window_leaves_work_out_and_one_query_sees_all_keys() -> None:
    assert attention(window=1024) < attention() / 4
    assert gpu.keys_seen(1, 4096, causal=False, window=0) == 4096
    assert gpu.keys_seen(4096, 4096, causal=False, window=0) == 4096
    # The lower triangle, with half of a tile of 390 along it.
    assert gpu.keys_seen(4096, 4096, causal=True, window=0) == (4096 + 390) / 2


def test_a_pass_over_memory_and_one_over_the_special_units() -> None:
    moved = gpu.elementwise_seconds(H100, 1e9, 5e8)
    assert moved == pytest.approx(1.5e9 / (0.87 * 3350e9), rel=0.01)
    # 1e9 exponentials on 16 units of each of 132 multiprocessors at 1.98 GHz.
    special = gpu.elementwise_seconds(H100, 1e6, 1e6, 0.0, 1e9)
    assert special == pytest.approx(1e9 / (132 * 16 * 1.98e9), rel=0.02)


def test_collectives_of_the_table() -> None:
    """XLA's table: 1 GiB gathered, reduced and exchanged over eight H100 in 2.73, 4.72 and 2.80 ms."""
    eight = Groups((tuple(range(8)),))
    for kind, measured in (
        ("all-gather", 2.73e-3),
        ("all-reduce", 4.72e-3),
        ("all-to-all", 2.8e-3),
    ):
        seconds = gpu.collective_seconds(slice("8xh100"), kind, 2**30, eight)
        assert seconds == pytest.approx(measured, rel=0.05)


def test_a_machine_over_tcp_is_slower_than_its_bytes() -> None:
    """Two A3 Mega machines reduce 8 GiB in 47.5 ms and 16 MiB in 0.98 ms."""
    both = Groups((tuple(range(16)),))
    seconds = [
        gpu.collective_seconds(slice("2xa3-mega"), "all-reduce", size, both)
        for size in (2**33, 2**24)
    ]
    assert seconds == [pytest.approx(47.5e-3, rel=0.05), pytest.approx(0.98e-3, rel=0.1)]


def test_a_gather_over_machines_is_a_ring_through_all_cards() -> None:
    """Two A3 High machines move 15/16 of 1 GiB at 66.2 GB/s in a ring; two A3 Ultra gather 8 GiB in 24.7 ms."""
    both = Groups((tuple(range(16)),))
    high = gpu.collective_seconds(slice("2xa3-high"), "all-gather", 2**30, both)
    assert high == pytest.approx(2**30 * 15 / 16 / 66.2e9, rel=0.05)
    ultra = gpu.collective_seconds(slice("2xa3-ultra"), "all-gather", 2**33, both)
    assert ultra == pytest.approx(24.7e-3, rel=0.1)


def test_a_chip_without_its_multiprocessors_says_so() -> None:
    with pytest.raises(NotFoundError, match="the catalogue has no num_sms of l4"):
        gpu.matmul_seconds(chip("l4"), 1, 256, 256, 256, "bf16", "bf16", "bf16")


PEAKS = {
    ("f32", "f32", True): 132 * 128 * 2 * 1.98e9,
    ("f32", "f32", False): 494.7e12,
    ("c64", "c64", False): 494.7e12 / 4,
    ("c64", "c64", True): 132 * 128 * 2 * 1.98e9 / 4,
    ("c128", "c128", False): 132 * 128 * 2 * 1.98e9 / 4,
    ("f64", "f64", False): 132 * 128 * 2 * 1.98e9,
    ("s32", "s32", False): 132 * 64 * 2 * 1.98e9,
    ("s8", "s8", False): 1979e12,
    ("bf16", "bf16", False): 989e12,
    ("f8e4m3fn", "f8e4m3fn", False): 1979e12,
}
"""Products of two operands an H100 does a second, 2 FLOPs each, by dtypes and whether f32 is multiplied as such."""
BYTES = {"f32": 4, "c64": 8, "c128": 16, "f64": 8, "s32": 4, "s8": 1, "bf16": 2, "f8e4m3fn": 1}


def test_no_matmul_beats_the_peak_of_its_format_or_the_memory() -> None:
    """Of random sizes: 2 x b x m x n x k FLOPs, and every array moved once at 3,350 GB/s."""
    draw = random.Random(92)
    for (lhs, rhs, highest), peak in PEAKS.items():
        for _ in range(20):
            b, m, n, k = (2 ** draw.randrange(top) + draw.randrange(3) for top in (4, 14, 14, 14))
            seconds = gpu.matmul_seconds(H100, b, m, n, k, lhs, rhs, lhs, highest=highest)
            moved = BYTES[lhs] * b * (m * k + k * n + m * n)
            assert seconds >= max(2 * b * m * n * k / peak, moved / 3350e9), (lhs, b, m, n, k)


def test_no_attention_or_elementwise_kernel_beats_the_peak_or_the_memory() -> None:
    """Attention's two products of all keys; an elementwise kernel's or a sum's bytes, and a clock of an f32 lane an operation."""
    draw = random.Random(92)
    for _ in range(50):
        tokens, heads, width = (2 ** draw.randrange(*ends) for ends in ((4, 15), (0, 6), (5, 9)))
        seconds = attention(
            heads=heads,
            kv_heads=heads,
            q_len=tokens,
            kv_len=tokens,
            head_dim=width,
            causal=False,
        )
        flops, moved = 4 * heads * tokens**2 * width, 8 * heads * tokens * width
        assert seconds >= max(flops / 989e12, moved / 3350e9)
        read, written, each = (float(2 ** draw.randrange(34)) for _ in range(3))
        lanes = 132 * 128 * 1.98e9
        least = max((read + written) / 3350e9, each / lanes)
        assert gpu.elementwise_seconds(H100, read, written, each) >= least


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [("h100", "f64", 66.9), ("a100", "f64", 19.5), ("b200", "f64", 37.2), ("a100", "f32", 19.5)],
)
def test_peaks_outside_the_narrow_formats(name: str, dtype: str, teraflops: float) -> None:
    peak = gpu.peak_flops(chip(name), dtype, dtype, highest=True)
    assert peak == pytest.approx(teraflops * 1e12, rel=0.01)


MASK = ("is_causal", "local_window_size")


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize(("q_len", "kv_len"), [(32, 32), (8, 64), (64, 8), (1, 16)])
def test_the_pairs_that_a_mask_leaves_are_those_of_jax(
    q_len: int, kv_len: int, window: int
) -> None:
    """By the scores that reach the result of attention with one-hot values; half a pair a query on each edge of the mask."""
    q, k = (np.zeros((1, length, 1, kv_len), np.float32) for length in (q_len, kv_len))
    v = np.eye(kv_len, dtype=np.float32)[None, :, None]
    attend = partial(jax.jit(jax.nn.dot_product_attention, static_argnames=MASK), is_causal=True)
    seen = np.asarray(attend(q, k, v, local_window_size=(window - 1, 0) if window else None))
    rows = range(q_len)
    held = [range(max(0, i - window + 1) if window else 0, min(i + 1, kv_len)) for i in rows]
    for i, keys in enumerate(held):
        if keys:
            assert set(np.flatnonzero(seen[0, i, 0]).tolist()) == set(keys)
    pairs = gpu.pairs_seen(q_len, kv_len, True, window)
    assert pairs == pytest.approx(sum(len(keys) for keys in held), abs=min(q_len, kv_len) / 2)
