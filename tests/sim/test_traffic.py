"""Bytes of updates in place, of what a fusion relays, and of what it passes on."""

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.estimate import vector_operations
from systolic.sim.simulate import simulate
from systolic.sim.work import work_of
from tests.recorded import hlo

ROW_BYTES = 2 * 4096


def test_rows_written_into_a_donated_cache_cost_the_rows() -> None:
    # Eight rows of bf16[131072,4096]: read, and written into words that hold two rows of bf16 each.
    module = hlo.module("scatter-v5e-1")
    fusion = module.entry["scatter_fusion"]
    found = work_of(module, module.entry, fusion)
    assert found.bytes == pytest.approx(8 * (ROW_BYTES + 2 * 2 * ROW_BYTES), rel=0.01)
    inner = module.callee(fusion, "calls")
    assert vector_operations(module, inner) <= 3 * 8 * 4096
    made = simulate(module, slice("v5e-1"))
    floor = 2 * 8 * ROW_BYTES / 819e9
    assert floor < made.seconds < 2e-6


def test_a_scatter_that_adds_reads_what_it_adds_to() -> None:
    text = hlo.text("scatter-v5e-1")
    rows = "f32[131072,4096]"
    wide = text.replace("bf16[131072,4096]", rows).replace("bf16[8,4096]", "f32[8,4096]")
    sets = parse(wide.replace("(2,1)", ""))
    assert work_of(sets, sets.entry, sets.entry["scatter_fusion"]).bytes == 8 * 4 * 4096 * 2
    region = sets.callee(sets.callee(sets.entry["scatter_fusion"], "calls").root, "to_apply")
    region.root.opcode = "add"
    assert work_of(sets, sets.entry, sets.entry["scatter_fusion"]).bytes == 8 * 4 * 4096 * 3


