"""FLOPs and bytes of instructions, against direct counts."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.simulate import simulate
from systolic.sim.work import Work, work_of
from tests.recorded import hlo as recorded


def work(body: str, more: str = "") -> Work:
    module = parse(
        f"HloModule m, is_scheduled=true\n\n{more}ENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )
    return work_of(module, module.entry, module.entry["it"])


axis = st.fixed_dictionaries(
    {
        "input": st.integers(1, 7),
        "window": st.integers(1, 4),
        "stride": st.integers(1, 3),
        "low": st.integers(-1, 3),
        "high": st.integers(-1, 3),
        "base": st.integers(1, 3),
        "dilate": st.integers(1, 2),
    }
)


def out_size(a: dict[str, int]) -> int:
    span = (a["input"] - 1) * a["base"] + 1 + a["low"] + a["high"]
    return (span - ((a["window"] - 1) * a["dilate"] + 1)) // a["stride"] + 1


def pairs(a: dict[str, int]) -> int:
    """Output and window positions that meet an element of the input, one after another."""
    elements = {index * a["base"] + a["low"] for index in range(a["input"])}
    return sum(
        out * a["stride"] + at * a["dilate"] in elements
        for out, at in itertools.product(range(out_size(a)), range(a["window"]))
    )


@settings(max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(axes=st.lists(axis, min_size=1, max_size=2), sizes=st.tuples(*[st.integers(1, 3)] * 3))
def test_convolutions_are_counted_as_by_hand(
    axes: list[dict[str, int]], sizes: tuple[int, int, int]
) -> None:
    outs = [out_size(a) for a in axes]
    assume(min(outs) > 0)
    batch, features, out_features = sizes
    spatial = "".join(map(str, range(len(axes))))
    window = " ".join(
        [
            "size=" + "x".join(str(a["window"]) for a in axes),
            "stride=" + "x".join(str(a["stride"]) for a in axes),
            "pad=" + "x".join(f"{a['low']}_{a['high']}" for a in axes),
            "lhs_dilate=" + "x".join(str(a["base"]) for a in axes),
            "rhs_dilate=" + "x".join(str(a["dilate"]) for a in axes),
        ]
    )
    ins = ",".join(str(a["input"]) for a in axes)
    kernel = ",".join(str(a["window"]) for a in axes)
    out = ",".join(map(str, outs))
    found = work(f"""\
  %x = f32[{batch},{ins},{features}] parameter(0)
  %k = f32[{kernel},{features},{out_features}] parameter(1)
  ROOT %it = f32[{batch},{out},{out_features}] convolution(%x, %k), window={{{window}}}, dim_labels=b{spatial}f_{spatial}io->b{spatial}f""")
    met = 1
    for a in axes:
        met *= pairs(a)
    assert found.flops == 2 * met * batch * features * out_features


def test_a_vector_streams_through_units_that_hold_its_matrix() -> None:
    """A mixture's sum over its experts takes the time of its bytes; 8 by 1 in units of 256 would take 20 times that."""
    timeline = simulate(recorded.module("batched_vector-tpu7x-8"), slice("tpu7x-8"))
    moved = 2 * 65_536 * 7_168 * (8 + 1)
    assert moved / 3690e9 < timeline.seconds < 2 * moved / 3690e9
    assert timeline.executed_flops == 2 * 65_536 * 8 * 7_168


def test_a_batched_product_that_a_compiler_makes_a_convolution_is_counted_once_an_item() -> None:
    """As in a mixture's gradient: output times window has 4 billion pairs, one in 65,536 of which meets an element."""
    found = work("""\
  %x = bf16[65536,8,128] parameter(0)
  %k = bf16[65536,128,1] parameter(1)
  ROOT %it = bf16[65536,8,1] convolution(%x, %k), window={size=65536 stride=65535 lhs_dilate=65536}, dim_labels=0bf_0io->0bf""")
    assert found.flops == 2 * 65_536 * 8 * 128


def test_a_grouped_convolution() -> None:
    # Depthwise: each of 8 channels has its own 3 x 3 window.
    found = work("""\
  %x = f32[2,6,6,8] parameter(0)
  %k = f32[3,3,1,8] parameter(1)
  ROOT %it = f32[2,4,4,8] convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, feature_group_count=8""")
    assert found.flops == 2 * 2 * 4 * 4 * 9 * 8


def test_a_matmul_as_a_convolution_over_a_spatial_dim() -> None:
    # bsd,dhe->bshe as libtpu writes it: the heads are a window that slides over padding.
    found = work("""\
  %x = bf16[4,1024,512,1]{2,1,3,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[512,4,128,1]{0,2,1,3:T(8,128)(2,1)} parameter(1)
  ROOT %it = bf16[4,1024,4,128]{3,1,2,0:T(8,128)(2,1)} convolution(%x, %k), window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f""")
    assert found.flops == 2 * 4 * 1024 * 512 * 4 * 128


