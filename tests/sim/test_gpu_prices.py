"""Prices of a GPU's kernels: by hand, and that what must grow grows."""

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
    assert gpu.keys_seen(1, 4096, causal=True, window=0) == 4096
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
