"""Each file of slow tests is among the first at some turn."""

from pathlib import Path

from tests.order import TESTS, TURNS, chosen, longest_first, turns, with_parity, workers

FILES = [Path(name) for name in ("a/1", "a/2", "a/3", "b/1", "c/1", "c/2")]


def test_a_file_of_each_folder_then_the_next() -> None:
    first = [str(file) for file in turns([*FILES, *FILES], 0)]
    assert first == ["a/1", "b/1", "c/1", "a/2", "c/2", "a/3"]


def test_every_file_has_its_turn() -> None:
    assert {turns(FILES, turn)[0] for turn in range(18)} == set(FILES)
    for turn in (1, 7, 0xFFFFFFF):
        assert sorted(turns(FILES, turn)) == FILES


def test_a_change_calls_for_what_tests_it_and_ten_turns_see_all() -> None:
    files = with_parity()
    assert TESTS / "models/families/test_dense.py" in files
    assert len(files) > 5
    steps = chosen(files, ["src/systolic/steps/loss.py"], 0)
    assert {one for one in files if one.parent.name == "steps"} <= set(steps)
    assert steps[TESTS / "models/families/test_dense.py"] == "src/systolic/steps/loss.py"
    assert set(chosen(files, ["pyproject.toml"], 3)) == set(files)
    alone = [set(chosen(files, ["docs/log.md"], turn)) for turn in range(TURNS)]
    assert set().union(*alone) == set(files)
    assert sum(map(len, alone)) == len(files)


def test_the_longest_are_first_and_a_few_files_need_no_workers() -> None:
    short, long = TESTS / "chips/test_flags.py", TESTS / "steps/test_layouts.py"
    assert longest_first([short, long, short]) == [long, short]
    assert workers([str(short), f"{long}::test_usual"]) == 0
    assert workers([str(TESTS)]) >= 1
