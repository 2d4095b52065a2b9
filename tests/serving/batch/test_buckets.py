"""Sizes that pad the least: against all choices, by hand, and within their limits."""

import itertools
import random

import pytest

from systolic.core.errors import DataError, OptionError
from systolic.serving.batch.buckets import Shapes, Traffic, choose, fewest_padded


def share(weights: dict[int, float], sizes: list[int]) -> float:
    """Padding where each value takes the least size that holds it."""
    padded = sum(
        often * next(size for size in sizes if size >= value) for value, often in weights.items()
    )
    return 1 - sum(value * often for value, often in weights.items()) / padded


def best(weights: dict[int, float], count: int) -> float:
    """The least padding of any choice."""
    *others, largest = sorted(weights)
    return min(
        share(weights, [*chosen, largest])
        for number in range(count)
        for chosen in itertools.combinations(others, number)
    )


def test_no_choice_of_sizes_pads_less() -> None:
    draw = random.Random(0)
    for _ in range(60):
        values = draw.sample(range(1, 60), draw.randint(1, 9))
        weights = {value: draw.random() for value in values}
        for count in (1, 2, 3, 5):
            sizes, padding = fewest_padded(weights, count)
            assert len(sizes) <= count
            assert sizes == sorted(set(sizes))
            assert sizes[-1] == max(values)
            assert padding == pytest.approx(share(weights, sizes), abs=1e-12)
            assert padding == pytest.approx(best(weights, count), abs=1e-12)


def test_by_hand() -> None:
    """90 texts of 10 tokens, 10 of 100: two lengths pad nothing, one pads 90 x 90 of 10,000 positions."""
    traffic = Traffic(lengths={10: 90, 100: 10}, examples={1: 1})
    one = choose(Shapes(programs=1, largest=1, traffic=traffic), longest=100)
    assert (one.lengths, one.rows) == ([100], [1])
    assert one.padding_share == pytest.approx(0.81)
    two = choose(Shapes(programs=2, largest=1, traffic=traffic), longest=100)
    assert (two.lengths, two.padding_share) == ([10, 100], 0)
    assert str(two) == "2 programs: batches of 1 x 10, 100 positions; expected padding 0.0%"


def test_a_request_alone_pads_nothing_and_no_batch_is_past_the_largest() -> None:
    for programs in range(1, 12):
        found = choose(Shapes(largest=20, programs=programs))
        assert len(found.all) <= programs
        assert found.rows[-1] == 20
        assert programs == 1 or found.rows[0] == 1
    # What comes beyond the limits counts as the largest.
    wide = choose(Shapes(largest=4, traffic=Traffic(examples={50: 1.0})))
    assert (wide.rows[-1], wide.padding_share) == (4, 0)


def test_programs_are_split_between_sizes_and_lengths() -> None:
    for programs in (1, 2, 5, 12, 16):
        found = choose(Shapes(programs=programs), longest=96)
        assert len(found.rows) * len(found.lengths) <= programs
        assert found.lengths[-1] == 96
    same = Traffic(lengths={96: 1.0})
    assert choose(Shapes(programs=8, traffic=same), longest=96).lengths == [96]


def test_on_a_cpu_lengths_come_before_sizes() -> None:
    """Any number of rows is a few calls of 1, 4 and 16; each length saves padding that no size would."""
    grid = choose(Shapes(largest=16, programs=15), longest=256)
    linear = choose(Shapes(largest=16, programs=15), longest=256, linear=True)
    assert (linear.rows, len(linear.lengths), len(linear.all)) == ([1, 4, 16], 5, 15)
    assert linear.padding_share < grid.padding_share / 1.5
    # Where few positions are enough for all cores, long rows have fewer sizes, and there are more lengths.
    short = choose(Shapes(largest=16, programs=15, positions=512), longest=256, linear=True)
    assert (len(short.lengths), len(short.all)) == (8, 15)
    assert short.padding_share < linear.padding_share / 1.5
    assert choose(Shapes(largest=12, programs=2), longest=9, linear=True).rows == [3, 12]
    assert choose(Shapes(largest=12), longest=9, ways=2, linear=True).rows == [2, 12]


def test_on_a_cpu_sizes_of_one_shape_are_halves_without_padding() -> None:
    """A call of an even number of pictures is computed in pieces of two; odd ones would be computed whole."""
    grid = choose(Shapes(largest=16), linear=True)
    assert (grid.rows, grid.padding_share) == ([1, 2, 4, 8, 16], 0)
    assert choose(Shapes(largest=16), ways=2, linear=True).rows == [2, 4, 8, 16]
    assert len(choose(Shapes(largest=16, programs=3), linear=True).rows) == 3


