"""CI runs what a change calls for, and each file within ten runs."""

import pytest

from tests.tiers import TESTS, TURNS, due, in_tier, longest_first, reaches, turn_of, workers


@pytest.mark.parametrize("tier", ["slow", "parity"])
def test_a_change_calls_for_what_tests_it_and_ten_turns_see_all(tier: str) -> None:
    files = in_tier(tier)
    assert len(files) > 5
    steps = due(files, ["src/systolic/steps/loss.py"], 0)
    assert all(steps[one] for one in files if one.parent.name == "steps")
    order = list(steps)
    beside = [order.index(one) for one in files if one.parent.name == "steps"]
    assert max(beside) < min(order.index(one) for one in files if not steps[one])
    assert all(due(files, ["pyproject.toml"], 3).values())
    others = []
    for turn in range(TURNS, 2 * TURNS):
        order = due(files, ["docs/log.md"], turn)
        assert sorted(order) == files
        here = [file for file, why in order.items() if why == "its turn"]
        assert list(order)[: len(here)] == here
        others += here
    assert sorted(others) == files


def test_what_a_file_imports_through_others_calls_for_it() -> None:
    file = TESTS / "planning/test_search_phases.py"
    # A folder of tests imports planning, which imports sim, which imports hlo.
    for path in ("src/systolic/hlo/loops.py", "src/systolic/sim/constants.toml"):
        assert due([file], [path], turn_of(file) + 1)[file] == path
    helped = TESTS / "models/test_attention.py"
    assert due([helped], ["tests/devices.py"], turn_of(helped) + 1)[helped] == "tests/devices.py"
    # A child that a string names.
    same = TESTS / "training/distributed/test_consistency.py"
    assert reaches("tests/training/distributed/same_child.py", same)
    recorded = TESTS / "hlo/test_parse.py"
    assert reaches("tests/recorded/hlo/lm-v5e-4.hlo.gz", recorded)
    for file in (helped, same):
        assert not reaches("docs/log.md", file)
        assert not reaches("README.md", file)
        assert not reaches("tests/recorded/torchvision_names.json", same)


def test_a_file_keeps_its_turn_whatever_files_come_and_go() -> None:
    files = in_tier("slow")
    for turn in range(TURNS):
        some = [file for file, why in due(files[::2], [], turn).items() if why]
        whole = [file for file, why in due(files, [], turn).items() if why]
        assert set(some) == set(whole) & set(files[::2])


def test_the_longest_are_first_and_a_few_files_need_no_workers() -> None:
    short, long = TESTS / "chips/test_flags.py", TESTS / "steps/test_layouts.py"
    assert longest_first([short, long, short]) == [long, short]
    assert workers([str(short), f"{long}::test_usual"]) == 0
    assert workers([str(TESTS)]) >= 1
