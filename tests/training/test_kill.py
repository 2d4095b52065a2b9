"""A run that is killed at any moment and resumed gives, bit for bit, the losses of the run that was not."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from systolic.runs import Run
from tests.training.children import RECIPE, ROOT, environment, finish, start
from tests.training.sessions import evaluations, losses

Process = subprocess.Popen[str]

KILLS = 20
STEPS = 600
OPTIONS = [RECIPE, "--steps", str(STEPS), "--checkpoints.every", "20", "--evaluation.every", "50"]


def resume_or_start(run: Path, environ: dict[str, str]) -> Process:
    if (run / "job.json").exists():
        return start(["--resume", str(run), "--json"], environ)
    # Killed before the run was a run: what is there goes, as a person would do it.
    shutil.rmtree(run, ignore_errors=True)
    return start([*OPTIONS, "--run", str(run), "--json"], environ)


def last_step(run: Path) -> int:
    """Of the newest line of the log, which another process is writing."""
    log = run / "metrics.jsonl"
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        found = re.findall(rb'"step": (\d+)', file.read())
    return int(found[-1]) if found else 0


def wait_for_step(process: Process, run: Path, step: int) -> None:
    while process.poll() is None and last_step(run) < step:
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path: Path):
    environ = environment(tmp_path / "cache")
    finish(start([*OPTIONS, "--run", str(tmp_path / "whole"), "--json"], environ))
    run, moments, stages = tmp_path / "cut", random.Random(20), []
    for number in range(KILLS):
        process = resume_or_start(run, environ)
        if number % 4:
            # Among them the save and the evaluation that follow a step.
            wait_for_step(process, run, max(stages, default=0) + moments.randint(1, 45))
            time.sleep(moments.uniform(0.0, 0.1))
        else:
            time.sleep(moments.uniform(0.1, 3.0))
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        process.communicate()
        stages.append(last_step(run))
    assert len(set(stages)) > 10, stages
    finish(resume_or_start(run, environ))
    resumed = [r["resumed_from"] for r in Run.open(run).records("start")]
    assert len(set(resumed)) > 5, resumed
    whole, cut = losses(tmp_path / "whole"), losses(run)
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert whole == cut
    assert evaluations(tmp_path / "whole") == evaluations(run)
    assert not list((run / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_killed_in_each_phase_in_one_and_in_two_processes(tmp_path: Path):
    """A sample of benchmarks/kills.py: a kill in each phase alone, three in pairs."""
    command = [sys.executable, "benchmarks/kills.py", str(tmp_path), "--kills", "6", "--pairs", "3"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| all | 6 | 3 | 9 of 9 |" in done.stdout


def test_the_table_of_kills_counts_what_was_not_the_same():
    spec = spec_from_file_location("kills", ROOT / "benchmarks" / "kills.py")
    assert spec is not None
    assert spec.loader is not None
    kills = module_from_spec(spec)
    sys.modules["kills"] = kills
    spec.loader.exec_module(kills)
    runs = [
        {"processes": 1, "run": 0, "phases": ["step", "save", "step"], "wrong": []},
        {"processes": 2, "run": 0, "phases": ["save", "start"], "wrong": ["state"]},
    ]
    lines = kills.table(runs).splitlines()
    assert "| step | 2 | 0 | 2 of 2 |" in lines
    assert "| save | 1 | 1 | 1 of 2 |" in lines
    assert "| all | 3 | 2 | 3 of 5 |" in lines
    assert lines[-1] == "2-0: state"
