from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systolic.chips import slice
from systolic.hlo import Groups
from systolic.sim.network import PERMUTE_SECONDS, Network
from systolic.sim.rates import rates_of

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
MIB = 2.0**20
SOME = settings(max_examples=25)
"""Of each kind and slice; together they are hundreds."""


@cache
def network(name: str) -> Network:
    on = slice(name)
    return Network(on, rates_of(on))


def line(of: Network, length: int, axis: int = 0) -> Groups:
    """Devices along one axis of the torus, from the origin."""
    picked = [
        device
        for device, place in enumerate(of.places)
        if place[axis] < length and not any(place[n] for n in range(5) if n != axis)
    ]
    return Groups((tuple(picked),))


def seconds(of: Network, kind: str, groups: Groups, whole: float) -> float:
    """Of a collective whose array is ``whole`` bytes when it is gathered."""
    part = whole / groups.size
    out, given_ = {"all-gather": (whole, part), "reduce-scatter": (part, whole)}.get(
        kind, (whole, whole)
    )
    return of.collective(kind, groups, out, given_).seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["v5e-256", "v4-64", "v5p-128", "v6e-16", "2xv5e-16"])
@SOME
@given(mib=st.floats(0.01, 1000), more=st.floats(1.01, 10))
def test_more_bytes_take_longer(kind: str, name: str, mib: float, more: float) -> None:
    of = network(name)
    groups = Groups((tuple(range(len(of.places))),))
    assert seconds(of, kind, groups, more * mib * MIB) > seconds(of, kind, groups, mib * MIB)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
@given(length=st.integers(2, 14), mib=st.floats(1, 1000))
def test_a_longer_line_takes_longer(kind: str, length: int, mib: float) -> None:
    of = network("v5e-256")
    shorter, longer = line(of, length), line(of, length + 1)
    assert seconds(of, kind, longer, mib * MIB) > seconds(of, kind, shorter, mib * MIB)


def test_a_ring_is_twice_as_fast_as_a_line() -> None:
    of = network("v5e-256")
    ring, most = line(of, 16), line(of, 15)
    assert seconds(of, "all-gather", ring, 1e9) == pytest.approx(
        seconds(of, "all-gather", most, 1e9) / 2, rel=0.05
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["v5e-4", "v5e-256", "v4-64", "v5p-128", "v6e-256", "tpu7x-64"])
@SOME
@given(mib=st.floats(1, 4000))
def test_no_faster_than_all_links_of_a_device(kind: str, name: str, mib: float) -> None:
    of = network(name)
    groups = Groups((tuple(range(len(of.places))),))
    links = 2 * of.rates.axes
    least = mib * MIB * (groups.size - 1) / groups.size / (links * of.rates.link)
    least *= {"all-reduce": 2.0, "all-to-all": 1 / groups.size}.get(kind, 1.0)
    assert seconds(of, kind, groups, mib * MIB) >= least


def test_on_a_line_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    of = network("v5e-256")
    row = line(of, 8)
    halves = [seconds(of, kind, row, 1e9) for kind in ("reduce-scatter", "all-gather")]
    # A gather reaches what a link carries, sums 0.85 of it.
    assert sum(halves) <= seconds(of, "all-reduce", row, 1e9) <= 1.1 * sum(halves)


PLACES = [
    (name, axis)
    for name in (
        "v4-64",
        "v5e-4",
        "v5e-8",
        "v5e-256",
        "v6e-8",
        "v6e-256",
        "v5p-8",
        "v5p-128",
        "tpu7x-64",
    )
    for axis in (None, 0, 1)
    if axis is None or slice(name).topology[axis] > 1
]


