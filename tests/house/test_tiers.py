"""CI runs what a change calls for, and each file within ten runs."""

import pytest

from tests.tiers import TESTS, TURNS, due, in_tier, longest_first, workers


@pytest.mark.parametrize("tier", ["slow", "parity"])
def test_a_change_calls_for_what_tests_it_and_ten_turns_see_all(tier: str) -> None:
    files = in_tier(tier)
    assert len(files) > 5
    steps = due(files, ["src/systolic/steps/loss.py"], 0)
    assert all(steps[one] for one in files if one.parent.name == "steps")
    models = {why for file, why in steps.items() if file.is_relative_to(TESTS / "models")}
    assert models - {"its turn"} == {"src/systolic/steps/loss.py"}
    assert all(due(files, ["pyproject.toml"], 3).values())
    others = []
    for turn in range(TURNS, 2 * TURNS):
        order = due(files, ["docs/log.md"], turn)
        assert sorted(order) == files
        here = [file for file, why in order.items() if why == "its turn"]
        assert list(order)[: len(here)] == here
        others += here
    assert sorted(others) == files


def test_the_longest_are_first_and_a_few_files_need_no_workers() -> None:
    short, long = TESTS / "chips/test_flags.py", TESTS / "steps/test_layouts.py"
    assert longest_first([short, long, short]) == [long, short]
    assert workers([str(short), f"{long}::test_usual"]) == 0
    assert workers([str(TESTS)]) >= 1
