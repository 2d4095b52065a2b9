"""The folder of a study: what is refused, and what is continued."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from systolic.cli.main import main
from systolic.session.trials import TrialWorker
from systolic.session.tuning_processes import Processes
from systolic.tuning.results import StudyResult
from tests.session.test_tuning import RATES, RECIPE, tuning, work


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def a_run(folder: Path) -> None:
    assert main(["train", RECIPE, "--steps=2", f"--run={folder}", "--json"]) == 0


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
        assert line.endswith("; give a new or an empty folder")
    assert files(folder) == before
    assert files(tmp_path) == sorted(["s", *(f"s/{one}" for one in before)])


def test_empty_folders_and_what_is_left_of_a_study_are_taken(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    result = work(tuning(folder, RATES, "--trials=2"))
    assert len(result.done) == 2
    for lost in ("study.db", "trials.json"):
        (folder / lost).unlink()
        assert [row.figures for row in work(tuning(folder, RATES, "--trials=2")).rows] == [
            row.figures for row in result.rows
        ]


def here(processes: Processes) -> StudyResult:
    """Runs the trials in this process, without the start of a worker's."""
    TrialWorker(tuning=processes.tuning, shared=processes.shared).work()
    return processes.result()


@pytest.mark.parametrize("empty", [True, False])
def test_a_lost_database_is_rebuilt_and_told(
    empty: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Processes, "run", here)
    folder = tmp_path / "s"
    words = ["tune", RECIPE, RATES, f"--study={folder}", "--sampler=random", "--json"]
    assert main([*words, "--trials=2"]) == 0
    before = json.loads(capsys.readouterr().out)["trials"]
    for path in folder.glob("study.db*"):
        path.unlink()
    if empty:
        (folder / "study.db").touch()
    else:
        # study.json alone says what the folder is, and a run that is gone trains again.
        (folder / "trials.json").unlink()
        shutil.rmtree(folder / "trials" / "0001")
    assert main([*words, "--trials=2"]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "study.json" in line]
    assert line.startswith(f"systolic: {folder}/study.json has 2 results and the study in sqlite:")
    assert f"finished runs in {folder}/trials are used again" in line
    after = json.loads(out)["trials"]
    assert [row["figures"] for row in after] == [row["figures"] for row in before]
    assert after[0]["seconds"] == before[0]["seconds"]  # not trained again
    assert main([*words, "--trials=2"]) == 0
    assert "study.json" not in capsys.readouterr().err