@pytest.mark.parametrize(("name", "axis"), PLACES)
def test_the_halves_of_an_all_reduce_take_as_long_as_it(name: str, axis: int | None) -> None:
    """All chips, or one axis of the torus: lines and rings, one, two and three axes; 256 MiB a device."""
    of = network(name)
    everyone = Groups((tuple(range(len(of.places))),))
    groups = everyone if axis is None else line(of, of.shape[axis], axis)
    took = {kind: seconds(of, kind, groups, 256 * MIB) for kind in KINDS}
    both = took["reduce-scatter"] + took["all-gather"]
    # Measured on v5p-8: 1.13 (see sim/constants.toml). A ring through three axes leaves most of their links idle.
    assert (
        0.9
        <= both / took["all-reduce"]
        <= (1.6 if sum(size > 1 for size in of.shape) > 2 and axis is None else 1.25)
    )
    assert took["all-gather"] <= took["reduce-scatter"] <= took["all-reduce"]
    assert took["all-to-all"] < took["all-gather"] * groups.size


# v5p-8, 2 x 2 chips: AI-Hypercomputer/maxtext, report on shard_mode of 2026-08-31, xplane durations.
@pytest.mark.parametrize(
    ("kind", "whole", "low", "high"),
    [
        ("all-reduce", 512 * 151_936 * 2, 1689e-6, 1702e-6),
        ("all-gather", 262_144 * 512 * 2, 1223e-6, 1225e-6),
        ("reduce-scatter", 512 * 32_000 * 2, 24.58e6 / 99.3e9, 24.58e6 / 91.7e9),
    ],
)
def test_collectives_of_a_v5p_take_what_chips_took(
    kind: str, whole: int, low: float, high: float
) -> None:
    of = network("v5p-8")
    took = seconds(of, kind, Groups((tuple(range(4)),)), whole)
    assert 0.93 * low <= took <= 1.07 * high


def test_a_reduce_scatter_over_several_axes_takes_one_ring() -> None:
    of = network("v6e-8")
    # Qwen3 8B, its 36 layers' gradients in bf16 over 2 x 4 chips: 0.143 s (MaxText) and 0.146 s (another
    # trainer) were measured a step in "reduce-scatter fusion" (vlasenkoalexey/tpu_performance_autoresearch_wiki).
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288
    everyone = Groups((tuple(range(8)),))
    assert seconds(of, "reduce-scatter", everyone, 36 * 2 * layer) == pytest.approx(
        0.1445, rel=0.12
    )
    # Never above an all-reduce, which has both of its halves to do.
    for name in ("v5e-4", "v5e-256", "v5p-128", "v6e-8"):
        of = network(name)
        everyone = Groups((tuple(range(len(of.places))),))
        both = seconds(of, "all-reduce", everyone, 1e9)
        assert both / 2 <= seconds(of, "reduce-scatter", everyone, 1e9) <= both


def test_a_ring_through_three_axes_has_a_third_of_their_links() -> None:
    of = network("v5p-512")
    everyone = Groups((tuple(range(len(of.places))),))
    gathered = seconds(of, "all-gather", everyone, 1e10)
    scattered = seconds(of, "reduce-scatter", everyone, 1e10)
    assert 2.5 * gathered < scattered <= seconds(of, "all-reduce", everyone, 1e10)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_bytes_of_other_slices_pass_the_links_of_this_one_too(kind: str) -> None:
    """Every device takes in nearly the whole array, over its own links, however many slices hold it."""
    took = []
    for name in ("v5e-256", "2xv5e-256", "4xv5e-256"):
        of = network(name)
        took.append(seconds(of, kind, Groups((tuple(range(len(of.places))),)), 1e9))
        assert took[-1] > 1e9 * 255 / 256 / (4 * of.rates.link)
    assert took == sorted(took)


def test_one_device_has_nobody_to_wait_for() -> None:
    of = network("v5e-4")
    assert of.collective("all-gather", Groups(((0,), (1,))), 1e6, 1e6).seconds == 0.0


def ring(of: Network, step: int) -> Groups:
    row = line(of, 16).groups[0]
    pairs = tuple((row[n], row[(n + step) % 16]) for n in range(16))
    return Groups(pairs, pairs=True)


