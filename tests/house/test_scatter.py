"""The tree becomes no more scattered than it is, and the counts are right."""

from pathlib import Path

import pytest

from tests.house import scatter
from tests.house.budget import ROOT
from tests.house.journeys import BY_TABLE, CHAT_CLASSES, JOURNEYS, broken, files, found

PACKAGE = ROOT / scatter.PACKAGE


def test_nothing_is_worse_than_its_ratchet() -> None:
    assert list(scatter.over(ROOT)) == []


@pytest.mark.parametrize("name", JOURNEYS)
def test_a_journey_is_as_the_package_is(name: str) -> None:
    assert list(broken(JOURNEYS[name], PACKAGE)) == []


def test_the_classes_of_a_chat_request_are_there() -> None:
    assert [place for place in CHAT_CLASSES if found(PACKAGE, place) is None] == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two files: one calls a method of the other's class."""
    folder = tmp_path / "src" / "systolic"
    (folder / "many").mkdir(parents=True)
    (folder / "a.py").write_text(
        '"""Where a thing begins."""\n'
        "from b import work as other\n\n"
        'def first(one):\n    """Of others."""\n    return other(one).go()\n\n'
        'class Twice:\n    """A class."""\n    field: int = 0\n    """As it is."""\n'
    )
    (folder / "b.py").write_text(
        "def work(x):\n    '''As told.'''\n    return x\n\n"
        "class _Twice:\n    '''Ofcourse.'''\n    def go(self): return work(self)\n"
    )
    for number in range(26):
        (folder / "many" / f"m{number}.py").write_text("x = 1\n")
    return folder


def test_counts_of_a_small_tree(package: Path) -> None:
    assert scatter.bad_docstrings(package) == {"": 4}
    assert scatter.shared_names(package) == {"Twice": 2}
    assert scatter.large_folders(package) == {"many": 26}
    # one, one, other; field, int; x, x; self, work, self; 26 times x.
    assert scatter.empty_share(package) == pytest.approx(2 / 36)


def test_constants_below_a_def_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "TOP = 1\ndef work(): return LOW\nLOW = 2\nLOWER: int = LOW\nTABLE = {1: work}\n"
        "OF_TABLE = len(TABLE)\nTOP = TOP + 1\nNAMED: int\nif LOW:\n    import late\nUSED = late.x\n"
    )
    assert scatter.low_constants(path) == ["LOW", "LOWER"]


def test_calls_are_followed_by_name(package: Path) -> None:
    journey = ("a.py:first", "b.py:work", "b.py:_Twice.go")
    assert list(broken(journey, package)) == []
    assert files(journey) == ["a.py", "b.py"]
    assert list(broken(("a.py:first", "b.py:gone"), package)) == ["b.py:gone is not there"]
    unnamed = ("b.py:work", "a.py:first")
    assert list(broken(unnamed, package)) == [
        "a.py:first is named by none of the functions before it"
    ]
    assert list(broken(("b.py:work", f"{BY_TABLE}a.py:first"), package)) == []


def test_declarations_of_an_option() -> None:
    declared = scatter.declarations(PACKAGE)
    verb = "training/command.py"
    assert declared["train", "workers"] == [f"{verb}:train"]
    assert declared["train", "diagnose"] == [f"{verb}:train", f"{verb}:resume"]
    assert declared["train", "json"] == [
        "training/display/view.py:show",
        "training/display/view.py:show_replay",
    ]


def test_a_namesake_of_another_type_declares_nothing() -> None:
    explained = {
        (where, name): kinds
        for file in ("training/command.py", "training/session.py", "training/trainer.py")
        for where, name, kinds in scatter._explained(PACKAGE / file)
    }
    assert explained["train", "run"] == {"Path", "str"}
    assert explained["Trainer", "run"] == {"Run"}
    assert explained["describe", "flags"] == {"RunFlags"}
    declared = scatter.declarations(PACKAGE)
    assert not {"Trainer", "TrainResult", "describe"} & {
        place.partition(":")[2] for place in declared["train", "run"] + declared["train", "flags"]
    }


def test_a_record_with_a_sentence_below_its_field_declares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``programs`` of the limits of a search is the number that ``systolic plan --programs`` declares."""
    before = scatter.declarations(PACKAGE)["plan", "programs"]
    goal = PACKAGE / "planning/goal.py"
    explained = tmp_path / "goal.py"
    bare = "    programs: int\n"
    assert bare in goal.read_text()
    explained.write_text(goal.read_text().replace(bare, f'{bare}    """Compiles at most."""\n'))
    places = scatter._explained
    monkeypatch.setattr(
        scatter, "_explained", lambda path: places(explained if path == goal else path)
    )
    monkeypatch.setitem(scatter.DECLARING, "plan", ("plan", "planning/goal.py"))
    assert ("Limits", "programs", {"int"}) in scatter._explained(goal)
    assert scatter.declarations(PACKAGE)["plan", "programs"] == before
    assert scatter._declares("PlanOptions")


def test_a_worse_and_a_much_better_count_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, parts = scatter.counts(ROOT), scatter.by_part(ROOT)
    told = {"counts": {**now, "files": now["files"] - 1, "lines": now["lines"] * 2}, "parts": parts}
    told["parts"] = {**parts, "class names with two meanings": {}}
    monkeypatch.setattr(scatter, "kept", lambda: told)
    lines = list(scatter.over(ROOT))
    assert lines[0].startswith("files: ")
    assert "lower it" in lines[1]
    assert len(lines) == 2 + len(parts["class names with two meanings"])


def test_recording_lowers_and_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "RATCHETS", tmp_path / "ratchets.json")
    now = scatter.counts(ROOT)
    scatter.record(ROOT, anew=True)
    thousands = -(-now["lines"] // 1000) * 1000
    assert scatter.kept()["counts"] == {**now, "lines": thousands}
    monkeypatch.setattr(scatter, "counts", lambda _: {**now, "files": 1, "lines": 10**9})
    scatter.record(ROOT, anew=False)
    assert scatter.kept()["counts"] == {**now, "files": 1, "lines": thousands}
