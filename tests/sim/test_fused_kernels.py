"""Kernels of the compiler's own inside fusions: priced where they sit, or reported as gaps."""

import re

import pytest

from systolic.chips import slice
from systolic.hlo import parse
from systolic.sim.incomplete import GapKind, given
from systolic.sim.price import price
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.timeline import PricedBy, Timeline
from tests.recorded import hlo

ON = slice("v5e-1")
BLOCKS, HEADS = 16, 4 * 16
"""Runs of the kernel in a step: blocks of queries; layers times heads."""
FLOPS = {
    "blocks-v5e-1": 2 * 2 * 8192 * 8192 * 1024,
    "heads-v5e-1": 4 * (2 * 2048 * 2048 * 3 * 2048 + 16 * 2 * 2 * 2048 * 2048 * 128),
}


def timeline(name: str, **costs: float) -> Timeline:
    names = {key.replace("_", "-"): seconds for key, seconds in costs.items()}
    return simulate(hlo.module(name), ON, given=given(costs=names))


@pytest.mark.parametrize("name", FLOPS)
def test_a_kernel_in_a_fusion_does_its_work(name: str) -> None:
    made = timeline(name)
    assert made.incomplete == ()
    assert made.executed_flops == FLOPS[name]
    floor = FLOPS[name] / rates_of(ON).peak("bf16")
    assert floor < made.seconds < 1.3 * floor
    runs = [(span, times) for span, times in made.leaves() if span.priced_by is PricedBy.kernel]
    assert sum(times for _, times in runs) == (BLOCKS if name.startswith("blocks") else HEADS)
    for span, _ in runs:
        # Scores and values are fetched to vector memory before, and the block is written there.
        assert span.bytes < 1024
        assert span.seconds > span.flops / rates_of(ON).peak("bf16")


def test_arrays_in_device_memory_take_its_bandwidth() -> None:
    """The same kernel, its scores and values in device memory: it can't be faster than their blocks come."""
    text = hlo.text("heads-v5e-1")
    assert ")S(1)}" in text or "S(1)}" in text
    far = simulate(parse(text.replace("S(1)}", "}")), ON)
    near = timeline("heads-v5e-1")
    moved = 2 * (2048 * 2048 + 2 * 2048 * 128 + 2048 * 128)  # scores, values twice, the result

    def kernel(made: Timeline) -> float:
        return next(s.seconds for s, _ in made.leaves() if s.priced_by is PricedBy.kernel)

    assert kernel(near) < moved / rates_of(ON).hbm < kernel(far)


def test_a_kernel_that_nothing_describes_is_a_gap() -> None:
    text = re.sub(r'"counted":\{.*?\},("body")', r"\1", hlo.text("blocks-v5e-1"))
    assert '"counted"' not in text
    made = simulate(parse(text), ON)
    (gap,) = made.incomplete
    assert gap.part is GapKind.kernel
    assert (gap.name, gap.label) == ("online-softmax.1", "online-softmax")
    assert gap.to_json()["op"] == "fusion online-softmax.1"
    assert gap.runs == BLOCKS
    assert made.executed_flops == FLOPS["blocks-v5e-1"] / 2


def test_another_call_in_a_fusion_is_a_gap() -> None:
    text = hlo.text("blocks-v5e-1").replace('"tpu_custom_call"', '"SomeNewTarget"')
    (gap,) = simulate(parse(text), ON).incomplete
    assert gap.part is GapKind.call
    assert gap.label == "SomeNewTarget"


@pytest.mark.parametrize("name", ["online_softmax", "online_softmax.1"])
def test_a_cost_reaches_a_kernel_in_a_fusion(name: str) -> None:
    """By the kernel's name, and by the fusion's, which the table of ops has."""
    free, told = (timeline("blocks-v5e-1", **{name: seconds}) for seconds in (0.0, 100e-6))
    assert told.seconds - free.seconds == pytest.approx(BLOCKS * 100e-6)
    assert "takes 0.1 ms a call" in told.given[0]


BESIDE = """HloModule beside

%inner (a: bf16[8192,8192], b: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(1)
  %product = bf16[8192,8192]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
  ROOT %kernel = bf16[8192,8192]{1,0:T(8,128)(2,1)} custom-call(%product), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"1000000000"}}}
}

ENTRY %main (x: bf16[8192,8192], y: bf16[8192,8192]) -> bf16[8192,8192] {
  %x = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %fused = bf16[8192,8192]{1,0:T(8,128)(2,1)} fusion(%x, %y), kind=kCustom, calls=%inner
}
"""


@pytest.mark.parametrize(("mib", "slowdown"), [(32, 1.18), (64, 1 + 0.18 / 4)])
def test_a_matmul_beside_a_kernel_has_the_windows_that_the_flags_let_it_have(
    mib: int, slowdown: float
) -> None:
    module = parse(BESIDE)
    flags = (f"--xla_tpu_scoped_vmem_limit_kib={mib * 1024}",)
    rates = rates_of(slice("tpu7x-2"), flags=flags)
    made = price(module, module.entry, module.entry.root, rates)
    peak = rates.peak("bf16")
    assert made is not None
    assert made.seconds == pytest.approx(slowdown * 2 * 8192**3 / peak + 1e9 / peak)