def test_a_permute_of_neighbours_is_one_hop() -> None:
    of = network("v5e-256")
    cost = of.collective("collective-permute", ring(of, 1), 1e6, 1e6)
    by_hand = 1e6 / of.rates.link + of.rates.hop_seconds + PERMUTE_SECONDS
    assert cost.seconds == pytest.approx(by_hand)
    assert cost.lanes == ("x+",)
    # The other way round uses the links' other direction.
    back = of.collective("collective-permute", ring(of, 15), 1e6, 1e6)
    assert (back.seconds, back.lanes) == (cost.seconds, ("x-",))


@pytest.mark.parametrize("step", [2, 3, 7])
def test_a_farther_permute_shares_each_link(step: int) -> None:
    of = network("v5e-256")
    cost = of.collective("collective-permute", ring(of, step), 1e6, 1e6)
    hops = step * (1e6 / of.rates.link + of.rates.hop_seconds)
    assert cost.seconds == pytest.approx(hops + PERMUTE_SECONDS)


# Measured on chips, slopes over repeat counts (marin-community/marin, issue 6736): the rows of the half that is fitted.
@pytest.mark.parametrize(
    ("name", "size", "measured"),
    [("v5p-8", 1024, 4.5e-6), ("v5p-8", 67108864, 781.98e-6), ("v6e-8", 1024, 5.6e-6)],
)
def test_a_permute_over_one_hop_takes_what_chips_took(
    name: str, size: int, measured: float
) -> None:
    of = network(name)
    pairs = Groups(((0, 1), (1, 0)), pairs=True)
    cost = of.collective("collective-permute", pairs, size, size)
    assert cost.seconds == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("name", "rate", "fixed", "peak"),
    [
        # 0.7 of the 600 GB/s between dies and 1.7 us, as of collectives there; v2 and v3 have no published rate.
        ("tpu7x-2", 0.7 * 600e9, 1.7e-6, 600e9),
        ("tpu7x-8", 0.7 * 600e9, 1.7e-6, 600e9),
        ("v3-8", None, PERMUTE_SECONDS, None),
        ("v2-8", None, PERMUTE_SECONDS, None),
    ],
)
def test_a_permute_between_the_dies_of_a_chip_takes_its_bytes(
    name: str, rate: float | None, fixed: float, peak: float | None
) -> None:
    of = network(name)
    dies = [[place for place in of.places if place[3] == core] for core in (0, 1)]
    there = [(of.places.index(a), of.places.index(b)) for a, b in zip(*dies, strict=True)]
    pairs = Groups((*there, *((b, a) for a, b in there)), pairs=True)
    cost = of.collective("collective-permute", pairs, 100e6, 100e6)
    assert cost.lanes == ("die",)
    assert cost.seconds == pytest.approx(100e6 / (rate or 4 * of.rates.link) + fixed)
    assert cost.least == pytest.approx(100e6 / peak if peak else 0.0)
    # A gather sends half of the gathered array: one of twice the bytes takes as long, but for what is fixed.
    gather = of.collective("all-gather", Groups(tuple(there)), 200e6, 100e6)
    assert cost.seconds == pytest.approx(gather.seconds, rel=0.05)
    assert cost.least == pytest.approx(gather.least)


def test_a_permute_over_links_and_dies_waits_for_the_slower() -> None:
    of = network("tpu7x-8")
    at_place = {place: device for device, place in enumerate(of.places)}
    die = (at_place[0, 0, 0, 0, 0], at_place[0, 0, 0, 1, 0])
    link = (at_place[0, 0, 0, 1, 0], at_place[1, 0, 0, 1, 0])
    both, alone = (Groups(pairs, pairs=True) for pairs in ((die, link), (link,)))
    costs = [of.collective("collective-permute", groups, 1e8, 1e8) for groups in (both, alone)]
    assert [cost.lanes for cost in costs] == [("x+", "die"), ("x+",)]
    assert costs[0].seconds == costs[1].seconds


