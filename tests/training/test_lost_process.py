"""Killed processes of a job: the launch restarts all, and the run loses at most the steps since a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from systolic.chips import slice
from systolic.launching import Launch, prepare
from systolic.launching.local import SETTINGS
from systolic.launching.supervisor import LOGS, STATE
from systolic.runs import CheckpointStore, Run
from systolic.runs.access import Access
from tests.training.children import RECIPE, ROOT, environment, finish, start
from tests.training.sessions import evaluations, losses
from tests.training.test_kill import last_step

STEPS, EVERY = 400, 40
BY_ROWS = f"{RECIPE.partition(':')[0]}:row_by_row"
SELDOM = [
    *("--checkpoints.every", "50", "--evaluation.every", "150"),
    *("--log-every", "1", "--diagnose", "0"),
]
HOST = """
import os, pathlib, sys
down = pathlib.Path(sys.argv[1]) / "down"
if down.exists() and os.environ.get("JAX_PROCESS_ID") == "1":
    os.kill(os.getpid(), 9)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
"""
"""Host simulated by a process, which runs the command unless the host is down."""
OPTIONS = [
    RECIPE,
    "--checkpoints.every",
    str(EVERY),
    "--evaluation.every",
    "200",
    "--log-every",
    "1",
]


def launched(folder: Path, run: Path, steps: int) -> "subprocess.Popen[bytes]":
    """Starts two processes under the supervisor of ``--via local``."""
    folder.mkdir()
    command = [
        "systolic",
        "train",
        *OPTIONS,
        "--steps",
        str(steps),
        "--run",
        str(run),
        "--continue",
    ]
    settings = {
        "made_by": ["systolic", "launch"],
        "command": command,
        "directory": str(ROOT),
        "processes": 2,
        "devices": 1,
        "restarts": 4,
    }
    (folder / SETTINGS).write_text(json.dumps(settings))
    module = [sys.executable, "-m", "systolic.launching.supervisor", str(folder)]
    return subprocess.Popen(module, cwd=ROOT, env=environment(folder.parent / "cache"))


def checkpointed(run: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    folder = run / "checkpoints"
    return CheckpointStore(folder, access=Access.read).latest_step() or 0 if folder.is_dir() else 0


def kill(folder: Path, number: int, attempt: int) -> None:
    """Kills a process of an attempt."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    assert state["attempt"] == attempt
    os.kill(state["running"][number]["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_kill_costs_one_interval_at_most_and_fewer_processes_go_on(tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launched(tmp_path / "a", whole, STEPS).wait() == 0
    supervisor = launched(tmp_path / "b", cut, STEPS)
    reached, kept = [], []
    for attempt, (number, step) in enumerate([(1, EVERY + 20), (0, 5 * EVERY + 20)]):
        while last_step(cut) < step:
            assert supervisor.poll() is None
            time.sleep(0.002)
        kept.append(checkpointed(cut))
        kill(tmp_path / "b", number, attempt)
        reached.append(last_step(cut))
        while json.loads((tmp_path / "b" / STATE).read_text())["attempt"] == attempt:
            time.sleep(0.05)
    assert supervisor.wait() == 0
    resumed = [record["resumed_from"] for record in Run.open(cut).records("start")]
    # Steps whose metrics were still on the devices at the kill have no record.
    for at, complete, back in zip(reached, kept, resumed[1:], strict=True):
        assert back >= complete, "every complete checkpoint is used"
        # A checkpoint still being written at the kill is lost, and the next one waits for it.
        being_written = at // EVERY * EVERY > complete
        assert 0 <= at - back <= (2 if being_written else 1) * EVERY + 10, (reached, kept, resumed)
    assert losses(whole) == losses(cut)
    assert sorted(losses(cut)) == list(range(1, STEPS + 1))
    log = (tmp_path / "b" / LOGS / "0.log").read_text()
    assert "process 1 was killed by SIGKILL" in log
    assert "process 0 was killed by SIGKILL" in log
    assert "is dead or unreachable (last heartbeat at step" in log

    # One process is lost for good; the other continues.
    more = ["--resume", str(cut), "--steps", str(STEPS + EVERY), "--json"]
    finish(start(more, environment(tmp_path / "cache")))
    last = list(Run.open(cut).records("start"))[-1]
    assert (last["num_devices"], last["resumed_from"]) == (1, STEPS)
    assert sorted(losses(cut)) == list(range(1, STEPS + EVERY + 1))


def on_two_slices(folder: Path, run: Path, steps: int) -> "subprocess.Popen[bytes]":
    """Starts what ``systolic launch --on 2xv5e-1 --via local --min-slices 1`` does, with hosts that can be down."""
    folder.mkdir(exist_ok=True)
    made = Launch(
        name="tiny",
        on=slice("2xv5e-1"),
        target=BY_ROWS,
        options=("--steps", str(steps), *SELDOM),
        made_by=("systolic", "launch"),
        run=str(run),
        directory=str(ROOT),
        min_slices=1,
        rejoin_seconds=2,
    )
    settings = json.loads(prepare("local", made).files[SETTINGS])
    settings["command"] = [sys.executable, "-c", HOST, str(folder), *settings["command"]]
    (folder / SETTINGS).write_text(json.dumps(settings))
    module = [sys.executable, "-m", "systolic.launching.supervisor", str(folder)]
    return subprocess.Popen(module, cwd=ROOT, env=environment(folder.parent / "cache"))


@pytest.mark.slow
def test_a_run_goes_on_without_a_slice_that_does_not_come_back(tmp_path: Path):
    steps, whole, cut, folder = 300, tmp_path / "whole", tmp_path / "cut", tmp_path / "b"
    alone = [BY_ROWS, "--steps", str(steps), *SELDOM, "--run", str(whole), "--json"]
    finish(start(alone, environment(tmp_path / "cache", 2)))
    supervisor = on_two_slices(folder, cut, steps)
    # A checkpoint that is still being written at the kill does not count.
    while last_step(cut) < 60 or checkpointed(cut) < 50:
        assert supervisor.poll() is None, (folder / LOGS / "0.log").read_text()
        time.sleep(0.002)
    (folder / "down").touch()
    kill(folder, 1, 0)
    assert supervisor.wait() == 0, (folder / LOGS / "0.log").read_text()
    state = json.loads((folder / STATE).read_text())
    assert (state["left_out"], state["processes"]) == ([1], 1)
    log = (folder / LOGS / "0.log").read_text()
    assert "slice 1 has not come back in 2 s; the run continues with 1 of 2 slices" in log
    says = "1 of 2 devices are here: batch 16 as before, passes a step 2 (was 1), fsdp 1 (was 2)"
    assert says in log

    first, second = Run.open(cut).records("start")
    assert (first["num_devices"], second["num_devices"]) == (2, 1)
    assert 50 <= second["resumed_from"] < steps
    assert (first["batch"], second["batch"]) == (16, 16)
    # The rows of each step are the same, but sums over passes and over devices differ in order.
    assert sorted(losses(cut)) == list(range(1, steps + 1))
    for step, values in losses(whole).items():
        assert losses(cut)[step] == pytest.approx(values, rel=1e-4), step
    for key, values in evaluations(whole).items():
        assert evaluations(cut)[key] == pytest.approx(values, rel=1e-4), key

    # The host is back, and the launch is rerun.
    (folder / "down").unlink()
    assert on_two_slices(folder, cut, steps + 10).wait() == 0
    last = list(Run.open(cut).records("start"))[-1]
    assert (last["num_devices"], last["batch"], last["resumed_from"]) == (2, 16, steps)
    assert last["layout"] == first["layout"]
