"""A run that is killed at any moment and resumed gives, bit for bit, the losses of the run that was not."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from systolic.artifact import Run
from tests.train.children import RECIPE, environment, finish, start
from tests.train.sessions import evaluations, losses

Process = subprocess.Popen[str]

KILLS = 20
STEPS = 600
OPTIONS = [RECIPE, "--steps", str(STEPS), "--checkpoints.every", "25", "--evaluation.every", "60"]


def resume_or_start(run: Path, environ: dict[str, str]) -> Process:
    if (run / "job.json").exists():
        return start(["--resume", str(run), "--json"], environ)
    # Killed before the run was a run: what is there goes, as a person would do it.
    shutil.rmtree(run, ignore_errors=True)
    return start([*OPTIONS, "--run", str(run), "--json"], environ)


def sessions(run: Path) -> int:
    """Sessions that have come to train: each has a record of its own before the first step."""
    return sum(1 for _ in Run.open(run).records("start")) if (run / "job.json").exists() else 0


def wait_until_it_trains(process: Process, run: Path, before: int) -> None:
    while process.poll() is None and sessions(run) == before:
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path):
    environ = environment(tmp_path / "cache")
    finish(start([*OPTIONS, "--run", str(tmp_path / "whole"), "--json"], environ))
    run, moments, stages = tmp_path / "cut", random.Random(20), []
    for number in range(KILLS):
        before = sessions(run)
        process = resume_or_start(run, environ)
        if number % 4:
            # Steps, saves and evaluations follow each other every few hundredths of a second.
            wait_until_it_trains(process, run, before)
            time.sleep(moments.uniform(0.0, 1.0))
        else:
            time.sleep(moments.uniform(0.1, 4.0))
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        stages.append(max(losses(run), default=0) if sessions(run) else 0)
    assert len(set(stages)) > 5, stages
    finish(resume_or_start(run, environ))
    resumed = [r["resumed_from"] for r in Run.open(run).records("start")]
    assert len(set(resumed)) > 5, resumed
    whole, cut = losses(tmp_path / "whole"), losses(run)
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert whole == cut
    assert evaluations(tmp_path / "whole") == evaluations(run)
    assert not list((run / "checkpoints").glob("*tmp*"))