def test_an_all_reduce_over_two_rings_takes_what_chips_took() -> None:
    of = network("v6e-256")
    everyone = Groups((tuple(range(256)),))
    # psum of 0.6 GB over v6e-256: 235.8 GB/s, counted as 2 (n - 1) / n of the array (accelerator-microbenchmarks).
    moved = 2 * 255 / 256 * 0.6e9
    assert seconds(of, "all-reduce", everyone, 0.6e9) == pytest.approx(moved / 235.8e9, rel=0.02)


def test_a_gather_over_a_ring_takes_what_chips_took() -> None:
    of = network("v5e-256")
    # 95 % of 45 GB/s a way from 10 MB on, over a ring of 16 (How to Scale Your Model, sharding.md).
    by_hand = 15 / 16 * 100e6 / (2 * 0.95 * 45e9)
    assert seconds(of, "all-gather", line(of, 16), 100e6) == pytest.approx(by_hand, rel=0.02)


def test_a_permute_to_itself_is_free() -> None:
    of = network("v5e-4")
    assert of.collective("collective-permute", Groups(((0, 0),), pairs=True), 1e6, 1e6).seconds == 0


def test_between_slices_the_data_centre_network_counts() -> None:
    of = network("2xv5e-16")
    across = Groups(tuple((n, n + 16) for n in range(16)))
    cost = of.collective("all-reduce", across, 1e8, 1e8)
    assert "dcn" in cost.lanes
    assert cost.seconds >= 1e8 / of.rates.dcn
    # One pair alone has the network of its machine of four chips, half of 25e9 bytes/s, to itself.
    for alone in (Groups(((0, 16),)), Groups(((0, 16), (16, 0)), pairs=True)):
        kind = "collective-permute" if alone.pairs else "all-reduce"
        seconds = of.collective(kind, alone, 1e8, 1e8).seconds
        assert seconds == pytest.approx(1e8 / 12.5e9, rel=0.01)
    within = of.collective("all-reduce", Groups(((0, 1),)), 1e8, 1e8)
    assert "dcn" not in within.lanes
    assert cost.seconds > within.seconds


def test_default_places_are_all_different() -> None:
    for name in ("2xv5e-16", "v4-64", "tpu7x-64", "v5p-128"):
        of = network(name)
        assert len(set(of.places)) == len(of.places) == of.on.num_devices


def at(of: Network, *groups: list[tuple[int, ...]]) -> Groups:
    """Groups of devices by their places, missing coordinates 0."""
    index = {place: device for device, place in enumerate(of.places)}
    return Groups(
        tuple(tuple(index[(*place, 0, 0, 0, 0, 0)[:5]] for place in group) for group in groups)
    )


def test_groups_that_alternate_along_an_axis_share_its_links() -> None:
    of = network("v5e-256")
    beside = at(of, *([(n,) for n in range(4 * k, 4 * k + 4)] for k in range(4)))
    apart = at(of, *([(n,) for n in range(k, 16, 4)] for k in range(4)))
    # It closes to a ring: both directions, which four groups share.
    ratio = seconds(of, "all-gather", apart, 1e9) / seconds(of, "all-gather", beside, 1e9)
    assert ratio == pytest.approx(2, rel=0.01)
    lines = at(of, *([(n,) for n in range(k, 12, 4)] for k in range(4)))
    alone = at(of, [(n,) for n in range(0, 12, 4)])
    ratio = seconds(of, "all-gather", lines, 1e9) / seconds(of, "all-gather", alone, 1e9)
    assert ratio == pytest.approx(4, rel=0.01)


def test_groups_inside_one_another_share_links() -> None:
    of = network("v5e-256")
    outer, inner = [(0,), (3,)], [(1,), (2,)]
    alone = seconds(of, "all-gather", at(of, inner), 1e9)
    both = seconds(of, "all-gather", at(of, inner, outer), 1e9)
    assert both == pytest.approx(2 * alone, rel=0.01)
    assert both == pytest.approx(seconds(of, "all-gather", at(of, outer, inner), 1e9))


