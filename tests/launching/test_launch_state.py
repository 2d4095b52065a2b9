"""What ``systolic status``, ``stop`` and ``logs`` report about launches that are not plainly running."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from systolic.cli.main import main
from systolic.launching.record import launches
from systolic.launching.supervisor import BOOT, identity
from systolic.runs import manifest
from tests.launching.docker_client import containers, docker
from tests.launching.gcloud import gcloud
from tests.launching.made import listed


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def told(line: str, code: int = 0) -> str:
        given = main(shlex.split(line))
        out, err = capfd.readouterr()
        assert given == code, err
        return out + err

    return told


def this_process() -> dict[str, Any]:
    return msgspec.to_builtins(identity(os.getpid()))


def process(folder: Path, **fields: Any) -> None:
    """Writes that a launch is this process, or with other fields another one."""
    (folder / "process.json").write_text(json.dumps(this_process() | fields))


TPU = "launch digits --via tpu-vm --run gs://bucket/digits --on v5e-16 --zone us-east5-b --name far"


def test_a_launch_of_another_host_is_neither_lost_nor_stopped_here(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = gcloud(tmp_path, "ACTIVE", "0")
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    stop = [["bash", "-c", "exit 3"]]
    commands = {"detached": True, "status": ["true"], "stop": stop, "checks": [], "submit": []}
    folder = listed(
        "far", via="tpu-vm", slice="v5e-16", where="--zone us-east5-b", commands=commands
    )
    process(folder, host="login-2", boot="another")
    assert "far on v5e-16 via tpu-vm: elsewhere: runs on login-2 and is not visible" in run(
        "status far"
    )
    assert "far   tpu-vm  v5e-16  elsewhere" in run("runs")
    place = (folder / "process.json").absolute()
    why = f"far runs on login-2 and is not visible from here; run systolic stop far on login-2, or if that host is gone: rm {place}"
    assert why in run("stop far", 1)
    assert why in run(f"{TPU} --submit", 1)
    # Without the list, which only the other host may have.
    Path("state/systolic/launches/far.json").unlink()
    assert why in run(f"{TPU} --submit", 1)
    assert launches() == []
    assert not (folder / "tpu.sh").exists()
    # Its end is in the folder, which both hosts see.
    (folder / "ended").write_text("0\n")
    assert "far on v5e-16 via tpu-vm: done" in run(f"status {folder}")
    (folder / "ended").unlink()
    # The host is gone.
    place.unlink()
    assert "via tpu-vm: lost" in run(f"status {folder}")
    assert "far: already gone, nothing to stop" in run(f"stop {folder}")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"host": "login-2"}, "running"),  # this host has another name now
        ({"host": "login-2", "started": 1.0}, "elsewhere"),
        ({"host": socket.gethostname(), "boot": "before"}, "lost"),  # started again since
        ({"host": socket.gethostname(), "started": 1.0}, "lost"),
    ],
)
def test_the_host_is_known_by_its_name_and_boot(
    run: Callable[..., str], fields: dict[str, Any], name: str
) -> None:
    if "boot" in fields and not BOOT.exists():
        pytest.skip("this system has no ID of its boot")
    folder = listed("mine")
    process(folder, **fields)
    (folder / "state.json").write_text(json.dumps({"phase": "running", **this_process()}))
    assert f"mine on 2xcpu via local: {name}" in run("status mine")


def test_a_record_without_a_host_is_of_this_one(run: Callable[..., str]) -> None:
    folder = listed("mine")
    (folder / "process.json").write_text(json.dumps({"pid": os.getpid(), "started": 1.0}))
    assert "mine on 2xcpu via local: lost" in run("status mine")
    assert "mine: not running (lost)" in run("stop mine")


@pytest.mark.parametrize("name", ["process.json", "state.json"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("{", "cut short"),
        ("[]", "damaged (Expected `object`, got `array`)"),
        ('{"pid": "one", "phase": "done"}', "damaged (Expected `int`, got `str` - at `$.pid`)"),
        ('{"phase": "done"}', "damaged (Object missing required field `pid`)"),
    ],
)
def test_a_damaged_file_of_a_process_is_one_line(
    run: Callable[..., str], name: str, text: str, reason: str
) -> None:
    folder = listed("mine")
    process(folder)
    (folder / name).write_text(text)
    line = f"{(folder / name).absolute()} is {reason}; remove it if its launch is not running"
    assert f"mine: {line}\n" in (shown := run("runs"))
    assert "mine  local  2xcpu  unknown" in shown
    assert f"problem  {line}\n" in run("status mine", 1)
    assert json.loads(run("status mine --json"))["trouble"] == line
    assert run("stop mine", 1) == f"systolic: {line} [data]\n"
    (folder / name).unlink()
    assert "mine on 2xcpu via local: " in run("status mine")


def test_fields_of_another_version_are_shown(run: Callable[..., str]) -> None:
    """Parts of a record and a supervisor's state may have fields more, and an old record fewer."""
    bill = {"usd": 1, "usd_per_hour": 2, "carbon": 3}
    commands = {"detached": True, "more": [["a"]]}
    before = {"slice": "v5e-8", "bill": {"usd_per_hour": 5}, "until": "2026-01-01T01:00:00+00:00"}
    folder = listed("mine", bill=bill, commands=commands, earlier=[before], more=1)
    process(folder)
    state = {"phase": "running", **this_process(), "more": 2, "left_out": [1]}
    (folder / "state.json").write_text(json.dumps(state))
    shown = json.loads(run("status mine --json"))
    assert (shown["bill"], shown["commands"], shown["earlier"]) == (bill, commands, [before])
    assert {name: shown[name] for name in state} == state
    assert "mine on 2xcpu via local: running, without slice 1\n" in run("status mine")


