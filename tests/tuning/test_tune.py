"""``systolic.tune``: the command's search from Python, with its trials in this process."""

import inspect
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("optuna")

import systolic
from systolic.cli.main import main
from systolic.core.errors import OptionError, RunError, TakenError
from systolic.core.option_words import as_parameters
from systolic.core.reporter import reporting
from systolic.runs.record import load_run
from systolic.tuning.definition import SearchRecord, Tuning
from systolic.tuning.processes import Processes
from systolic.tuning.worker import read as read_search
from tests.tuning.searches import tuning_of
from tests.tuning.test_folder import here
from tests.tuning.test_trials import RATES, RECIPE, Recorded

RATE = {"learning-rate": "log:1e-4..1e-1"}


@pytest.mark.slow
def test_a_search_from_python_is_the_commands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recorded = tmp_path / "s", Recorded()
    with reporting(recorded):
        found = systolic.tune(
            RECIPE,
            search={**RATE, "scale": [0.5, 1.0]},
            trials=2,
            study=folder,
            sampler="random",
            batch=8,
        )
    assert capfd.readouterr() == ("", "")
    assert recorded.warnings == []
    assert isinstance(found, systolic.StudyResult)
    assert [one.finished for one in recorded.results] == [0, 1, 2]
    assert [row.state for row in found.rows] == ["done", "done"]
    best = found.best
    assert best is not None
    assert best.figures["loss"] == min(row.figures["loss"] for row in found.rows)
    run = load_run(Path(best.run))
    assert (run.job.options["batch"], run.job.options["learning_rate"]) == (
        8,
        best.values["learning-rate"],
    )
    values = f"--learning-rate {best.values['learning-rate']} --scale {best.values['scale']}"
    assert found.command == f"systolic train {RECIPE} --batch 8 {values}"
    assert (found.importance, found.stopped) == ({}, "")
    assert (folder / "report.html").is_file()
    # The command continues it, and finds nothing to do.
    words = [RATES, "--search=scale=0.5,1.0", "--sampler=random", "--batch", "8", "--trials=2"]
    monkeypatch.setattr(Processes, "run", here)
    assert main(["tune", RECIPE, *words, f"--study={folder}", "--json"]) == 0
    plain = json.loads(capfd.readouterr().out)
    assert plain.pop("report") == str(folder / "report.html")
    assert plain == json.loads(json.dumps(found.to_json()))
    # So does Python, with one trial more.
    more = systolic.tune(
        RECIPE,
        search={**RATE, "scale": [0.5, 1.0]},
        trials=3,
        study=folder,
        sampler="random",
        batch=8,
    )
    assert [row.figures for row in more.rows[:2]] == [row.figures for row in found.rows]
    assert len(more.done) == 3


SEEDED = """
from dataclasses import replace

from tests.tuning import trial_recipe


def job(learning_rate: float = 0.01, steps: int = 2, seed: int = 0):
    return replace(trial_recipe.job(learning_rate=learning_rate, steps=steps), seed=seed)
"""