def moved(body: str, more: str = "") -> float:
    module = parse(
        f"HloModule m, is_scheduled=true\n\n{more}ENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )
    return work_of(module, module.entry, module.entry["it"]).bytes


RELAID = """\
%relay (p: bf16[64,2,128]) -> bf16[64,2,128] {
  %p = bf16[64,2,128]{2,1,0:T(2,128)(2,1)} parameter(0)
  %c = bf16[64,2,128]{2,0,1:T(8,128)(2,1)} copy(%p)
  ROOT %b = bf16[64,2,128]{2,0,1:T(8,128)(2,1)} bitcast(%c)
}

%attend (p: bf16[64,2,128]) -> bf16[64,2] {
  %p = bf16[64,2,128]{2,1,0:T(2,128)(2,1)} parameter(0)
  %r = bf16[64,2,128]{2,0,1:T(8,128)(2,1)} fusion(%p), kind=kLoop, calls=%relay
  %z = bf16[] constant(0)
  ROOT %o = bf16[64,2]{1,0:T(2,128)(2,1)S(1)} reduce(%r, %z), dimensions={2}, to_apply=%add
}

"""


def test_an_operand_that_a_nested_fusion_only_relays_is_read() -> None:
    found = moved(
        """\
  %x = bf16[64,2,128]{2,1,0:T(2,128)(2,1)} parameter(0)
  ROOT %it = bf16[64,2]{1,0:T(2,128)(2,1)S(1)} fusion(%x), kind=kLoop, calls=%attend""",
        RELAID,
    )
    assert found == 64 * 2 * 128 * 2


PASSED = """\
%beside (p: f32[64,128], q: f32[8,128]) -> (f32[8,128], f32[64,128]) {
  %p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %q = f32[8,128]{1,0:T(8,128)} parameter(1)
  %n = f32[8,128]{1,0:T(8,128)} negate(%q)
  ROOT %t = (f32[8,128]{1,0:T(8,128)}, f32[64,128]{1,0:T(8,128)}) tuple(%n, %p)
}

"""


@pytest.mark.parametrize(
    ("aliasing", "rows"),
    [
        ("output_to_operand_aliasing={{1}: (0, {})}, ", 2 * 8),
        ("", 2 * 8 + 2 * 64),
    ],
)
def test_what_is_passed_on_in_its_own_memory_moves_nothing(aliasing: str, rows: int) -> None:
    found = moved(
        f"""\
  %x = f32[64,128]{{1,0:T(8,128)}} parameter(0)
  %y = f32[8,128]{{1,0:T(8,128)}} parameter(1)
  ROOT %it = (f32[8,128]{{1,0:T(8,128)}}, f32[64,128]{{1,0:T(8,128)}}) fusion(%x, %y), kind=kLoop, {aliasing}calls=%beside""",
        PASSED,
    )
    assert found == rows * 128 * 4


FILLED = """\
%fill (q: f32[1,128], i: s32[]) -> f32[64,128] {
  %q = f32[1,128]{1,0:T(1,128)} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %c = f32[] constant(0)
  %b = f32[64,128]{1,0:T(8,128)} broadcast(%c), dimensions={}
  ROOT %u = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%b, %q, %i, %z)
}

"""


def test_an_update_of_what_a_fusion_makes_itself_writes_all_of_it() -> None:
    found = moved(
        """\
  %y = f32[1,128]{1,0:T(1,128)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  ROOT %it = f32[64,128]{1,0:T(8,128)} fusion(%y, %i), kind=kLoop, calls=%fill""",
        FILLED,
    )
    assert found == (64 + 1) * 128 * 4


def test_a_decode_step_takes_its_weights_and_its_cache_once() -> None:
    made = simulate(hlo.module("lm-decode-v5e-4"), slice("v5e-4"))
    weights = 2 * 7.504e9 / 4
    cache = 2 * 2 * 32 * 32 * 8192 * 8 * 128 / 4
    floor = (weights + cache) / 819e9
    assert floor == pytest.approx(15.1e-3, rel=0.01)
    moved = sum(span.bytes * times for span, times in made.leaves() if span.resource.value == "hbm")
    assert moved == pytest.approx(weights + cache, rel=0.05)
    assert floor < made.seconds < 2 * floor


WINDOWS = """\
%pick (p: bf16[2048,1,10240], at: s32[]) -> bf16[2048,2,640] {
  %p = bf16[2048,1,10240]{2,0,1:T(8,128)(2,1)} parameter(0)
  %at = s32[]{:T(128)S(6)} parameter(1)
  %low = bf16[] constant(-inf)
  %zero = s32[] constant(0)
  %wide = bf16[2048,2,10240]{2,0,1:T(8,128)(2,1)} pad(%p, %low), padding=0_0x1_0x0_0
  ROOT %two = bf16[2048,2,640]{2,0,1:T(8,128)(2,1)} dynamic-slice(%wide, %zero, %zero, %at), dynamic_slice_sizes={2048,2,640}
}

%window (p: bf16[2048,1,10240], at: s32[]) -> bf16[2048,640] {
  %p = bf16[2048,1,10240]{2,0,1:T(8,128)(2,1)} parameter(0)
  %at = s32[]{:T(128)S(6)} parameter(1)
  %two = bf16[2048,2,640]{2,0,1:T(8,128)(2,1)} fusion(%p, %at), kind=kLoop, calls=%pick
  %low = bf16[] constant(-inf)
  ROOT %o = bf16[2048,640]{1,0:T(8,128)(2,1)S(1)} reduce(%two, %low), dimensions={1}, to_apply=%max
}

"""


def test_of_a_padded_operand_a_window_is_read_without_its_padding() -> None:
    # As XLA takes one of sixteen windows of an einsum in a loop: of the two halves of the slice one is padding.
    found = moved(
        """\
  %x = bf16[2048,1,10240]{2,0,1:T(8,128)(2,1)} parameter(0)
  %at = s32[]{:T(128)S(6)} parameter(1)
  ROOT %it = bf16[2048,640]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %at), kind=kLoop, calls=%window""",
        WINDOWS,
    )
    assert found == 2048 * 640 * 2
