"""Attention kernels cost what their mask leaves; counts by hand, 8 heads of 8,192 positions in blocks of 512."""

import pytest

from systolic.chips import slice
from systolic.sim.simulate import simulate
from tests.recorded import hlo

BLOCKS = 16
KEPT = {"full": 16 * 16, "causal": 16 * 17 // 2, "local": 1 + 2 + 14 * 3}
"""A window of 1,024 positions before each reaches over three blocks of 512."""
ONE_MATMUL = 2 * 8 * 8192 * 8192 * 128
MATMULS = {"fwd": 2, "dkv": 4, "dq": 3}


def kernels(kind: str) -> dict[str, tuple[float, float]]:
    """Seconds and FLOPs by kernel."""
    made = simulate(hlo.module(f"splash_{kind}-v5e-1"), slice("v5e-1"))
    return {
        name: (span.seconds, span.flops)
        for span, _ in made.leaves()
        for name in MATMULS
        if span.name.startswith(f"splash_mha_{name}")
    }


@pytest.mark.parametrize("kind", KEPT)
def test_a_mask_s_blocks_are_counted(kind: str) -> None:
    found = kernels(kind)
    assert set(found) == set(MATMULS)
    for name, (seconds, flops) in found.items():
        assert flops == pytest.approx(MATMULS[name] * ONE_MATMUL * KEPT[kind] / BLOCKS**2, rel=1e-6)
        assert flops / 197e12 < seconds < 4 * flops / 197e12


def test_what_is_assumed_of_a_mask_is_told() -> None:
    notes = {
        kind: " ".join(simulate(hlo.module(f"splash_{kind}-v5e-1"), slice("v5e-1")).notes)
        for kind in KEPT
    }
    assert "attention taken" not in notes["full"]
    assert "attention taken as causal" in notes["causal"]
    assert "attention taken as causal in a window of 3 blocks" in notes["local"]


def test_a_mask_that_is_printed_is_counted_and_nothing_is_assumed() -> None:
    # Two by two blocks, the upper right one empty.
    made = simulate(hlo.module("lm-v5e-4"), slice("v5e-4"))
    assert not any("attention taken" in note for note in made.notes)
    span = next(s for s, _ in made.leaves() if s.name.startswith("splash_mha_fwd"))
    assert span.flops == pytest.approx(2 * 2 * 4 * 4 * 1024 * 1024 * 128 * 3 / 4)


def test_a_sequence_over_the_context_axis_costs_what_its_busiest_device_does() -> None:
    # Of 16 x 16 blocks of 512 each device has 8 rows: 4 from the start and 4 from the end.
    kept = sum(range(1, 5)) + sum(range(13, 17))
    assert kept == sum(range(5, 13)), "the other device has as many"
    made = simulate(hlo.module("lm-context-v5e-4"), slice("v5e-4"))
    assert not any("attention taken" in note for note in made.notes)
    whole = 2 * 2 * 8 * 4096 * 8192 * 128  # 2 rows, 8 heads, half of the queries
    spans = [s for s, _ in made.leaves() if s.name.startswith("splash_mha_fwd")]
    assert spans
    for span in spans:
        assert span.flops == pytest.approx(2 * whole * kept / (8 * 16))
    # Keys and values come whole, their gradients are summed into parts: no whole gradient is reduced.
    module = hlo.module("lm-context-v5e-4")
    reduced = [
        shape.elements
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode.startswith("all-reduce")
        for shape in instruction.shape.arrays()
    ]
    assert 2 * 4 * 8192 * 128 not in reduced