def test_a_new_study_tells_its_first_trial(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", RECIPE, RATES, f"--study={tmp_path / 's'}", "--workers=0", "--steps=4"]
    assert main([*words, "--trials=1"]) == 0
    shown = capfd.readouterr().err
    assert "[1/1] trial 0: " in shown
    assert "continues" not in shown
    assert main([*words, "--trials=2"]) == 0
    shown = capfd.readouterr().err
    assert "continues: 1 done" in shown
    assert "[2/2] trial 1: " in shown


@pytest.mark.slow
def test_the_repeats_are_seen_and_compared(tmp_path: Path) -> None:
    recorded = Recorded()
    recipe = tmp_path / "seeded.py"
    recipe.write_text(SEEDED)
    with reporting(recorded):
        found = systolic.tune(
            f"{recipe}:job", search=RATE, trials=1, study=tmp_path / "s", repeats=2
        )
    assert found.repeats is not None
    assert (found.repeats["seeds"], len(found.repeats["best"]["values"])) == (2, 2)
    last = recorded.results[-1]
    assert [last.title(row) for row in last.rows] == [
        f"{which} settings, seed {seed}" for seed in (1, 2) for which in ("best", "default")
    ]


@pytest.mark.slow
def test_a_search_from_python_has_workers(tmp_path: Path) -> None:
    recorded = Recorded()
    recipe = tmp_path / "seeded.py"
    recipe.write_text(SEEDED)
    with reporting(recorded):
        found = systolic.tune(
            f"{recipe}:job",
            search=RATE,
            trials=2,
            study=tmp_path / "s",
            workers=2,
            repeats=2,
            steps=3,
        )
    assert [row.state for row in found.rows] == ["done", "done"]
    assert found.repeats is not None
    assert len(found.repeats["best"]["values"]) == 2
    assert [load_run(Path(row.run)).job.options["steps"] for row in found.rows] == [3, 3]
    assert recorded.results[-1].finished == 4
    # In processes of their own.
    assert {log.name for log in (tmp_path / "s" / "workers").iterdir()} == {"0.log", "1.log"}


WORDS = {
    "text": "lm --search model.layers=1,2 --path a.txt --steps=20 --model.no-qk-norm",
    "records": "bytes --search layout.fsdp=1,2 --model.layers=2 --precision f32 --objective max:x",
    "forecast": "digits --search batch=8..64:8 --sampler grid --on v5e-4 --quick --budget 3 --price spot",
    "numbers": f"{RECIPE} --search learning-rate=1e-3,1e-2 --spoil 3 5 --objective loss --objective seconds",
}


def text_of(search: SearchRecord) -> str:
    return json.dumps(msgspec.to_builtins(search))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_worker_reads_the_search_that_is_given(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another definition it would be refused; paths stay relative, as machines that share a study have other folders."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text\n" * 40)
    made = tuning_of(words.split())
    read = Tuning.from_record(read_search(text_of(made.record())))
    assert read.definition == made.definition
    assert text_of(read.record()) == text_of(made.record())
    assert repr(read.base) == repr(made.base)
    assert str(tmp_path) not in json.dumps(made.definition)
    assert (read.folder, read.address, read.pruner) == (made.folder, made.address, made.pruner)


def test_a_damaged_search_is_one_line(tmp_path: Path) -> None:
    plain = msgspec.to_builtins(tuning_of([RECIPE, RATES, f"--study={tmp_path}"]).record())
    lacking = json.dumps({name: value for name, value in plain.items() if name != "trials"})
    for text, reason in {
        lacking: "Object missing required field `trials`",
        json.dumps({**plain, "sampler": "new"}): "Invalid enum value 'new' - at `$.sampler`",
        "": "Expecting value: line 1 column 1 (char 0)",
    }.items():
        with pytest.raises(RunError) as caught:
            read_search(text)
        line = f"the search on stdin is damaged ({reason}); start workers by systolic tune"
        assert str(caught.value) == line


WHOLE = """
from dataclasses import dataclass, replace

from tests.tuning import trial_recipe


@dataclass(frozen=True)
class Shape:
    width: int = 16
    scale: float = 1
    others: tuple[float, ...] = (1, 2.5)


def job(learning_rate: float = 0.01, scale: float = 1, shape: Shape = Shape(), steps: int = 2):
    return trial_recipe.job(learning_rate=learning_rate, width=shape.width, steps=steps)
"""


def test_whole_numbers_of_floats_are_the_same_to_a_worker(tmp_path: Path) -> None:
    recipe = tmp_path / "whole.py"
    recipe.write_text(WHOLE)
    made = tuning_of([f"{recipe}:job", RATES, "--shape.width=8", f"--study={tmp_path / 's'}"])
    made.check_plain()
    read = Tuning.from_record(read_search(text_of(made.record())))
    assert made.definition["options"]["shape.scale"] == "1"
    assert read.definition == made.definition


BY_CALL = """
from collections.abc import Callable

from tests.tuning import trial_recipe


def job(learning_rate: float = 0.01, width: Callable[[], int] = lambda: 16):
    return trial_recipe.job(learning_rate=learning_rate, width=width(), steps=2)
"""


def test_values_that_only_python_has_reach_no_worker(tmp_path: Path) -> None:
    recipe, folder = tmp_path / "by_call.py", tmp_path / "s"
    recipe.write_text(BY_CALL)
    with pytest.raises(OptionError, match=r"width is <function.*; leave workers out to run the"):
        systolic.tune(
            f"{recipe}:job", search=RATE, trials=1, study=folder, workers=1, width=lambda: 8
        )
    assert not folder.exists()
    found = systolic.tune(f"{recipe}:job", search=RATE, trials=1, study=folder, width=lambda: 8)
    assert len(found.done) == 1


def test_workers_that_cannot_read_the_search_end_it_with_their_line(tmp_path: Path) -> None:
    """The recipe is gone when the worker looks for it."""
    recipe = tmp_path / "seeded.py"
    recipe.write_text(SEEDED)
    made = tuning_of([f"{recipe}:job", RATES, f"--study={tmp_path / 's'}"])
    recipe.unlink()
    with closing(made.open()) as shared:
        processes = Processes(tuning=made, shared=shared, search=made.record(), count=1)
        with pytest.raises(systolic.SystolicError, match=r"seeded.py is not a file; give the path"):
            processes.run()


def test_the_command_is_quiet_and_ends_as_a_shell_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe interrupts its own process, as Ctrl-C does; the trials are in the command's."""
    words = ["tune", RECIPE, RATES, "--trials=1", f"--study={tmp_path / 's'}", "--workers=0"]
    words += ["--halt-at=7", "--quiet"]
    assert main([*words, "--json"]) == 130
    out, err = capsys.readouterr()
    assert err == "systolic: interrupted; rerun to continue\n"
    assert (json.loads(out)["finished"], json.loads(out)["stopped"]) == (0, "interrupted")
    monkeypatch.setattr("os.kill", lambda *_: None)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1].split() == ["report", str(tmp_path / "s" / "report.html")]
    assert " --halt-at 7 --learning-rate " in " ".join(out.split())