def test_a_launch_that_was_only_written_is_not_lost(run: Callable[..., str]) -> None:
    run("launch digits --on 2xcpu --via local --name two")
    for name in ("two", "launches/two"):
        told = run(f"status {name}")
        assert "two on 2xcpu via local: written, not submitted; add --submit\n" in told
        assert "log " not in told
        assert "next     systolic launch digits --on 2xcpu --via local --name two --submit" in told
        assert "two: written, not submitted; nothing to stop" in run(f"stop {name}")
        told = run(f"logs {name}", 1)
        assert "two has no log" in told
        assert "it is written; systolic status" in told
    assert launches() == []
    run("launch digits --via gke --image r/s:1 --run gs://bucket/digits --on v5e-16 --name far")
    assert "far on v5e-16 via gke: written, not submitted" in run("status far")


BOX = "launch digits --on 8xcpu --via docker --name box --submit"


def test_a_submission_that_failed_is_recorded_and_cleared(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = docker(tmp_path)
    monkeypatch.setenv("PATH", f"{engine}:{os.environ['PATH']}")
    (engine / "fails").write_text("build")
    assert "docker build" in run(BOX, 1)
    (engine / "down").touch()
    why = "box on 8xcpu via docker: submit failed: docker build --platform linux/amd64 --tag box . failed with exit code 1"
    assert why in run("status box", 1)
    assert "box   docker  8xcpu  submit failed" in run("runs")
    # No object of the platform was created, so none has to be asked for.
    assert "submitting had failed before anything was created; nothing to stop" in run("stop box")
    assert "box   docker  8xcpu  stopped" in run("runs")


def test_a_submission_that_failed_early_costs_nothing(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill = {"usd": None, "usd_per_hour": 10.0}
    times = {"submitted": "2026-01-01T00:00:00+00:00", "stopped": "2026-01-01T01:00:00+00:00"}
    before = {"slice": "v5e-8", "bill": bill, "until": "2026-01-01T05:00:00+00:00"}
    shared = {"via": "gke", "slice": "v5e-8", "bill": bill, "failed": "apply failed"}
    commands = {"detached": False, "status": [], "state": []}
    listed("early", **shared, commands=commands, untouched=True, earlier=[before | times])
    assert "$10.00 used" in run("status early")
    earlier = [before | times | {"untouched": True}]
    listed("before", **shared, commands=commands, untouched=True, earlier=earlier)
    assert "$0.00 used" in run("status before")


def test_docker_is_asked_for_this_launchs_container(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = docker(tmp_path)
    monkeypatch.setenv("PATH", f"{engine}:{os.environ['PATH']}")
    # Another user's container of that name, by hand or from another launch.
    for label in ("", "ffff0000"):
        other = {"id": "f00", "name": "box", "label": label, "state": "running", "code": 0}
        (engine / "containers").write_text(json.dumps([other]))
        assert "container box exists but is not from this launch" in run(BOX, 1)
        assert launches() == []
        assert containers(engine) == [other]
    (engine / "containers").unlink()
    run(BOX)
    (mine,) = containers(engine)
    assert mine["label"] == launches()[0].id
    assert "step 10 of box" in run("logs box")
    assert "container box is running; stop it with systolic stop box" in run(BOX, 1)
    states = {
        ("running", 0): "running",
        ("created", 0): "failed: its container was created but could not be started",
        ("exited", 0): "done",
        ("exited", 1): "failed",
        ("exited", 2): "failed, its command line was rejected; systolic logs",
    }
    for (given, code), name in states.items():
        (engine / "containers").write_text(json.dumps([mine | {"state": given, "code": code}]))
        assert f"box on 8xcpu via docker: {name}" in run("status box")
    assert "box   docker  8xcpu  failed" in run("runs")
    (engine / "down").touch()
    assert "box   docker  8xcpu  submitted" in run("runs")
    (engine / "down").unlink()
    # Ended containers are replaced; one of another with that name is not this launch's.
    run(BOX)
    (engine / "containers").write_text(json.dumps([mine | {"label": "ffff0000"}]))
    assert "box on 8xcpu via docker: lost" in run("status box")
    assert "there is no container of launch box" in run("logs box", 1)
    assert "box: already gone, nothing to stop" in run("stop box")
    assert len(containers(engine)) == 1
    (engine / "containers").unlink()
    run(BOX)
    assert "box: stopped\n" in run("stop box")
    assert containers(engine) == []
    run(BOX)
    (engine / "fails").write_text("save")
    why = "box: stopped; the container was killed before the training had saved; run"
    assert why in (told := run("stop box", 1))
    assert "runs/box: it has no checkpoint" in told
    assert containers(engine) == []
    assert "box   docker  8xcpu  stopped" in run("runs")


def test_a_container_that_could_not_start_is_removed_by_a_stop(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = docker(tmp_path)
    monkeypatch.setenv("PATH", f"{engine}:{os.environ['PATH']}")
    (engine / "fails").write_text("run")
    assert "could not select device driver" in run(BOX, 1)
    assert "box on 8xcpu via docker: submit failed: docker run" in run("status box")
    assert "box: already gone" in run("stop box")
    assert containers(engine) == []
    run(BOX, 1)
    (engine / "fails").unlink()
    assert "container box has ended; removing it" in run(BOX)
    assert containers(engine)[0]["state"] == "running"


def test_a_stop_that_killed_processes_fails_and_names_the_checkpoint(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = listed("mine", run=str(Path("runs/mine").absolute()))
    for step in (20, 40):
        checkpoint = Path(f"runs/mine/checkpoints/{step}")
        checkpoint.mkdir(parents=True)
        if step == 20:  # the other was not completed
            manifest.seal(checkpoint, step=step, leaves={}, metrics={}, ignore=[])
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process(folder, **msgspec.to_builtins(identity(supervisor.pid)))

    def killed(pid: int, number: int) -> None:
        assert (pid, number) == (supervisor.pid, signal.SIGTERM)
        end(pid, signal.SIGKILL)
        supervisor.wait()
        ended = {"phase": "stopped", "codes": [-9, -9], "pid": pid}
        (folder / "state.json").write_text(json.dumps(ended))

    end = os.kill
    monkeypatch.setattr(os, "kill", killed)
    told = run("stop mine", 1)
    assert "mine: stopped; 2 of 2 processes were killed before they had saved; run" in told
    assert "its newest checkpoint is of step 20" in told
    assert "stopped; 2 of 2 processes were killed before they had saved" in run("status mine")


HOLDS = """
import sys, time
from pathlib import Path
from systolic.runs.access import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_run_in_use_is_not_submitted(run: Callable[..., str]) -> None:
    folder = Path("runs/same").absolute()
    folder.mkdir(parents=True)
    line = "launch digits --on 2xcpu --via local --name other --run runs/same --submit"
    # Another launch, which need not hold the run yet.
    process(listed("mine", run=str(folder)))
    why = f"{folder} is in use by the launch mine; run systolic stop mine, or choose another --run"
    assert why in run(line, 1)
    process(Path("launches/mine"), started=1.0)
    words = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"{folder} is in use by another process" in run(line, 1)
        holder.kill()
    assert [one.name for one in launches()] == ["mine"]
    assert not Path("launches/other/process.json").exists()