def test_a_batched_dot() -> None:
    found = work("""\
  %x = bf16[3,16,32] parameter(0)
  %y = bf16[3,32,64] parameter(1)
  ROOT %it = f32[3,16,64] dot(%x, %y), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}""")
    assert found.flops == 2 * 3 * 16 * 32 * 64
    assert found.dtype == "bf16"


def test_on_chip_memory_costs_no_device_memory() -> None:
    found = work("""\
  %x = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %y = f32[5,128]{1,0:T(8,128)} parameter(1)
  ROOT %it = f32[8,128]{1,0:T(8,128)S(1)} add(%x, %y)""")
    assert found.bytes == 8 * 128 * 4  # y alone, its tiles filled up


UPDATE = """\
%update (p: f32[64,128], q: f32[1,128], i: s32[]) -> f32[64,128] {
  %p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %q = f32[1,128]{1,0:T(1,128)} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%p, %q, %i, %z)
}

"""


def test_an_update_in_place_moves_what_it_updates() -> None:
    found = work(
        """\
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %y = f32[1,128]{1,0:T(1,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  ROOT %it = f32[64,128]{1,0:T(8,128)} fusion(%x, %y, %i), kind=kLoop, calls=%update""",
        UPDATE,
    )
    assert found.bytes == 2 * 128 * 4


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 7)])
def test_a_slice_reads_what_it_takes(start: int, end: int) -> None:
    found = work(f"""\
  %x = f32[64,128]{{1,0:T(8,128)}} parameter(0)
  ROOT %it = f32[{end - start},128]{{1,0:T(1,128)}} slice(%x), slice={{[{start}:{end}], [0:128]}}""")
    assert found.bytes == 2 * (end - start) * 128 * 4


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # A device's fourth of all weights (its table is tied, norms are none) for 32 rows, queries and weights of
        # 8 heads over 8,192 positions, and on the vector units queries over each token's own key.
        (
            "lm-decode-v5e-4",
            2 * 32 * (7_504_924_672 - 65 * 4096) // 4
            + 32 * 32 * 8 * (2 * 2 * 8192 * 128 + 2 * 128),
        ),
        # 16 rows, 4 heads, 2,048 positions that hold the token's own; no matmul on the vector units.
        (
            "decode-tpu7x-8",
            2 * 16 * (1_241_581_568 - 33 * 2048) // 4 + 16 * 16 * 4 * 2 * 2 * 2048 * 128,
        ),
    ],
)
def test_executed_flops_of_a_decode_step_are_those_by_hand(name: str, by_hand: int) -> None:
    timeline = simulate(recorded.module(name), slice(name.partition("decode-")[2]))
    assert timeline.executed_flops == by_hand


FORWARD = "size=7x7 stride=2x2 pad=3_3x3_3"
# What XLA makes of the gradients of a 3x3 convolution with stride 2 from 8 x 8 to 4 x 4, padding (0, 1).
OF_INPUT = "size=3x3 pad=2_1x2_1 lhs_dilate=2x2 rhs_reversal=1x1"
OF_KERNEL = "size=4x4 pad=0_1x0_1 rhs_dilate=2x2"


@pytest.mark.parametrize(
    ("sizes", "window", "taps"),
    [
        ((16, 7, 8), FORWARD, 8 * 7),
        ((4, 3, 8), OF_INPUT, 4 * 3),
        ((8, 4, 3), OF_KERNEL, 4 * 3),
        ((6, 3, 4), "size=3x3", 4 * 3),
        ((1, 4, 4), "size=4x4 pad=3_3x3_3 rhs_reversal=1x1", 4),
    ],
    ids=["forward", "input", "kernel", "no padding", "heads"],
)
def test_taps_on_the_padding_are_those_of_the_forward_convolution(
    sizes: tuple[int, int, int], window: str, taps: int
) -> None:
    given, kernel, out = sizes
    found = work(f"""\
  %x = bf16[2,{given},{given},4] parameter(0)
  %k = bf16[{kernel},{kernel},4,8] parameter(1)
  ROOT %it = bf16[2,{out},{out},8] convolution(%x, %k), window={{{window}}}, dim_labels=b01f_01io->b01f""")
    assert found.flops + found.padding_flops == 2 * 2 * 4 * 8 * taps**2
    assert found.flops <= found.flops + found.padding_flops


@pytest.mark.parametrize("name", ["lm-v5e-4", "moe-2xv6e-4", "lm-decode-v5e-4"])
def test_no_matmul_of_a_language_model_has_taps_on_padding(name: str) -> None:
    timeline = simulate(
        recorded.module(name), slice(name.partition("-")[2].removeprefix("decode-"))
    )
    assert not sum(span.padding_flops for span, _ in timeline.leaves())
