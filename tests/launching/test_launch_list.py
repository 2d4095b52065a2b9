"""List of launches, and folders that were moved, are damaged or hold something else."""

import shlex
from pathlib import Path

import pytest

from systolic.cli.main import main
from systolic.launching.record import launches
from tests.launching.made import listed

GKE = "launch digits --via gke --image registry/systolic:1 --run gs://bucket/digits"
TPU = "launch digits --via tpu-vm --run gs://bucket/digits"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def run(line: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    given = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert given == code, err
    return out, err


@pytest.mark.parametrize("verb", ["status", "stop", "logs"])
def test_a_missing_name_is_said(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"systolic {verb} needs NAME" in run(verb, capsys, 2)[1]


def test_status_shows_the_trainings_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = listed("mine") / "logs" / "0.log"
    log.parent.mkdir()
    log.write_text(
        "step 10 loss 2.5\n"
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        "I0000 00:00:1764109780.123456   26565 cpu_client.cc:470] TfrtCpuClient created.\n"
        "2026-11-25 22:29:40.123456: E external/xla/xla/pjrt/distributed/client.cc:74] Terminating\n"
    )
    assert "logs/0.log: step 10 loss 2.5\n" in run("status mine", capsys)[0]


def test_a_launch_whose_folder_is_gone_stays_in_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed("far", via="tpu-vm", bill={"usd": None, "usd_per_hour": 9.6})
    Path("launches").rename("moved")
    out, err = run("runs", capsys)
    assert "far   tpu-vm  2xcpu  unknown  2026-01-01T01:00:00" in out
    assert f"far: its folder {Path('launches/far').absolute()} is missing" in err
    told = run("status far", capsys, 1)[0]
    assert "'--train=--workers 4'" in told
    assert "2026-01-01T01:00:00+00:00; rented machines may still cost money" in told
    listed("here")
    Path("launches").rename("gone")
    assert "money" not in run("status here", capsys, 1)[0]
    Path("state/systolic/launches/here.json").unlink()
    assert "is missing" in run("stop far", capsys, 1)[1]
    assert "is missing" in run("logs far", capsys, 1)[1]
    # Its new folder repairs the entry.
    run("status moved/far", capsys)
    assert "is missing" not in run("runs", capsys)[1]
    assert launches()[0].path == Path("moved/far").absolute()


def test_files_of_one_folder_are_of_one_launch(capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{TPU} --on v5e-16 --zone us-west4-a --name mine", capsys)
    run(f"{TPU} --on v5e-16 --zone us-west4-a --name mine --spot", capsys)
    assert "the launch mine via tpu-vm" in run(f"{GKE} --on v5e-16 --name mine", capsys, 2)[1]
    assert not Path("launches/mine/jobset.yaml").exists()
    Path("my sources").mkdir()
    Path("my sources/model.py").touch()
    told = run(f"{GKE} --on v5e-16 --out 'my sources'", capsys, 2)[1]
    assert "my sources has files that are not from a launch" in told


def test_logs_of_a_process_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    listed("two", commands={"detached": True, "hosts": 2})
    assert "process is 5, but two has 2 here" in run("logs two --process 5", capsys, 2)[1]


def test_a_damaged_record_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (listed("here") / "launch.json").write_text("{")
    out, err = run("runs", capsys)
    assert "here  local  2xcpu  unknown" in out
    assert "launch.json is cut short; launch it again" in err
    Path("launches/here/launch.json").write_text("")
    assert "launch.json is empty; launch it again" in run("status launches/here", capsys, 1)[1]
    # The list has a copy, so that the launch can be given again.
    again = "launch digits --on 2xcpu --via local --name here"
    run(again, capsys)
    Path("state/systolic/launches/here.json").write_text("{")
    out, err = run("runs", capsys)
    assert "here  ?" in out
    assert "here.json is damaged" in err
    assert "and the list has no copy; choose a new folder with --out" in run(again, capsys, 2)[1]


def test_a_record_of_other_types_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    listed("here", bill={"usd_per_hour": "10"})
    out, err = run("runs", capsys)
    assert "here  ?" in out
    assert "here.json is damaged" in err
    err = run("status launches/here", capsys, 1)[1]
    reason = "damaged (Expected `float | null`, got `str` - at `$.bill.usd_per_hour`)"
    assert err == f"systolic: launches/here/launch.json is {reason}; launch it again [data]\n"
    err = run("launch digits --on 2xcpu --via local --name here", capsys, 2)[1]
    assert "launch.json is empty, cut short or damaged, and the list has no copy" in err


def test_status_of_a_folder_without_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    listed("mine")
    Path("launches").rename("moved")
    out, _ = run("status moved/mine", capsys)
    assert "mine on 2xcpu via local: lost" in out
    assert "launch digits --on 2xcpu '--train=--workers 4' --submit continues it" in out
