"""The analytic model against recorded answers of the compiler and the simulation: bounds hold, estimates are near."""

import math
import statistics

import pytest

from systolic.planning.analytic import analyse
from tests.planning.fabricated import facts
from tests.planning.recorded import candidate, rows, split_rows

ALL = [*rows().values(), *split_rows().values()]


def test_there_are_layouts_that_fit_and_that_do_not() -> None:
    fits = [row["fits"] for row in rows().values()]
    assert sum(fits) > 20
    assert not all(fits)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row["layout"])
def test_bounds_are_below_what_the_compiler_says(row: dict) -> None:
    found = analyse(facts(), candidate(row))
    assert found.bytes_bound <= row["peak_bytes"]
    if row["step_seconds"] is not None:
        assert found.seconds_bound <= row["step_seconds"]


def test_estimates_are_near_enough_to_search_by() -> None:
    times = [
        math.log(row["step_seconds"] / analyse(facts(), candidate(row)).seconds_estimate)
        for row in ALL
        if row["step_seconds"] is not None
    ]
    sizes = [
        math.log(row["peak_bytes"] / analyse(facts(), candidate(row)).bytes_estimate) for row in ALL
    ]
    # What all have in common is learned with the first compile; it is the spread that misleads.
    assert statistics.stdev(times) < 0.35
    assert statistics.stdev(sizes) < 0.5
