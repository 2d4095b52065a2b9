"""A GPU's schedule: what each op is priced by, and what runs beside what. Figures are computed by hand from the sizes."""

import pytest

from systolic.chips import slice
from systolic.compiling.gpu_compiler import is_described
from systolic.forecasting.memory import peak_of
from systolic.hlo import Groups, parse
from systolic.sim import gpu
from systolic.sim.gpu_ops import (
    BIASED,
    add_workspaces,
    attention_of,
    convolution_sizes,
    cublas_sizes,
    workspace_bytes,
)
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy, Resource, Timeline
from tests.recorded import hlo

EIGHT = slice("8xh100")
LAYERS, TOKENS, WIDE, DEEP, HEADS = 4, 2048, 1024, 4096, 8
PROJECTIONS = 2.0 * TOKENS * WIDE * 3 * WIDE
UP = DOWN = 2.0 * TOKENS * WIDE * DEEP
SCORES = 4.0 * HEADS * TOKENS * TOKENS * (WIDE // HEADS) / 2


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return simulate(hlo.module("step-8xh100"), EIGHT)


def schedule(body: str) -> Timeline:
    """A schedule of two matmuls of cuBLAS beside a gather of 64 MiB, whose lines are given."""
    product = """custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}"""
    groups = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true"
    text = f"""HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (p0: bf16[4096,4096], p1: bf16[4096,8192], p2: bf16[1024,4096]) -> bf16[8192,4096] {{
  %p0 = bf16[4096,4096]{{1,0}} parameter(0)
  %p1 = bf16[4096,8192]{{1,0}} parameter(1)
  %p2 = bf16[1024,4096]{{1,0}} parameter(2)
{body}
  ROOT %gathered = bf16[8192,4096]{{1,0}} all-gather-done(%gather)
}}
"""
    start = f"(bf16[1024,4096]{{1,0}}, bf16[8192,4096]{{1,0}}) all-gather-start(%p2), {groups}"
    text = text.replace("PRODUCT", f"(bf16[4096,8192]{{1,0}}, s8[4194304]{{0}}) {product}")
    return simulate(parse(text.replace("GATHER", start)), EIGHT)


CONFIG = 'backend_config={"collective_backend_config":{"is_sync":SYNC}}'
MATMUL = gpu.matmul_seconds(EIGHT.chip, 1, 4096, 8192, 4096, "bf16", "bf16", "bf16")
GATHER = gpu.collective_seconds(EIGHT, "all-gather", 2.0**26, Groups((tuple(range(8)),)))


def test_the_flops_of_a_recorded_step_are_those_of_its_matmuls(timeline: Timeline) -> None:
    forward = PROJECTIONS + UP + DOWN
    # The recomputed layer leaves its last product out, and each gradient takes two products for one.
    matmuls = forward + (forward - DOWN) + 2 * forward
    attention = SCORES + SCORES + 2.5 * SCORES
    assert timeline.executed_flops == pytest.approx(LAYERS * (matmuls + attention), rel=1e-9)


@pytest.mark.parametrize(
    "name", ["h200", "b200", "a100-80", "a100-40", "h100-pcie", "gb200", "b300"]
)
def test_every_gpu_that_is_described_has_the_prices_of_a_step(name: str) -> None:
    on = slice(f"8x{name}")
    assert is_described(on.chip)
    step = simulate(hlo.module("step-8xh100"), on)
    assert 0 < step.executed_flops / (on.chip.peak_bf16_flops_per_second or 0.0) < step.seconds


def test_every_op_of_a_recorded_step_has_a_price(timeline: Timeline) -> None:
    by = {span.priced_by for span, _ in timeline.leaves()}
    assert by <= {PricedBy.kernel, PricedBy.roofline, PricedBy.network, None}
    assert not timeline.incomplete
    for span, _ in timeline.leaves():
        if span.lane == "core" and span.priced_by is not PricedBy.network:
            assert span.seconds >= gpu.launch_seconds(EIGHT.chip), span


def test_loops_run_as_often_as_the_compiler_says(timeline: Timeline) -> None:
    loops = [span for span in timeline.spans if span.inside]
    assert [span.repeat for span in loops] == [LAYERS, LAYERS]
    assert timeline.seconds == pytest.approx(
        sum(span.seconds for span in timeline.spans if span.lane == "core")
    )
    # Backward: qkv and up again, gradients of three weights, of what up and down take in and of what q, k and v do; attention twice.
    assert sum(bool(span.flops) for span in loops[1].inside) == 12


def test_a_collective_is_beside_the_kernels_where_the_schedule_overlaps_it(
    timeline: Timeline,
) -> None:
    lanes = {
        (span.lane, span.opcode)
        for span, _ in timeline.leaves()
        if span.priced_by is PricedBy.network
    }
    # The gather of the recomputed layer is synchronous, that of the forward pass is not.
    assert {("ici", "all-gather"), ("core", "all-gather"), ("ici", "reduce-scatter")} <= lanes
    assert all(span.resource is not Resource.dcn for span, _ in timeline.leaves())


def test_what_a_matmul_does_not_hide_of_a_gather_is_waited_for() -> None:
    overlapped = schedule(
        f"  %gather = GATHER, {CONFIG.replace('SYNC', 'false')}\n  %product = PRODUCT"
    )
    assert overlapped.seconds == pytest.approx(max(MATMUL, GATHER))
    waited = [s.seconds for s in overlapped.spans if s.opcode == "wait all-gather"]
    assert sum(waited) == pytest.approx(max(GATHER - MATMUL, 0.0))


def test_a_synchronous_gather_waits_for_itself() -> None:
    in_order = schedule(
        f"  %gather = GATHER, {CONFIG.replace('SYNC', 'true')}\n  %product = PRODUCT"
    )
    assert in_order.seconds == pytest.approx(MATMUL + GATHER)


def test_two_gathers_follow_each_other_on_one_stream() -> None:
    config = CONFIG.replace("SYNC", "false")
    both = schedule(f"  %gather.0 = GATHER, {config}\n  %gather = GATHER, {config}")
    assert both.seconds == pytest.approx(2 * GATHER)


def test_groups_are_of_the_devices_that_the_mesh_names() -> None:
    """Groups of neighbours in the mesh lie on two hosts where the mesh goes around the hosts."""
    text = """HloModule step, is_scheduled=true, num_partitions=16

ENTRY %main (p0: bf16[4096,4096]) -> bf16[4096,4096] {
  %p0 = bf16[4096,4096]{1,0} parameter(0)
  %sum = bf16[4096,4096]{1,0} all-reduce-start(%p0), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}, to_apply=%add
  ROOT %done = bf16[4096,4096]{1,0} all-reduce-done(%sum)
}
"""
    on, module = slice("16xh100"), parse(text)
    ids = [number // 2 + 8 * (number % 2) for number in range(16)]
    inside, across = simulate(module, on), simulate(module, on, [(number,) for number in ids])
    assert {s.resource for s, _ in inside.leaves()} == {Resource.ici}
    assert {s.resource for s, _ in across.leaves()} == {Resource.dcn}
    assert across.seconds > inside.seconds


def test_sizes_of_calls_are_in_their_configs() -> None:
    module = hlo.module("step-8xh100")
    calls = [(c, i) for c in module.computations.values() for i in c if i.opcode == "custom-call"]
    sizes = [cublas_sizes(c, i) for c, i in calls if i.target == "__cublas$lt$matmul"]
    assert {(s.m, s.n, s.k) for s in sizes if s} >= {(TOKENS, DEEP, WIDE), (TOKENS, WIDE, DEEP)}
    attention = [attention_of(c, i) for c, i in calls if i.target.startswith("__cudnn$fmha")]
    same = {"batch": 1, "heads": HEADS, "kv_heads": HEADS, "q_len": TOKENS, "kv_len": TOKENS}
    same |= {"head_dim": 128, "causal": True, "window": 0, "dtype": "bf16"}
    assert [a for a in attention if a and a["backward"]] == [same | {"backward": True}]
    assert [a for a in attention if a and not a["backward"]] == 2 * [same | {"backward": False}]


def test_the_workspace_of_attention_is_part_of_the_memory() -> None:
    module = parse(hlo.text("step-8xh100"))
    call = next((c, i) for c in module.computations.values() for i in c if "Backward" in i.target)
    sizes = attention_of(*call)
    assert sizes is not None
    # dQ of 128 elements a head and a sum for each row, in f32; or a bf16 gradient of each score.
    assert workspace_bytes(sizes, with_bias=False) == 4 * HEADS * TOKENS * 129
    assert workspace_bytes(sizes, with_bias=True) == HEADS * TOKENS * (4 + 2 * TOKENS)
    before = peak_of(module).bytes
    add_workspaces(module)
    assert call[1].shape_text.endswith(f"u8[{4 * HEADS * TOKENS * 129}]{{0}})")
    assert before <= peak_of(module).bytes <= before + 4 * HEADS * TOKENS * 129


CONVOLUTION = """HloModule convolution, is_scheduled=true

ENTRY %main (p0: bf16[32,56,56,64], p1: bf16[128,3,3,64]) -> bf16[32,56,56,128] {
  %p0 = bf16[32,56,56,64]{3,2,1,0} parameter(0)
  %p1 = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %call = (bf16[32,56,56,128]{3,2,1,0}, u8[0]{0}) custom-call(%p0, %p1), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  ROOT %out = bf16[32,56,56,128]{3,2,1,0} get-tuple-element(%call), index=0
}
"""


def test_a_convolution_is_a_matmul_over_its_window() -> None:
    module = parse(CONVOLUTION)
    sizes = convolution_sizes(module.entry, module.entry["call"])
    assert sizes is not None
    assert (sizes.m, sizes.n, sizes.k) == (32 * 56 * 56, 128, 9 * 64)
    step = simulate(module, slice("h100"))
    assert step.executed_flops == 2.0 * 32 * 56 * 56 * 128 * 9 * 64


def test_an_unknown_call_is_counted_by_its_bytes_and_named() -> None:
    text = CONVOLUTION.replace("__cudnn$convForward", "my_kernel")
    step = simulate(parse(text), slice("h100"))
    assert [part.label for part in step.incomplete] == ["my_kernel"]
    assert step.seconds == pytest.approx(
        gpu.elementwise_seconds(
            slice("h100").chip, 2.0 * (32 * 56 * 56 * 192 + 128 * 9 * 64), 0.0, 0.0, 0.0
        )
    )


def test_a_mask_that_is_a_bias_costs_the_gradients_of_all_scores() -> None:
    text = hlo.text("step-8xh100")
    plain = simulate(parse(text), EIGHT)
    head, _, tail = text.partition('custom_call_target="__cudnn$fmhaSoftmaxBackward"')
    line = head.rindex("\n")
    result = head[line:].replace(", u8[0]{0})", ", bf16[1,1,2048,2048]{3,2,1,0}, u8[0]{0})", 1)
    biased = simulate(
        parse(f'{head[:line]}{result}custom_call_target="__cudnn$fmhaSoftmaxBackward"{tail}'), EIGHT
    )
    more = 2 * 2.0 * HEADS * TOKENS * TOKENS / gpu.memory_rate(EIGHT.chip)
    assert biased.seconds - plain.seconds == pytest.approx(LAYERS * more, rel=1e-6)
    assert BIASED in biased.notes
    assert BIASED not in plain.notes


def product(line: str, dtype: str) -> Timeline:
    """A schedule of one product of two squares of 8,192."""
    square = f"{dtype}[8192,8192]{{1,0}}"
    return simulate(
        parse(f"""HloModule step, is_scheduled=true

ENTRY %main (p0: {square[:-5]}, p1: {square[:-5]}) -> {square[:-5]} {{
  %p0 = {square} parameter(0)
  %p1 = {square} parameter(1)
  ROOT %out = {square} {line}
}}
"""),
        slice("1xh100"),
    )


CALL = """custom-call(%p0, %p1), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":{"operand_precision":["HOW","HOW"],"algorithm":"ALG_UNSET"}}}"""
DOT = "dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
CUBE = 2.0 * 8192**3


@pytest.mark.parametrize(
    ("line", "dtype", "form", "flops", "peak"),
    [
        (CALL.replace("HOW", "DEFAULT"), "f32", "tf32", CUBE, 494.7e12),
        (CALL.replace("HOW", "HIGH"), "f32", "tf32", CUBE, 494.7e12),
        (CALL.replace("HOW", "HIGHEST"), "f32", "f32", CUBE, 66.9e12),
        (CALL.replace("HOW", "DEFAULT"), "c64", "tf32", 4 * CUBE, 494.7e12),
        (CALL.replace("HOW", "HIGHEST"), "c64", "f32", 4 * CUBE, 66.9e12),
        (CALL.replace("HOW", "DEFAULT"), "c128", "f64", 4 * CUBE, 66.9e12),
        (DOT, "s32", "integer", CUBE, 33.45e12),
        (f"{DOT}, operand_precision={{highest,highest}}", "f32", "f32", CUBE, 66.9e12),
    ],
)
def test_a_product_takes_the_time_of_its_own_format(line, dtype, form, flops, peak) -> None:
    """At most the peak, and at least half of it."""
    timeline = product(line, dtype)
    assert timeline.flops_by_format == {form: flops}
    (span, _), *_ = timeline.leaves()
    assert flops / peak <= span.seconds < 2.3 * flops / peak


def test_a_depthwise_convolution_moves_its_arrays() -> None:
    """Images in and out, 64 x 56 x 56 x 256 in bf16, at 3,350 GB/s: 0.0613 ms."""
    images, kernel = "bf16[64,56,56,256]{3,2,1,0}", "bf16[3,3,1,256]{3,2,1,0}"
    timeline = simulate(
        parse(f"""HloModule step, is_scheduled=true

ENTRY %main (p0: bf16[64,56,56,256], p1: bf16[3,3,1,256]) -> (bf16[64,56,56,256], u8[0]) {{
  %p0 = {images} parameter(0)
  %p1 = {kernel} parameter(1)
  ROOT %out = ({images}, u8[0]{{0}}) custom-call(%p0, %p1), custom_call_target="__cudnn$convForward", window={{size=3x3 pad=1_1x1_1}}, dim_labels=b01f_01io->b01f, feature_group_count=256
}}
"""),
        slice("1xh100"),
    )
    (span, _), *_ = timeline.leaves()
    assert span.seconds >= 2 * 64 * 56 * 56 * 256 * 2 / 3350e9
