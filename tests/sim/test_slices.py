"""Transfers between slices, as libtpu writes them."""

import math

import pytest

from systolic.chips import slice
from systolic.hlo import Instruction, Module, crossing_of, parse
from systolic.sim.network import Network, crossings
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
    assert crossing is not None
    assert crossing.groups == ((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4),)
    # Of 16 members 12 are in other slices.
    assert crossings(found["ALL_TO_ALL", "recv"], 4) == (0.75, "")


RING = "{{100000->200000},{200000->100000}}"
"""Of device 0 of each slice alone."""
EIGHT = "{" + ",".join(f"{{10000{n}->20000{n}}}" for n in range(8)) + "}"


@pytest.mark.parametrize(
    ("on", "target", "rate"),
    [
        # One machine of eight chips with 25e9 bytes/s; a chip's PCIe is 15e9.
        ("2xv5e-8", EIGHT, 25e9 / 8),
        ("2xv5e-8", "{{100007->200000},{200007->100000}}", 15e9),
        ("2xv5e-8", "{{100006->200000},{100007->200001}}", 25e9 / 2),
        # Machines of 2x2 chips, which have half of that; device 2 is at (2, 0), device 4 at (0, 1).
        ("2xv5e-16", "{{100015->200000},{200015->100000}}", 12.5e9),
        ("2xv5e-16", "{{100000->200000},{100004->200002}}", 12.5e9 / 2),
        ("2xv5e-16", "{{100000->200000},{100002->200002}}", 12.5e9),
        ("2xv5e-16", "{{100000->200000},{100002->200001}}", 12.5e9 / 2),
        ("2xv5e-16", "{{100000->200000},{100001->100002}}", 12.5e9),
        # Machines of 2x2x1 chips with 25e9; PCIe is 16e9. Device 4 is at (0, 0, 1).
        ("2xv4-16", "{{100000->200000},{100004->200004}}", 16e9),
        ("2xv5p-16", "{{100000->200000},{100004->200004}}", 16e9),
        ("2xv4-16", "{{100000->200000},{100001->200004}}", 25e9 / 2),
        ("2xv5p-16", "{{100000->200001},{100003->200005}}", 25e9 / 2),
        # Two devices a chip share its PCIe, 16e9 on v3; on TPU7x it is 64e9, and the machine's network 50e9.
        ("2xv3-8", RING, 16e9),
        ("2xv3-8", "{{100000->200000},{100001->200001}}", 16e9 / 2),
        ("2xtpu7x-8", RING, 50e9),
        ("2xtpu7x-8", "{{100000->200000},{100001->200001}}", 50e9 / 2),
    ],
)
def test_senders_of_a_host_share_its_network(on: str, target: str, rate: float) -> None:
    text = recorded.text("between-2xv5e-16")
    send = transfers(parse(text))["ONE_TO_ONE", "send"].rest
    before = send[send.index("{{1") : send.index("}}", send.index("{{1")) + 2]
    changed = transfers(parse(text.replace(before, target)))["ONE_TO_ONE", "send"]
    place = slice(on)
    assert Network(place, rates_of(place)).between(changed) == pytest.approx(rate)


def test_groups_of_some_devices_have_more_of_their_hosts() -> None:
    """Of four chips on a machine of 2x2 one takes part: its bytes leave at the whole machine's rate."""
    text = recorded.text("between-2xv5e-16")
    name = transfers(parse(text))["ALL_REDUCE", "send"].name
    all_, corners = (
        next(span for span in simulated(parse(changed), "2xv5e-16").spans if span.name == name)
        for changed in (
            text,
            text.replace('"{1,2}x{0:15}"', "{{100000,200000},{100015,200015}}"),
        )
    )
    assert corners.bytes == all_.bytes
    assert corners.seconds == pytest.approx(all_.bytes / 12.5e9)
    assert all_.seconds == pytest.approx(all_.bytes / (12.5e9 / 4))


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
