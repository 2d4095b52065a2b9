"""What ``systolic status``, ``stop`` and ``logs`` report about launches that are not plainly running."""

import json
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.launching.supervisor import BOOT, identity
from systolic.session.launched import launches
from tests.launching.gcloud import gcloud
from tests.launching.made import executable, listed


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


def process(folder: Path, **fields: Any) -> None:
    """Writes that a launch is this process, or with other fields another one."""
    (folder / "process.json").write_text(json.dumps(identity(os.getpid()) | fields))


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
    (folder / "state.json").write_text(json.dumps({"phase": "running", **identity(os.getpid())}))
    assert f"mine on 2xcpu via local: {name}" in run("status mine")


def test_a_record_without_a_host_is_of_this_one(run: Callable[..., str]) -> None:
    folder = listed("mine")
    mine = identity(os.getpid())
    (folder / "process.json").write_text(json.dumps({"pid": mine["pid"], "started": 1.0}))
    assert "mine on 2xcpu via local: lost" in run("status mine")
    assert "mine: not running (lost)" in run("stop mine")


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


BUILD_FAILS = """#!{python}
import pathlib, sys
if sys.argv[1] == "build":
    sys.exit("ERROR: failed to solve: process \"/bin/sh -c pip install\" did not complete successfully: exit code: 1")
if pathlib.Path(__file__).with_name("gone").exists():
    sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
"""


def test_a_submission_that_failed_is_recorded_and_cleared(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = executable(tmp_path / "bin" / "docker", BUILD_FAILS)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    line = "launch digits --on 8xcpu --via docker --name box"
    assert "docker build" in run(f"{line} --submit", 1)
    docker.with_name("gone").touch()
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
