"""The folder of a study: what is refused, and what is continued."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from systolic.cli.main import main
from systolic.tuning.processes import Processes
from systolic.tuning.results import StudyResult
from systolic.tuning.study import num_results
from systolic.tuning.trials import TrialWorker
from tests.tuning.test_trials import RATES, RECIPE, tuning, work


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def a_run(folder: Path) -> None:
    assert main(["train", RECIPE, "--steps=1", f"--run={folder}", "--json"]) == 0


def a_clone(folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    (folder / "trials.json").write_text('{"users": 12}')


def a_hidden_file(folder: Path) -> None:
    folder.mkdir()
    (folder / ".notes").write_text("mine")


@pytest.mark.parametrize("made", [a_run, a_clone, a_hidden_file])
def test_a_folder_that_is_no_study_is_refused_and_left_alone(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    made(folder)
    before = files(folder)
    capsys.readouterr()
    words = ["tune", RECIPE, RATES, "--trials=1", f"--study={folder}"]
    for more in ([], [f"--storage=sqlite:///{tmp_path / 'other.db'}"]):
        assert main([*words, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith(f"systolic: --study {folder} has files and is no study (it has no")
        assert line.endswith("; give a new or an empty folder [taken]")
    assert files(folder) == before
    assert files(tmp_path) == sorted(["s", *(f"s/{one}" for one in before)])


def test_results_of_damaged_or_other_files_are_none(tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    assert num_results(tmp_path) == 0
    for text in ("{", "[]", "{}", '{"trials": 1}', '{"trials": [1]}', '{"trials": [{}]}'):
        file.write_text(text)
        assert num_results(tmp_path) == 0
    file.write_text('{"trials": [{"state": "done", "number": 0}, {"state": "failed"}]}')
    assert num_results(tmp_path) == 1


def here(processes: Processes) -> StudyResult:
    """Runs the trials in this process, without the start of a worker's."""
    TrialWorker(tuning=processes.tuning, shared=processes.shared).work()
    return processes.result()


WORDS = [RATES, "--sampler=random", "--trials=2"]


@pytest.fixture
def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], tuple[list[Any], str]]:
    """Rows and complaints of the command over a folder."""
    monkeypatch.setattr(Processes, "run", here)

    def ran(folder: Path) -> tuple[list[Any], str]:
        capsys.readouterr()
        assert main(["tune", RECIPE, *WORDS, f"--study={folder}", "--json"]) == 0
        out, err = capsys.readouterr()
        return json.loads(out)["trials"], err

    return ran


def figures(rows: list[Any]) -> list[Any]:
    return [row["figures"] for row in rows]


@pytest.mark.slow
def test_an_empty_folder_and_a_study_that_lost_its_database_are_taken(
    tmp_path: Path, told: Callable[[Path], tuple[list[Any], str]]
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    before, _ = told(folder)
    assert [row["state"] for row in before] == ["done", "done"]
    for name in ("empty", "gone"):
        copy = shutil.copytree(folder, tmp_path / name)
        for path in copy.glob("study.db*"):
            path.unlink()
        if name == "empty":
            (copy / "study.db").touch()
        else:
            # study.json alone says what the folder is, and a run that is gone trains again.
            (copy / "trials.json").unlink()
            shutil.rmtree(copy / "trials" / "0001")
        after, err = told(copy)
        (line,) = [line for line in err.splitlines() if "study.json" in line]
        assert line.startswith(
            f"systolic: {copy}/study.json has 2 results and the study in sqlite:"
        )
        assert f"finished runs in {copy}/trials are used again" in line
        assert figures(after) == figures(before)
        assert after[0]["seconds"] == before[0]["seconds"]  # not trained again
        assert "study.json" not in told(copy)[1]
    # Without study.json the runs alone are used, with the study's options and without.
    (folder / "study.json").unlink()
    for lost in ("study.db", "trials.json"):
        (folder / lost).unlink()
        rows = work(tuning(folder, *WORDS)).rows
        assert [row.figures for row in rows] == figures(before)
        assert [row.seconds for row in rows] == [row["seconds"] for row in before]