def test_a_search_that_is_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe interrupts its own process, as Ctrl-C does."""
    given: dict[str, Any] = {"search": RATE, "trials": 1, "study": tmp_path / "s", "halt_at": 7}
    first = systolic.tune(RECIPE, **given)
    assert (first.stopped, first.best, first.rows[0].state) == ("interrupted", None, "waiting")
    monkeypatch.setattr("os.kill", lambda *_: None)
    again = systolic.tune(RECIPE, **given)
    assert (again.stopped, again.rows[0].state) == ("", "done")
    assert again.rows[0].values == first.rows[0].values


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"search": {"batch": "4..2"}}, ["--search=batch=4..2"]),
    ({"search": {"batch": "1.5..3"}}, ["--search=batch=1.5..3"]),
    ({"search": {"optimizer.lr": [1, 2]}}, ["--search=optimizer.lr=1,2"]),
    ({"search": {"model": "cnn,vitt"}}, ["--search=model=cnn,vitt"]),
    ({"search": {"schedule.warmup": [-1, 5]}}, ["--search=schedule.warmup=-1,5"]),
    ({"search": {"batch": [8, 16]}, "batch": 8}, ["--search=batch=8,16", "--batch=8"]),
    ({"search": {"batch": [8, 16]}, "trials": 0}, ["--search=batch=8,16", "--trials=0"]),
    ({"search": {"batch": [8, 16]}, "repeats": 1}, ["--search=batch=8,16", "--repeats=1"]),
    ({"search": {"batch": [8, 16]}, "budget": 5}, ["--search=batch=8,16", "--budget=5"]),
    (
        {"search": {"batch": [8, 16]}, "objective": "seconds"},
        ["--search=batch=8,16", "--objective=seconds"],
    ),
    (
        {"search": {"batch": [8, 16]}, "storage": "nowhere"},
        ["--search=batch=8,16", "--storage=nowhere"],
    ),
    (
        {"search": {"batch": [8, 16]}, "sampler": "cmaes"},
        ["--search=batch=8,16", "--sampler=cmaes"],
    ),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=str)
def test_the_refusals_are_the_commands(
    given: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(systolic.SystolicError) as caught:
        systolic.tune("digits", **given)
    assert caught.value.exit_code == 2
    assert main(["tune", "digits", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    names = inspect.signature(systolic.tune).parameters
    assert as_parameters(line, names) == f"systolic: {caught.value.line}"
    assert list(tmp_path.iterdir()) == []


def test_mistakes_that_only_python_can_make(tmp_path: Path) -> None:
    anything: Any = systolic
    for given, told in (
        ({"search": {}}, "search is {}; it takes options with their values"),
        ({"search": RATE, "sampler": "tp"}, "sampler is 'tp'; did you mean tpe?"),
        ({"search": RATE, "widht": 3}, "has no option 'widht'; did you mean width"),
        ({"search": RATE, "trials": "three"}, "trials is 'three'; it takes a whole number"),
    ):
        with pytest.raises(systolic.SystolicError, match=told.replace("?", r"\?")):
            anything.tune(RECIPE, study=tmp_path / "s", **given)
    with pytest.raises(systolic.SystolicError, match="recipe is 3; it takes the name of a recipe"):
        anything.tune(3, search=RATE)
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(TakenError, match="has files and is no study"):
        systolic.tune(RECIPE, search=RATE, study=tmp_path)
