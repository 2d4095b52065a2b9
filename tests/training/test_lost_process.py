"""Processes of a job are killed; the launch starts all again, and the run loses at most what came after a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from systolic.artifact import Run
from systolic.launching.local import SETTINGS
from systolic.launching.supervisor import LOGS, STATE
from tests.training.children import RECIPE, ROOT, environment, finish, start
from tests.training.sessions import losses
from tests.training.test_kill import last_step

STEPS, EVERY = 400, 40
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
    """Two processes under the supervisor of ``--via local``."""
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
    reached = []
    for attempt, (number, step) in enumerate([(1, EVERY + 20), (0, 5 * EVERY + 20)]):
        while last_step(cut) < step:
            assert supervisor.poll() is None
            time.sleep(0.002)
        kill(tmp_path / "b", number, attempt)
        reached.append(last_step(cut))
        while json.loads((tmp_path / "b" / STATE).read_text())["attempt"] == attempt:
            time.sleep(0.05)
    assert supervisor.wait() == 0
    resumed = [record["resumed_from"] for record in Run.open(cut).records("start")]
    # Steps whose metrics were still on the devices when the process died have no record.
    lost = [at - (back or 0) for at, back in zip(reached, resumed[1:], strict=True)]
    assert all(0 <= each <= EVERY + 10 for each in lost), (reached, resumed)
    assert losses(whole) == losses(cut)
    assert sorted(losses(cut)) == list(range(1, STEPS + 1))
    log = (tmp_path / "b" / LOGS / "0.log").read_text()
    assert "process 1 was killed by SIGKILL" in log
    assert "process 0 was killed by SIGKILL" in log
    assert "is dead or out of reach since step" in log

    # A slice is lost for good: what is left goes on.
    more = ["--resume", str(cut), "--steps", str(STEPS + EVERY), "--json"]
    finish(start(more, environment(tmp_path / "cache")))
    last = list(Run.open(cut).records("start"))[-1]
    assert (last["num_devices"], last["resumed_from"]) == (1, STEPS)
    assert sorted(losses(cut)) == list(range(1, STEPS + EVERY + 1))