def test_no_batch_has_more_positions_than_allowed() -> None:
    found = choose(Shapes(largest=32, positions=1024), longest=512)
    assert max(bucket.positions for bucket in found.all) <= 1024
    assert max(bucket.rows for bucket in found.all if bucket.length == 512) <= 2
    # A row of the largest length always fits.
    assert max(b.positions for b in choose(Shapes(positions=8), longest=512).all) == 512


def test_devices_divide_every_batch() -> None:
    found = choose(Shapes(largest=30), ways=4)
    assert all(rows % 4 == 0 for rows in found.rows)
    assert (found.rows[0], found.rows[-1]) == (4, 28)
    with pytest.raises(OptionError, match="at most 2 rows, and the 4 devices"):
        choose(Shapes(largest=2), ways=4)


@pytest.mark.parametrize("longest", [None, 64])
@pytest.mark.parametrize("linear", [False, True])
def test_rows_that_only_devices_need_are_padding(linear: bool, longest: int | None) -> None:
    """On four devices a picture alone is one row of four, and five are five of eight."""
    for examples, share in ((1, 0.75), (5, 0.375), (4, 0.0)):
        traffic = Traffic(examples={examples: 1.0}, lengths={64: 1.0})
        shapes = Shapes(largest=16, traffic=traffic)
        assert choose(shapes, longest=longest, ways=4, linear=linear).padding_share == share
    assert choose(Shapes(largest=16), longest=longest, ways=2, linear=linear).padding_share > 0.05


def test_traffic_goes_to_json_and_back() -> None:
    traffic = Traffic(examples={2: 3.0, 1: 5.0}, lengths={17: 0.5})
    assert Traffic.from_json(traffic.to_json()) == traffic
    assert Traffic.from_json({}) == Traffic()
    for wrong in (
        [],
        {"examples": 3},
        {"lengths": {"a": 1}},
        {"lengths": {"0": 1}},
        {"lengths": {"3": float("nan")}},
    ):
        with pytest.raises(DataError):
            Traffic.from_json(wrong)


@pytest.mark.parametrize("linear", [False, True])
def test_few_programs_or_many_devices_stay_within_it(linear: bool) -> None:
    """All traffic of 32 rows: no small batch is expected, and 32 of the longest rows are 16 times the limit."""
    for shapes in (
        Shapes(programs=1, positions=1024),
        Shapes(positions=1024, traffic=Traffic(examples={32: 1.0})),
        Shapes(positions=256),
    ):
        for ways in (1, 2, 8):
            grid = choose(shapes, longest=512, ways=ways, linear=linear)
            # A row for each device is the least that there is.
            limit = max(shapes.positions or 0, 512 * ways)
            assert max(bucket.positions for bucket in grid.all) <= limit
            assert all(bucket.rows % ways == 0 for bucket in grid.all)
            assert grid.lengths[-1] == 512
            assert len(grid.all) <= (shapes.programs or 16)


def test_expected_padding_counts_rows_and_buckets_that_are_left_out() -> None:
    """32 texts of 512 tokens wait: under 1,024 positions, 16 calls of 2; one program of 4 pads 3 rows of 4 for one text."""
    many = Traffic(examples={32: 1.0}, lengths={512: 1.0})
    for linear in (False, True):
        grid = choose(Shapes(positions=1024, traffic=many), longest=512, linear=linear)
        assert all(bucket.positions <= 1024 for bucket in grid.all)
        assert grid.padding_share == 0
    one = Traffic(examples={1: 1.0}, lengths={512: 1.0})
    for linear in (False, True):
        grid = choose(Shapes(largest=4, programs=1, traffic=one), longest=512, linear=linear)
        assert (grid.rows, grid.lengths, grid.padding_share) == ([4], [512], 0.75)
    five = Traffic(examples={5: 1.0}, lengths={512: 1.0})
    grid = choose(
        Shapes(largest=32, programs=2, positions=2048, traffic=five), longest=512, linear=True
    )
    # Batches of 8 and 32 were chosen, and neither is within the positions: 4 rows twice.
    assert (grid.rows, grid.sizes(512), grid.padding_share) == ([8, 32], [4], 0.375)
