"""Where the time goes: sums are kept, paths roll up, sources are named."""

import pytest

from systolic.forecasting.costs import by_op, by_place, clean, roll_up, seconds_by_place
from systolic.report.pages import treemap
from tests.forecasting.display.recorded import fitting, small_timeline


def test_places_sum_to_the_step() -> None:
    timeline = small_timeline()
    assert sum(seconds_by_place(timeline).values()) == pytest.approx(timeline.seconds)
    assert sum(cost.seconds for cost in by_place(timeline)) == pytest.approx(timeline.seconds)


def test_an_op_counts_each_turn_of_its_loop() -> None:
    dot = next(cost for cost in by_op(small_timeline()) if cost.name == "fusion dot")
    assert (dot.runs, dot.seconds, dot.flops) == (4, pytest.approx(6e-3), pytest.approx(8e11))


def test_a_wait_costs_and_its_transfer_does_not() -> None:
    names = {cost.name: cost.seconds for cost in by_op(small_timeline())}
    assert names["wait all-gather gather"] == pytest.approx(2e-3)
    assert "all-gather gather" not in names


def test_what_has_no_layer_has_its_source_or_its_kind() -> None:
    assert set(seconds_by_place(small_timeline())) == {"embed", "mlp", "gather", "unnamed fusion"}


def test_the_heaviest_group_is_opened_while_there_is_room() -> None:
    seconds = {"block/attention/q": 3.0, "block/attention/k": 2.0, "block/mlp": 4.0, "head": 1.0}
    assert set(roll_up(seconds, 2).values()) == {"block", "head"}
    assert set(roll_up(seconds, 3).values()) == {"block/attention", "block/mlp", "head"}
    assert set(roll_up(seconds, 9).values()) == set(seconds)


def test_source_lines_do_not_roll_up() -> None:
    assert set(roll_up({"a/b.py:3": 1.0, "a/b.py:4": 1.0}, 1).values()) == {"a/b.py:3", "a/b.py:4"}


def test_private_names_and_repetitions_are_dropped() -> None:
    path = "attention/splash/_splash/splash_mha_fwd_segmented_residuals/splash_mha_fwd_segmented_residuals"
    assert clean(path) == "attention/splash/splash_mha_fwd"
    assert clean(path.replace("splash/", "blocks_3_of_4/splash/", 1)) == clean(path)


def test_a_real_step_names_the_parts_of_its_model() -> None:
    timeline = fitting().timeline
    assert timeline is not None
    assert {"attention", "mlp", "logits", "embed"} <= {c.name for c in by_place(timeline)}


def test_a_treemap_is_full_and_in_proportion() -> None:
    sizes = [6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0]
    boxes = treemap(sizes, 1.5)
    areas = [box.width * box.height / 1e4 for box in boxes]
    assert areas == pytest.approx([size / sum(sizes) for size in sizes], abs=1e-3)
    assert all(box.left >= 0 and box.left + box.width <= 100.01 for box in boxes)
    assert all(box.top >= 0 and box.top + box.height <= 100.01 for box in boxes)
