"""Grouped matmuls by the steps of their grids, from recorded schedules, against floors and by hand."""

from dataclasses import replace

import pytest

from systolic.chips import slice
from systolic.hlo import Computation, Instruction, Module
from systolic.sim.grouped import chosen, grouped_cost, grouped_of, pace_of, seconds_of
from systolic.sim.kernels import computation_bytes
from systolic.sim.price import VISITED, masked_seconds, masked_share
from systolic.sim.rates import Rates, f32_passes, rates_of
from systolic.sim.simulate import simulate
from tests.recorded import hlo, operations

SLICES = {"ragged-v5p": "v5p-8", "grouped-tpu7x": "tpu7x-2", "weights-v5p": "v5p-8"}


def kernels(module: Module) -> list[tuple[Computation, Instruction]]:
    """Calls that are grouped matmuls."""
    every = [(c, one) for c in module.computations.values() for one in c]
    calls = [(c, one) for c, one in every if one.target == "tpu_custom_call"]
    return [(c, one) for c, one in calls if grouped_of(c, one, counted(one)) is not None]


def counted(call: Instruction) -> dict[str, object]:
    return call.config["custom_call_config"].get("counted") or {}


def priced(name: str) -> tuple[float, Rates]:
    """Seconds of the one kernel of a recorded operation."""
    rates = rates_of(slice(SLICES[name]))
    ((computation, call),) = kernels(operations.module(name, "quick"))
    cost = grouped_cost(computation, call, rates)
    assert cost is not None
    return cost.seconds, rates


@pytest.mark.parametrize("name", SLICES)
def test_no_kernel_is_faster_than_its_units(name: str) -> None:
    seconds, rates = priced(name)
    ((computation, call),) = kernels(operations.module(name, "quick"))
    cost = grouped_cost(computation, call, rates)
    assert cost is not None
    assert seconds > cost.flops / rates.peak("bf16")
    assert seconds > computation_bytes(computation, call) / rates.hbm


def test_xla_s_kernel_by_hand() -> None:
    """[262144, 7168] x [256, 7168, 512] in tiles of 128 x 7168 x 128, four tiles of columns on two cores."""
    seconds, rates = priced("ragged-v5p")
    pace = pace_of("v5p")
    # A step's product is 128 x 7168 x 128 on one of the cores; its sums are 16 registers.
    matrix = 2 * 128 * 7168 * 128 / (rates.peak("bf16") / 2)
    matrix += pace.unhidden * 16 / rates.clock_hz + pace.step_seconds
    # Each core has half of the memory's rate. 256 steps fetch a group's weights. The 2,047 others fetch rows and
    # write the f32 result: 2,048 tiles of rows, 255 of which are visited twice.
    half = pace.share * rates.hbm / 2
    weights, rows = 7168 * 128 * 2 / half, (128 * 7168 * 2 + 128 * 128 * 4) / half
    waits = pace.wait_seconds
    one = 256 * max(matrix, weights + waits) + 2047 * max(matrix, rows + waits)
    assert seconds == pytest.approx(4 * one / 2)


def test_the_gradient_of_the_weights_by_hand() -> None:
    """128 groups of 131,072 rows in tiles of 128, each of 2048 x 768: tokamax's kernel runs on one core."""
    seconds, rates = priced("weights-v5p")
    pace = pace_of("v5p")
    matrix = 2 * 128 * 2048 * 768 / (rates.peak("bf16") / 2)
    matrix += pace.unhidden * 2048 * 768 / 1024 / rates.clock_hz + pace.step_seconds
    moving = pace.share * rates.hbm
    # 1,024 steps fetch a tile of rows of both operands; 127 begin a group and write the one before.
    rows, written = 128 * (2048 + 768) * 2 / moving, 2048 * 768 * 2 / moving
    assert seconds == pytest.approx(1024 * max(matrix, rows) + 127 * max(matrix, written))


