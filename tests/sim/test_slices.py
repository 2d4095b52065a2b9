"""Transfers between slices, as libtpu writes them."""

import math

import pytest

from systolic.chips import slice
from systolic.hlo import Crossing, Instruction, Module, crossing_of, parse
from systolic.sim.network import crossings
from systolic.sim.rates import rates_of
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Resource, Timeline
from tests.recorded import hlo as recorded

COUNTS = (2, 4, 8)
KINDS = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "ONE_TO_ONE")


def transfers(module: Module) -> dict[tuple[str, str], Instruction]:
    """By kind and opcode."""
    found = {}
    for instruction in module.entry:
        if instruction.opcode in ("send", "recv"):
            crossing = crossing_of(instruction)
            assert crossing is not None, instruction.rest
            found[crossing.kind, instruction.opcode] = instruction
    return found


def between(num_slices: int) -> Module:
    return recorded.module(f"between-{num_slices}xv5e-16")


def simulated(module: Module, on: str) -> Timeline:
    return simulate(module, slice(on))


@pytest.mark.parametrize("num_slices", COUNTS)
def test_every_transfer_names_its_slices(num_slices: int) -> None:
    found = transfers(between(num_slices))
    assert set(found) == {(kind, opcode) for kind in KINDS for opcode in ("send", "recv")}
    everyone = tuple(range(1, num_slices + 1))
    for (kind, _), instruction in found.items():
        crossing = crossing_of(instruction)
        assert crossing is not None
        if kind == "ONE_TO_ONE":
            ring = {(n, n % num_slices + 1) for n in everyone}
            assert set(crossing.groups) == ring
        else:
            assert set(crossing.groups) == {everyone}


@pytest.mark.parametrize("num_slices", COUNTS)
def test_bytes_that_leave_a_slice(num_slices: int) -> None:
    """By hand, of an array of V bytes on each device: a ring passes on what the neighbours lack."""
    module = between(num_slices)
    whole = 1024 * 1024 * 2.0
    """bf16[1024,1024] on each device; the gathered array is that of all slices."""
    share = (num_slices - 1) / num_slices
    expected = {
        "ALL_REDUCE": 2 * share * whole,
        "ALL_GATHER": (num_slices - 1) * whole,
        "REDUCE_SCATTER": (num_slices - 1) * whole,
        "ALL_TO_ALL": share * whole,
        "ONE_TO_ONE": whole,
    }
    timeline = simulated(module, f"{num_slices}xv5e-16")
    by_name = {span.name: span for span in timeline.spans if span.lane == "dcn"}
    for (kind, _), instruction in transfers(module).items():
        span = by_name[instruction.name]
        assert span.bytes == pytest.approx(expected[kind]), kind
        assert span.seconds == pytest.approx(
            expected[kind] / rates_of(slice(f"{num_slices}xv5e-16")).dcn
        )
        assert span.resource is Resource.dcn


def test_more_slices_take_longer() -> None:
    times = [simulated(between(n), f"{n}xv5e-16").seconds for n in COUNTS]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


@pytest.mark.parametrize("num_slices", COUNTS)
def test_nothing_is_left_unexplained(num_slices: int) -> None:
    [allowance] = simulated(between(num_slices), f"{num_slices}xv5e-16").notes
    assert f"slowest of {num_slices} slices" in allowance


def test_a_part_of_the_slices() -> None:
    found = transfers(parse(recorded.text("halves-4xv5e-4")))
    crossing = crossing_of(found["ALL_REDUCE", "send"])
    assert crossing is not None
    assert set(crossing.groups) == {(1, 3), (2, 4)}
    assert crossings(found["ALL_REDUCE", "send"], 4) == (1.0, "")


def test_an_exchange_with_several_devices_of_each_slice() -> None:
    found = transfers(parse(recorded.text("exchange-4xv5e-4")))
    crossing = crossing_of(found["ALL_TO_ALL", "recv"])
    assert crossing == Crossing(
        kind="ALL_TO_ALL", groups=((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4),)
    )
    # Of 16 members 12 are in other slices.
    assert crossings(found["ALL_TO_ALL", "recv"], 4) == (0.75, "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"{1,2,3,4}x{0:15}"', '"{1..4}x{0:15}"'),
        ('"{1,2,3,4}x{0:15}"', "{{100000,200000}->{300000,400000}}"),
        ("ALL_REDUCE", "ALL_BUT_ONE"),
        ('_xla_megascale_target="{1,2,3,4}x{0:15}"', '_xla_megascale_targets="4"'),
    ],
)
def test_what_is_not_understood_is_reported_and_not_cheaper(before: str, after: str) -> None:
    text = recorded.text("between-4xv5e-16")
    odd = simulated(parse(text.replace(before, after)), "4xv5e-16")
    assert before in text
    assert any("between slices is not understood" in note for note in odd.notes)
    assert all(len(note) < 250 for note in odd.notes)
    assert math.isfinite(odd.seconds)
    assert odd.seconds > 0


@pytest.mark.parametrize("num_slices", COUNTS)
def test_the_slowest_slice_is_waited_for(num_slices: int) -> None:
    """2.1 % of the rest of the step for each doubling, as published steps grew, in sight and named."""
    timeline = simulated(between(num_slices), f"{num_slices}xv5e-16")
    rest = [span for span in timeline.spans if span.name != "slowest-slice"]
    [wait] = [span for span in timeline.spans if span.name == "slowest-slice"]
    assert wait.seconds == pytest.approx(0.021 * math.log2(num_slices) * wait.start)
    assert wait.start == pytest.approx(max(s.start + s.seconds for s in rest if s.lane == "core"))
    assert timeline.seconds == pytest.approx(wait.start + wait.seconds)


def test_slices_that_exchange_nothing_do_not_wait() -> None:
    module = recorded.module("between-2xv5e-16")
    alone = simulate(module, slice("v5e-16"))
    assert not [span for span in alone.spans if span.name == "slowest-slice"]
