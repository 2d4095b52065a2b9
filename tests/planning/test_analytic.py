"""The analytic model against recorded answers of the compiler and the simulation: bounds hold, estimates are near."""

import math
import statistics

import pytest

from systolic.chips import slice
from systolic.job import Layout, Precision, Remat
from systolic.planning.analytic import EFFICIENCY, RESERVED, analyse
from systolic.planning.candidate import Candidate
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


def alone(**changes: object) -> Candidate:
    """On one chip, where nothing moves between chips."""
    layout = Layout(**{"fsdp": 1, **changes})
    return Candidate(on=slice("v5e-1"), layout=layout, batch=64, precision=Precision.bf16)


def test_chunks_of_the_loss_compute_logits_once_more() -> None:
    whole, chunks = (analyse(facts(), alone(loss_chunks=n)) for n in (1, 8))
    model = facts().job.model
    flops = 2 * model.vocab * model.d_model * 64 * facts().units_per_example
    more = chunks.seconds_estimate - whole.seconds_estimate
    assert more == pytest.approx(flops / (EFFICIENCY * 197e12), rel=1e-6)
    assert chunks.seconds_bound == whole.seconds_bound


def test_inputs_of_layers_that_are_offloaded_are_not_on_the_chip() -> None:
    """In bfloat16, one for each token and layer; where other inputs are offloaded they stay."""
    kept, gone, others = (
        analyse(facts(), alone(remat=remat, remat_names=names)).bytes_bound * RESERVED
        for remat, names in (
            (Remat.save_names, ("layer_input",)),
            (Remat.offload, ("layer_input",)),
            (Remat.offload, ("mlp_gate",)),
        )
    )
    model = facts().job.model
    inputs = 2 * model.layers * model.d_model * 64 * facts().units_per_example
    assert kept - gone == pytest.approx(inputs, rel=1e-6)
    assert others == pytest.approx(kept, rel=1e-6)