def test_megablox_tiles_come_from_the_kernel_s_windows() -> None:
    """Both gradients of 8 groups in a buffer of 8,192 rows of which balanced routing fills half."""
    rates = rates_of(slice("v5e-1"))
    found = {}
    for computation, call in kernels(hlo.module("grouped-v5e-1")):
        grouped = grouped_of(computation, call, counted(call))
        cost = grouped_cost(computation, call, rates)
        assert grouped is not None
        assert cost is not None
        assert cost.flops == 2 * 4096 * 1024 * 2048
        assert cost.seconds > cost.flops / rates.peak("bf16")
        assert "4096 rows hold tokens of 8192, all would take 2 times as long" in cost.note
        found[grouped.transposed] = grouped
    assert found[False].depth == 2048  # the gradient of the rows contracts the columns
    assert found[True].depth == 1024
    for grouped in found.values():
        assert grouped.visits == 4096 / grouped.tile[0] + 8 - 1
        assert grouped.parallel == (-(-grouped.columns // grouped.tile[2]),)
        # v5p's two cores share the tiles of columns, and each is as fast as v5e's.
        both = rates_of(slice("v5p-8"))
        assert grouped.parallel[0] % 2 == 0
        assert 0.4 < seconds_of(grouped, both) / seconds_of(grouped, rates) < 0.55


def test_cores_share_the_columns_of_megablox_whatever_it_calls_its_tiles() -> None:
    # MaxText's copy of the kernel (August 2026) names its tiles beside the call, as tokamax does, whose kernels stay on one core.
    rates = rates_of(slice("v5p-8"))
    computation, call = kernels(hlo.module("grouped-v5e-1"))[0]
    told = counted(call)
    named = replace(
        call,
        rest=call.rest + ', metadata="{\\"tile_m\\": 512, \\"tile_k\\": 1024, \\"tile_n\\": 1024}"',
    )
    without = grouped_of(computation, named, told)
    assert without is not None
    across = without.passes[1]
    assert without.parallel == (across,)
    one = grouped_of(computation, named, {**told, "parallel": []})
    two = grouped_of(computation, named, {**told, "parallel": [2]})
    assert one is not None
    assert two is not None
    assert seconds_of(one, rates) > 1.7 * seconds_of(two, rates)
    tokamax = grouped_of(computation, named, {})
    assert tokamax is not None
    assert tokamax.parallel == ()


def test_sizes_of_groups_that_the_program_holds() -> None:
    """One of eight groups has all 4,096 rows: its weights alone are fetched, and no tile is visited twice."""
    ((computation, call),) = kernels(operations.module("known-v5p", "quick"))
    grouped = grouped_of(computation, call, counted(call))
    assert grouped is not None
    assert (grouped.groups, grouped.visits, grouped.known) == (1, 4096 // 128, True)
    cost = grouped_cost(computation, call, rates_of(slice("v5p-8")))
    assert cost is not None
    assert not cost.note


def test_few_rows_choose_few_groups() -> None:
    """One row chooses one of 128 groups, four nearly four, 8,192 all."""
    assert chosen(1, 128) == pytest.approx(1)
    assert chosen(4, 128) == pytest.approx(128 - 127**4 / 128**3)
    assert chosen(8192, 128) == pytest.approx(128)
    rates = rates_of(slice("v6e-1"))
    ((computation, call), *_) = kernels(hlo.module("grouped-v5e-1"))
    grouped = grouped_of(computation, call, counted(call))
    assert grouped is not None
    few = replace(grouped, transposed=False, rows=4, groups=4, tile=(128, 2048, 512))
    many = replace(few, groups=128)
    assert seconds_of(many, rates) > 20 * seconds_of(few, rates)
    # Their weights come over, whatever little is multiplied with them.
    assert seconds_of(few, rates) > 4 * few.depth * few.columns * 2 / rates.hbm


def test_f32_operands_take_their_passes() -> None:
    for name in ("v5e-1", "v5p-8", "v6e-1"):
        rates = rates_of(slice(name))
        ((computation, call), *_) = kernels(hlo.module("grouped-v5e-1"))
        grouped = grouped_of(computation, call, counted(call))
        assert grouped is not None
        wide = replace(grouped, dtypes=("f32", "f32", "f32"), item_bytes=(4.0, 4.0, 4.0))
        assert seconds_of(wide, rates) > f32_passes(rates) * wide.flops / rates.peak("bf16")


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_steps_that_a_mask_empties_are_left_out(mode: str) -> None:
    """v5e: 4 x 3 tiles of the result, 854 tiles of rows, of which 128 groups leave 854 + 127."""
    module = operations.module("masked-v5e", mode)
    (masked,) = [one for one in module.entry if masked_share(one) is not None]
    share = masked_share(masked)
    assert share == (854 + 127) / (854 * 128)
    rates = rates_of(slice("v5e-1"))
    seconds = masked_seconds(masked, rates)
    assert seconds == pytest.approx(VISITED * share * 8277950488 / 1.5e9)
    assert seconds > 2 * 327680 * 2880 * 2880 / rates.peak("bf16")
    timeline = simulate(module, slice("v5e-1"))
    flops = sum(span.flops * times for span, times in timeline.leaves())
    assert flops == pytest.approx(2 * 327680 * 2880 * 2880, rel=0.2)  # and not 128 times as many
