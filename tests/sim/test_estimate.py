"""Ops without the compiler's cycles: estimated, said, and near what the compiler says."""

import re

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.estimate import slowdown_of, vector_operations
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy
from tests.recorded import hlo

NAMES = {"lm-v5e-4": "v5e-4", "moe-2xv6e-4": "2xv6e-4"}


def without_cycles(name: str) -> str:
    text = hlo.text(name)
    bare = re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":"0"', text)
    assert bare != text
    return bare


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_alone_is_priced_and_says_that_it_is_estimated(name: str) -> None:
    on = slice(NAMES[name])
    whole = simulate(hlo.module(name), on)
    bare = simulate(parse(without_cycles(name)), on)
    assert not any("without the compiler's cycles" in note for note in whole.notes)
    assert any("without the compiler's cycles" in note for note in bare.notes)
    by = {span.priced_by for span, _ in bare.leaves()}
    assert PricedBy.cycles not in by
    assert PricedBy.estimate in by
    # Small programs are the worst case: what is fitted is the time of large ops.
    assert 1 / 3 < bare.seconds / whole.seconds < 3


def test_what_the_cycles_do_not_touch_stays() -> None:
    on = slice("v5e-4")
    whole = simulate(hlo.module("lm-v5e-4"), on)
    bare = simulate(parse(without_cycles("lm-v5e-4")), on)

    def links(timeline):
        return [(s.name, s.seconds) for s, _ in timeline.leaves() if s.lane == "ici"]

    assert sorted(links(whole)) == sorted(links(bare))


def test_a_generation_without_a_fit_takes_what_all_together_say() -> None:
    assert slowdown_of("v2") == slowdown_of("all")
    fitted = [slowdown_of(name) for name in ("v4", "v5e", "v5p", "v6e")]
    assert all(1 <= slow.matrix < 1.6 for slow in fitted)  # below the peak, not far


@pytest.mark.parametrize("name", NAMES)
def test_what_only_moves_data_takes_its_bytes_at_the_memory_s_rate(name: str) -> None:
    on = slice(NAMES[name])
    rates = rates_of(on)
    spans = [
        span
        for span, _ in simulate(hlo.module(name), on).leaves()
        if span.priced_by is PricedBy.bytes
        and span.lane == "core"
        and not span.opcode.startswith("wait")
    ]
    assert spans
    for span in spans:
        assert span.flops == 0
        # Never faster than the memory, unless the compiler itself says so.
        assert span.seconds >= 0.5 * span.bytes / rates.hbm


STACK = """HloModule m, is_scheduled=true

%retile (input: bf16[80,8,1024]) -> bf16[80,8,1024] {
  %input = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %copy = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} copy(%input)
}

%read (p0: bf16[80,8,1024], p1: s32[]) -> bf16[1,8,1024] {
  %p0 = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} parameter(0)
  %f = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retile
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,8,1024]{2,1,0:T(8,128)(2,1)} dynamic-slice(%f, %p1, %zero, %zero), dynamic_slice_sizes={1,8,1024}
}

%write (p0: bf16[80,8,1024], p1: s32[], p2: bf16[1,8,1024]) -> bf16[80,8,1024] {
  %p0 = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} parameter(0)
  %f = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retile
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %p2 = bf16[1,8,1024]{2,1,0:T(8,128)(2,1)} parameter(2)
  %new = bf16[1,8,1024]{2,1,0:T(8,128)(2,1)} negate(%p2)
  %update = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%f, %new, %p1, %zero, %zero)
  ROOT %back = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} fusion(%update), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retile
}

%all (p0: bf16[80,8,1024]) -> bf16[80,8,1024] {
  %p0 = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} parameter(0)
  %first = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} negate(%p0)
  ROOT %second = bf16[80,8,1024]{2,1,0:T(8,128)(2,1)} abs(%first)
}

ENTRY %main (p0: bf16[80,8,1024]) -> bf16[80,8,1024] {
  ROOT %p0 = bf16[80,8,1024]{2,1,0:T(16,128)(2,1)} parameter(0)
}
"""


def test_a_stack_that_is_read_or_written_a_layer_at_a_time_counts_the_layer() -> None:
    module = parse(STACK)
    layer = 8 * 1024

    def operations(name: str) -> float:
        return vector_operations(module, module.computations[name])

    # The layer in another tiling, and the slice itself.
    assert operations("read") == pytest.approx(2 * layer, rel=0.01)
    # Two tilings of the layer, and its negation.
    assert operations("write") == pytest.approx(3 * layer, rel=0.01)
    assert operations("all") == 2 * 80 * layer


def test_an_f32_matmul_at_the_highest_precision_is_six_passes_of_the_matrix_units() -> None:
    on = slice("v5e-1")
    text = hlo.text("precise-v5e-1")
    floor = 6 * 2 * 4096**3 / 197e12
    whole = simulate(parse(text), on)
    bare = simulate(parse(re.sub(r'"estimated_cycles":"\d+"', '"estimated_cycles":"0"', text)), on)
    for made in (whole, bare):
        span = max((s for s, _ in made.leaves()), key=lambda s: s.seconds)
        assert span.resource.value == "mxu"
        assert span.flops == 2 * 4096**3
        assert floor < span.seconds < 1.3 * floor
