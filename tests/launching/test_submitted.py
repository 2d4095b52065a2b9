"""Submitted launches: state, logs and stop, with stand-ins for kubectl and gcloud."""

import datetime
import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from systolic.cli.main import main
from systolic.launching import lifecycle
from systolic.launching import state as launch_state
from systolic.launching.record import launches
from systolic.launching.state import LaunchCost, cost, phase
from tests.launching.gcloud import ANSWERS, gcloud
from tests.launching.kubectl import stand_in
from tests.launching.made import executable

GKE = "launch digits --via gke --image registry/systolic:1 --run gs://bucket/digits --on v5e-16 --submit"
TPU = "launch digits --via tpu-vm --run gs://bucket/digits --on v5e-16 --zone us-east5-b --submit"
SERVE = "launch serve gs://bucket/chat --via gke --image registry/chat:1 --submit"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SYSTOLIC_WAIT_SECONDS", "0.05")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def told(line: str, code: int = 0) -> str:
        given = main(shlex.split(line))
        out, err = capfd.readouterr()
        assert given == code, err
        return out + err

    return told


def test_the_client_submits_reports_and_stops(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine", "other")
    run(f"{GKE} --namespace ml")
    # Another cluster is now the default.
    (clusters / "current").write_text("other")
    run("status digits-v5e-16")
    assert "step 10" in run("logs digits-v5e-16")
    # It may have ended, which this machine does not see.
    told = run("runs")
    assert "  ≤ 0.0" in told
    # In the notation of UTC.
    assert re.search(r"submitted  \d{4}-\d\d-\d\dT[\d:]{8}Z  ", told)
    run("logs -f digits-v5e-16")
    assert "digits-v5e-16: stopped" in run("stop digits-v5e-16")
    calls = (clusters / "calls").read_text().splitlines()
    assert calls[2] == "apply --namespace ml --filename jobset.yaml --context=mine"
    words = ["config", "get", "apply", "get", "logs", "logs", "delete"]
    assert [line.split()[0] for line in calls] == words
    assert all(line.endswith("--context=mine") for line in calls[1:])
    assert "--follow" in calls[5]
    assert not (clusters / "mine" / "jobset").exists()
    assert "digits-v5e-16  gke  v5e-16  stopped" in run("runs")
    told = run("status digits-v5e-16")
    assert "$0.0" in told
    assert "h from submit to stop at $19.20; an estimate" in told
    (clusters / "down").touch()
    assert "configmap" not in (told := run("stop digits-v5e-16", 1))
    assert "was refused" in told
    assert "kubectl delete jobset --namespace ml --selector" in told


def test_the_same_command_continues_what_has_ended(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine", "other")
    jobset = clusters / "mine" / "jobset"
    run(GKE)
    first = jobset.read_text()
    assert "is running or pending (--context=mine --namespace=default); stop it with" in run(GKE, 1)
    jobset.write_text(f"{first}Failed")
    assert "JobSet digits-v5e-16 has ended; deleting it" in run(GKE)
    # A new one of the same launch.
    assert jobset.read_text() == first
    (clusters / "current").write_text("other")
    told = run(GKE, 1)
    assert (
        "submitted with --context=mine --namespace=default, but the defaults are now --context=other "
        in told
    )
    run("stop digits-v5e-16")
    run(GKE)
    assert (clusters / "other" / "jobset").read_text() == first
    # The cost of the first two is kept; a refused submission has none.
    assert "h in 2 earlier submissions; an estimate" in run("status digits-v5e-16")


def test_a_launch_stays_in_the_namespace_that_it_was_submitted_in(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    for line, kind, name in ((GKE, "jobset", "digits-v5e-16"), (SERVE, "deployment", "chat-v5e-8")):
        (clusters / "mine" / "team-b").mkdir(exist_ok=True)
        run(line)
        # As kubens does.
        (clusters / "namespace").write_text("team-b")
        told = run(line, 1)
        assert (
            "mine --namespace=default, but the defaults are now --context=mine --namespace=team-b"
            in told
        )
        assert f"{name}: stopped" in run(f"stop {name}")
        assert not (clusters / "mine" / kind).exists()
        run(line)
        assert (clusters / "mine" / "team-b" / kind).exists()
        (clusters / "namespace").unlink()
        assert f"{name}: stopped" in run(f"stop {name}")
        assert not (clusters / "mine" / "team-b" / kind).exists()


SKY = """#!{python}
import os, pathlib, sys
place = pathlib.Path(__file__).parent
words = sys.argv[1:]
jobs = [line.split() for line in (place / "jobs").read_text().splitlines()]
name = words[words.index("--name") + 1] if "--name" in words else ""
if (place / "error").exists():
    sys.exit("sky.exceptions.ClusterNotUpError: " + (place / "error").read_text())
if words[:2] == ["jobs", "queue"]:
    shown = [job for job in jobs if job[1] != "ended" or "--skip-finished" not in words]
    print('[\\n' + ',\\n'.join('  {\\n    "job_id": 1,\\n    "job_name": "%s"\\n  }' % job[0] for job in shown) + '\\n]')
elif words[:2] == ["jobs", "launch"]:
    with (place / "jobs").open("a") as out:
        out.write(name + " PENDING\\n")
elif words[:2] == ["jobs", "cancel"]:
    found = [job for job in jobs if job == [name, "PENDING"]]
    if len(found) > 1:
        print("\\x1b[31mMultiple running jobs found with name '%s'.\\nJob IDs: [2, 1]\\x1b[0m" % name)
    elif found:
        print("'%s' Job with ID 3 is scheduled to be cancelled." % name)
    else:
        print("No running job found with name '%s'." % name)
"""
"""Stand-in with the answers of SkyPilot 0.14.1's server and client, which exits with 0 except for errors."""


@pytest.mark.slow
def test_skypilots_job_is_this_launchs_and_is_stopped_only_where_skypilot_says_so(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = executable(tmp_path / "bin" / "sky", SKY).parent
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    jobs = folder / "jobs"
    # Another user's job of that name.
    jobs.write_text("digits-v5e-16 PENDING\n")
    line = "launch digits --via skypilot --run gs://bucket/digits --on v5e-16 --submit"
    # If no job ever ran, there is no controller.
    (folder / "error").write_text("No in-progress managed jobs.")
    assert "jobs launch" in run(line, 1)
    (folder / "error").unlink()
    run(line)
    (other, mine) = (job.split()[0] for job in jobs.read_text().splitlines())
    assert mine.startswith(f"{other}-")
    assert (
        f"the managed job {mine} has not ended; cancel it with systolic stop digits-v5e-16"
        in run(line, 1)
    )
    assert len(jobs.read_text().splitlines()) == 2
    # Submitted by hand.
    jobs.write_text(f"{mine} PENDING\n" * 2)
    told = run("stop digits-v5e-16", 1)
    assert "Multiple running jobs found with name" in told
    assert "SkyPilot has cancelled nothing" in told
    (folder / "error").write_text("No in-progress managed jobs.")
    assert "SkyPilot has cancelled nothing" in run("stop digits-v5e-16", 1)
    (folder / "error").unlink()
    jobs.write_text(f"{other} PENDING\n")
    assert "sky api info" in run("stop digits-v5e-16", 1)
    assert state() == "submitted"
    jobs.write_text(f"{mine} PENDING\n")
    assert "digits-v5e-16: stopped" in run("stop digits-v5e-16")
    assert state() == "stopped"
    jobs.write_text(f"{mine} ended\n")
    assert "digits-v5e-16: already gone, nothing to stop" in run("stop digits-v5e-16")
    run(line)


def test_a_stop_that_finds_nothing_says_so(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    run(GKE)
    (clusters / "mine" / "jobset").write_text("ffff0000,")
    assert "already gone, nothing to stop (--context=mine --namespace=default)" in run(
        "stop digits-v5e-16"
    )
    assert (clusters / "mine" / "jobset").exists()
    run(SERVE)
    assert "chat-v5e-8: stopped" in run("stop chat-v5e-8")
    run(SERVE)
    (clusters / "mine" / "deployment").unlink()
    assert "already gone" in run("stop chat-v5e-8")
    # Applied by hand, in a context that was not recorded.
    record = Path("launches/digits-v5e-16/launch.json")
    told = json.loads(record.read_text())
    words = [told["commands"]["stop"][0][:-2]]
    told |= {"place": "", "stopped": None, "commands": {**told["commands"], "stop": words}}
    record.write_text(json.dumps(told))
    (clusters / "bin" / "kubectl").write_text("#!/bin/sh\necho No resources found\n")
    assert "with kubectl config use-context CONTEXT" in run("stop digits-v5e-16", 1)
    assert json.loads(record.read_text())["stopped"] is None


def test_a_server_of_another_is_neither_replaced_nor_deleted(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    for kind in ("deployment", "networkpolicy"):
        other = clusters / "mine" / kind
        # By hand, without a label, or by a launch of another folder.
        for label in ("", "ffff0000"):
            other.write_text(label)
            assert (
                f"{kind} chat-v5e-8 exists (--context=mine --namespace=default) but is not from this launch"
                in run(SERVE, 1)
            )
            assert other.read_text() == label
        other.unlink()
    assert launches() == []
    run(SERVE)
    # Its own objects are updated, and keep their price until then; another's, created since, stay at the stop.
    record = Path("launches/chat-v5e-8/launch.json")
    begun = "2026-11-01T00:00:00+00:00"
    record.write_text(json.dumps({**json.loads(record.read_text()), "submitted": begun}))
    monkeypatch.setattr(lifecycle, "utc_now", lambda: "2026-11-05T04:00:00+00:00")
    run(f"{SERVE} --on v5e-1 --spot --name chat-v5e-8 --max-replicas 2")
    (served,) = launches()
    used = cost(served, datetime.datetime(2026, 11, 5, 14, tzinfo=datetime.UTC).timestamp())
    assert used is not None
    # 100 h of one to four pods at $9.60, then 10 h of one to two at $0.298.
    (first,) = used.earlier
    assert (first.usd, first.usd_most, first.at_most) == pytest.approx((960.0, 3840.0, False))
    assert used.usd == pytest.approx(962.98, abs=0.02)
    assert used.usd_most == pytest.approx(3845.96, abs=0.04)
    deployment = clusters / "mine" / "deployment"
    deployment.write_text("ffff0000")
    assert "already gone" in run("stop chat-v5e-8")
    assert deployment.exists()


def test_the_bound_of_a_servers_cost_is_that_of_its_most_pods(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "mine")
    run(SERVE)
    (used,) = json.loads(run("runs --json"))["runs"]
    assert used["used_at_most"]
    hour = LaunchCost(hours=1.0, usd_per_hour=9.6, usd_per_hour_most=38.4, since="", at_most=True)
    monkeypatch.setattr(launch_state, "cost", lambda *_: hour)
    assert "  ≤ 38.40  " in run("runs")


def test_a_server_that_was_applied_in_part_is_stopped(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    (clusters / "lacking").touch()
    assert "no matches for kind" in run(SERVE, 1)
    assert (clusters / "mine" / "deployment").exists()
    assert "chat-v5e-8: stopped" in run("stop chat-v5e-8")
    assert not (clusters / "mine" / "deployment").exists()


def test_files_that_are_written_again_lose_nothing_that_runs(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = stand_in(tmp_path, monkeypatch, "mine")
    line = GKE.removesuffix(" --submit")
    run(line)
    run(f"{line} --namespace ml --submit")
    (before,) = launches()
    told = run(f"{line} --namespace ml --steps 30 --spot")
    assert "submit   systolic launch digits" in told
    assert "--steps" in Path("launches/digits-v5e-16/jobset.yaml").read_text()
    # Neither does a refused submission.
    assert "is running or pending" in run(f"{line} --namespace ml --spot --submit", 1)
    assert launches() == [before]
    assert "at $19.20" in run("status digits-v5e-16")
    # Nothing is written if the launch would not be found again.
    told = run(f"{line} --spot", 1)
    assert "was submitted with --namespace ml; run systolic stop digits-v5e-16 first" in told
    run("stop digits-v5e-16")
    assert not (clusters / "mine" / "jobset").exists()
    run(f"{line} --spot")
    # Its cost so far is kept.
    assert launches()[0].stopped
    run(f"{line} --spot --submit")
    assert "at $4.77" in run("status digits-v5e-16")


def test_a_client_without_a_default_is_one_line(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch)
    assert "returned no context (error: current-context is not set); set one with gcloud" in run(
        GKE, 1
    )
    google(tmp_path, monkeypatch, "ABSENT", "0")
    assert "returned no project ((unset)); add --project PROJECT" in run(f"{TPU} --name tpu", 1)
    assert launches() == []


def google(folder: Path, monkeypatch: pytest.MonkeyPatch, states: str, codes: str) -> Path:
    client = gcloud(folder, states, codes)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    return client.parent


def state() -> str:
    (one,) = launches()
    return phase(one).name


def wait_for(ready: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "name"), [("0", "done"), ("64", "failed")])
def test_how_a_script_has_ended_is_told(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str
) -> None:
    folder = google(tmp_path, monkeypatch, "ABSENT ACTIVE", code)
    (folder / "project").write_text("mine")
    run(TPU)
    (folder / "project").write_text("other")
    wait_for(lambda: state() != "running")
    assert state() == name
    calls = (folder / "calls").read_text().splitlines()
    assert all("--project=mine" in line for line in calls)
    assert calls[-1].startswith("delete")
    assert ("its command line was rejected" in run("status digits-v5e-16")) == (code == "64")


def test_a_launch_is_not_stopped_while_nobody_knows(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = google(tmp_path, monkeypatch, "ACTIVE:ffff0000", "0")
    line = f"{TPU} --project my-project"
    assert "are not from this launch" in run(line, 1)
    assert launches() == []
    (folder / "states").write_text("ABSENT WAITING_FOR_RESOURCES")
    run(line)
    wait_for(lambda: (folder / "states").read_text() == "WAITING_FOR_RESOURCES")  # is created
    (folder / "states").write_text("EXPIRED")
    told = run("stop digits-v5e-16", 1)
    assert ANSWERS["EXPIRED"] in told
    assert "bash tpu.sh status failed with exit code 1" in told
    # It keeps waiting, since it must delete the machines at the end.
    assert state() == "running"
    (folder / "states").write_text("WAITING_FOR_RESOURCES")
    assert "digits-v5e-16: stopped" in run("stop digits-v5e-16")
    assert "delete digits-v5e-16 --force" in (folder / "calls").read_text()
    assert state() == "stopped"


SQUEUE = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
if (here / "down").exists():
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
assert sys.argv[1:4] == ["--me", "--name", "two"], sys.argv
jobs = (here / "jobs").read_text()
print(jobs if "--noheader" in sys.argv else "JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\\n" + jobs, end="")
"""
"""Stand-in with the answers of Slurm 22.05."""


def test_slurm_is_asked_whether_there_is_a_job_to_cancel(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = executable(tmp_path / "bin" / "squeue", SQUEUE).parent
    for name in ("sbatch", "scancel"):
        executable(folder / name, '#!/bin/sh\necho "$0 $*" >>"$(dirname "$0")/calls"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    line = "launch digits --via slurm --on 8xh100 --time 1:00:00 --name two --submit"
    run(line)
    jobs, calls = folder / "jobs", folder / "calls"
    jobs.write_text("1 gpu two me R 1:00 1 node-1\n")
    (folder / "down").touch()
    told = run("stop two", 1)
    assert "Unable to contact slurm controller" in told
    assert "squeue --me --name two --noheader failed with exit code 1" in told
    assert state() == "submitted"
    (folder / "down").unlink()
    assert "two: stopped" in run("stop two")
    assert calls.read_text().count("scancel --me --name two") == 2
    run(line)
    jobs.write_text("")
    assert "two: already gone, nothing to stop" in run("stop two")
    assert calls.read_text().count("scancel") == 2
