"""Recorded operations against the seconds that chips took for them."""

import re

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.estimate import lane_registers, slowdown_of
from systolic.sim.price import streams
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.work import work_of
from tests.recorded import operations

# Where the pricing was fitted; the median over all of that half is 6 % (benchmarks/results).
NEAR = {
    "attention-v5p": 0.12,
    "attention-v6e": 0.18,  # keys of 1,024; v6e takes longer rows 15 to 25 % more slowly
    "chunked-v6e": 0.12,
    "loss-tpu7x": 0.08,
    "loss_f32-v6e": 0.12,
    "gated-v5p": 0.08,
    "norm-tpu7x": 0.10,
    "matmul-v6e": 0.12,
    "ragged-v5p": 0.08,
    "grouped-tpu7x": 0.08,
    "weights-v5p": 0.08,
    "masked-v5e": 0.15,
    "known-v5p": 0.08,
    "gradient-tpu7x": 0.05,
    "gradient_kernel-tpu7x": 0.15,  # one block of 512 a row: half of it is fixed time and copies
}


@pytest.mark.parametrize("mode", ["full", "quick"])
@pytest.mark.parametrize("name", NEAR)
def test_operations_take_what_chips_took(name: str, mode: str) -> None:
    row = operations.ROWS[name]
    places = [tuple(place) for place in row["places"]] or None
    timeline = simulate(operations.module(name, mode), slice(row["slice"]), places)
    assert timeline.seconds == pytest.approx(row["measured_seconds"], rel=NEAR[name])


FREE_OF_CYCLES = [name for name in NEAR if name != "loss_f32-v6e"]
"""Without the heads of losses: 4 to 18 % slower without cycles on v6e (benchmarks/results)."""


@pytest.mark.parametrize("name", FREE_OF_CYCLES)
def test_a_schedule_without_cycles_says_nearly_what_one_with_them_says(name: str) -> None:
    row = operations.ROWS[name]
    full, quick = (
        simulate(operations.module(name, mode), slice(row["slice"])).seconds
        for mode in ("full", "quick")
    )
    assert quick == pytest.approx(full, rel=0.1)


def test_an_f32_operand_costs_a_matmul_more_only_where_it_comes_from_hbm() -> None:
    text = operations.text("loss_f32-v6e", "quick")
    on = slice("v6e-1")
    rates, slow = rates_of(on), slowdown_of("v6e")
    # f32[4096, 2880] x bf16[2880, 201088]: 2880 fill 12 arrays of 256, 201,088 fill 786; results in f32.
    matrix = 2 * 4096 * (12 * 256) * (786 * 256) / 918e12
    moved = (4 * 4096 * 201088 + 2 * 2880 * 201088 + 4 * 4096) / rates.hbm
    held = slow.matrix * matrix + slow.unhidden * slow.memory * moved
    fetched = 1.2 * slow.matrix * matrix + slow.unhidden * slow.memory * (
        moved + 4 * 4096 * 2944 / rates.hbm  # 2880 columns lie as 23 tiles of 128
    )
    from_hbm = re.sub(r"(f32\[4096,2880\]\{[^}]*?)S\(1\)", r"\1", text)
    assert from_hbm != text
    for schedule, expected in ((text, held), (from_hbm, fetched)):
        spans = [span for span, _ in simulate(parse(schedule), on).leaves() if span.flops]
        assert [span.seconds for span in spans] == [pytest.approx(expected, rel=1e-3)]


@pytest.mark.parametrize("name", ["attention-v5p", "attention-v6e"])
def test_attention_passes_over_its_scores_no_faster_than_memory(name: str) -> None:
    row = operations.ROWS[name]
    on = slice(row["slice"])
    batch, queries, heads = [32, 512, 16] if name.endswith("v5p") else [16, 1024, 16]
    # Written by the first matmul, read by the sum and by the second matmul: f32.
    least = 3 * 4 * batch * heads * queries**2 / (on.chip.hbm_bytes_per_second or 0)
    assert least < row["measured_seconds"] < 1.7 * least
    for mode in ("full", "quick"):
        assert simulate(operations.module(name, mode), on).seconds > least


REDUCED = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%lanes (p: f32[64,8,256]) -> f32[64,8] {
  %p = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[64,8]{1,0:T(8,128)} reduce(%p, %zero), dimensions={2}, to_apply=%add
}

%rows (p: f32[64,8,256]) -> f32[8,256] {
  %p = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[8,256]{1,0:T(8,128)} reduce(%p, %zero), dimensions={0}, to_apply=%add
}

%fill (p: f32[64,8]) -> f32[64,8,256] {
  %p = f32[64,8]{1,0:T(8,128)} parameter(0)
  ROOT %b = f32[64,8,256]{2,1,0:T(8,128)} broadcast(%p), dimensions={0,1}
}

%splat () -> f32[64,8,256] {
  %one = f32[] constant(1)
  ROOT %b = f32[64,8,256]{2,1,0:T(8,128)} broadcast(%one), dimensions={}
}

ENTRY %main (p: f32[64,8,256]) -> f32[64,8,256] {
  ROOT %p = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
}
"""


@pytest.mark.parametrize(
    # 64 x 8 x 256 elements are 128 registers of 8 x 128, two of them along each row.
    ("name", "registers"),
    [("lanes", 64), ("rows", 0), ("fill", 64), ("splat", 0)],
)
def test_registers_that_cross_lanes_are_counted(name: str, registers: int) -> None:
    module = parse(REDUCED)
    assert lane_registers(module, module.computations[name]) == registers


def window(size: str, pad: str) -> bool:
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (p: f32[8,4096]) -> f32[8,4096] {{
  %p = f32[8,4096]{{1,0:T(8,128)}} parameter(0)
  %zero = f32[] constant(0)
  ROOT %w = f32[8,4096]{{1,0:T(8,128)}} reduce-window(%p, %zero), window={{size={size} pad={pad}}}
}}
"""
    module = parse(text)
    return streams(module, module.entry["w"])


def test_a_window_over_whole_rows_is_a_sum_in_order() -> None:
    assert window("1x8191", "0_0x4095_4095")
    assert not window("1x3", "0_0x1_1")
    assert not window("1x8190", "0_0x4095_4094")


@pytest.mark.parametrize(
    # Contracted elements and columns, and what units of 128 and of 256 are busy for beyond the FLOPs.
    ("depth", "columns", "narrow", "wide"),
    [(64, 1024, 2.0, 4.0), (128, 128, 1.0, 4.0), (256, 512, 1.0, 1.0), (2880, 384, 1.0222, 1.4222)],
)
def test_narrow_contractions_leave_the_matrix_units_idle(
    depth: int, columns: int, narrow: float, wide: float
) -> None:
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (a: bf16[512,{depth}], b: bf16[{depth},{columns}]) -> bf16[512,{columns}] {{
  %a = bf16[512,{depth}]{{1,0}} parameter(0)
  %b = bf16[{depth},{columns}]{{1,0}} parameter(1)
  ROOT %c = bf16[512,{columns}]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf
}}
"""
    module = parse(text)
    work = work_of(module, module.entry, module.entry["c"])
    assert work.flops == 2 * 512 * depth * columns
    assert work.matrix(128) / work.flops == pytest.approx(narrow, rel=1e-3)
    assert work.matrix(256) / work.flops == pytest.approx(wide, rel=1e-3)