def test_diagonals_of_one_square_share_its_links() -> None:
    of = network("v5e-16")
    one, other = [(0, 0), (1, 1)], [(0, 1), (1, 0)]
    ratio = seconds(of, "all-gather", at(of, one, other), 1e9) / seconds(
        of, "all-gather", at(of, one), 1e9
    )
    assert ratio == pytest.approx(2, rel=0.01)


def test_groups_of_the_two_cores_of_chips_share_their_links() -> None:
    of = network("tpu7x-64")
    cores = [[(n, 0, 0, core) for n in range(of.shape[0])] for core in range(2)]
    ratio = seconds(of, "all-gather", at(of, *cores), 1e9) / seconds(
        of, "all-gather", at(of, cores[0]), 1e9
    )
    assert ratio == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slowest_group_counts_wherever_it_is_listed(kind: str) -> None:
    of = network("v5e-256")
    near, far = [(0, 0), (1, 0)], [(n, 1) for n in range(12)]
    cost = [of.collective(kind, groups, 1e9, 1e9) for groups in (at(of, near, far), at(of, far))]
    assert cost[0] == cost[1]
    assert cost[0].seconds > of.collective(kind, at(of, near), 1e9, 1e9).seconds


def test_neighbours_over_the_wraparound_are_neighbours() -> None:
    of = network("v5e-256")
    across, inside = at(of, [(15,), (0,)]), at(of, [(7,), (8,)])
    assert seconds(of, "all-gather", across, 1e9) == seconds(of, "all-gather", inside, 1e9)


def test_collectives_of_the_dies_of_a_chip_take_what_chips_took() -> None:
    # Qwen2.5 32B over the two devices of a TPU7x chip (tpu-inference's profile): 25.5 and 27.3 us, and 1.6 and 1.8.
    of = network("tpu7x-2")
    pair = at(of, [(0, 0, 0, 0), (0, 0, 0, 1)])
    assert seconds(of, "all-reduce", pair, 2 * 1024 * 5120) == pytest.approx(26.4e-6, rel=0.05)
    assert seconds(of, "all-gather", pair, 32) == pytest.approx(1.7e-6, rel=0.05)


def test_rules_of_the_page_how_it_works() -> None:
    """The table of collectives and its two examples, in ms, and the shares of links that sums reach."""
    lined, ringed = network("v5e-16"), network("v5e-256")
    four, sixteen = line(lined, 4), line(ringed, 16)
    assert seconds(lined, "all-reduce", four, 100e6) == pytest.approx(4.14e-3, rel=2e-3)
    assert seconds(ringed, "all-reduce", sixteen, 100e6) == pytest.approx(2.21e-3, rel=2e-3)
    gathered = 0.75 * 100e6 / 42.75e9 + 3e-6 + 5e-6
    assert seconds(lined, "all-gather", four, 100e6) == pytest.approx(gathered)
    scattered = 0.75 * 100e6 / (0.85 * 42.75e9) + 3e-6 + 5e-6
    assert seconds(lined, "reduce-scatter", four, 100e6) == pytest.approx(scattered)
    exchanged = 4 * 100e6 / 4 / 42.75e9 + 3e-6 + 5e-6
    assert seconds(lined, "all-to-all", four, 100e6) == pytest.approx(exchanged)
    moved = lined.collective("collective-permute", Groups(((0, 1),)), 100e6, 100e6).seconds
    assert moved == pytest.approx(100e6 / 42.75e9 + 1e-6 + 4e-6)
    slices, per_slice = network("2xv5e-16"), 16
    pair = Groups(tuple((n, n + per_slice) for n in range(per_slice)))
    rate = slices.rates.dcn
    for kind, rounds in (("all-gather", 1), ("all-reduce", 2), ("all-to-all", 1)):
        taken = slices.collective(kind, pair, 100e6, 100e6).seconds
        assert taken == pytest.approx(rounds * 0.5 * 100e6 / rate + 5e-6), kind
