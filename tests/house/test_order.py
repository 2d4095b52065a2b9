"""Each file of slow tests is among the first at some turn."""

from pathlib import Path

from tests.order import turns

FILES = [Path(name) for name in ("a/1", "a/2", "a/3", "b/1", "c/1", "c/2")]


def test_a_file_of_each_folder_then_the_next() -> None:
    first = [str(file) for file in turns([*FILES, *FILES], 0)]
    assert first == ["a/1", "b/1", "c/1", "a/2", "c/2", "a/3"]


def test_every_file_has_its_turn() -> None:
    assert {turns(FILES, turn)[0] for turn in range(18)} == set(FILES)
    for turn in (1, 7, 0xFFFFFFF):
        assert sorted(turns(FILES, turn)) == FILES
