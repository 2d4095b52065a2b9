"""A run resumes with another number of devices, and in several processes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from systolic.runs import Run
from tests.training.children import RECIPE, environment, finish, start, together
from tests.training.sessions import losses
from tests.training.test_kept import SIZES


def assert_close(one: Path, other: Path) -> None:
    left, right = losses(one), losses(other)
    assert sorted(left) == sorted(right)
    for step, values in left.items():
        assert right[step] == pytest.approx(values, rel=1e-4), step


@pytest.mark.slow
def test_resumes_on_other_numbers_of_devices(tmp_path: Path):
    run = tmp_path / "run"
    environ = {n: environment(tmp_path / "cache", n) for n in (8, 2, 1)}
    whole = [RECIPE, "--steps", "12", "--json"]
    finish(start([*whole, "--run", str(tmp_path / "whole")], environ[8]))
    part = [RECIPE, "--steps", "12", "--halt-at", "4", "--json"]
    finish(start([*part, "--run", str(run)], environ[8]), 143)
    finish(start(["--resume", str(run), "--halt-at", "8", "--json"], environ[2]), 143)
    finish(start(["--resume", str(run), "--halt-at", "0", "--json"], environ[1]))
    starts = list(Run.open(run).records("start"))
    assert [record["num_devices"] for record in starts] == [8, 2, 1]
    assert [record["devices"] for record in starts] == ["8 x cpu", "2 x cpu", "1 x cpu"]
    assert_close(tmp_path / "whole", run)


def two_processes(args: list[str], cache: Path, code: int = 0) -> list[str]:
    """What each prints."""
    return together(["systolic", "train", *args], environment(cache, 2), 2, code)


@pytest.mark.slow
def test_two_processes_train_one_run(tmp_path: Path):
    run, cache = tmp_path / "two", tmp_path / "cache"
    finish(start([RECIPE, "--run", str(tmp_path / "one"), "--json"], environment(cache, 4)))
    first = two_processes([RECIPE, "--halt-at", "5", "--run", str(run), "--json"], cache, 143)
    stopped = json.loads(first[0])["steps"]
    assert 1 < stopped < 16, "where the processes next ask each other"
    assert first[1] == "", "only the first process speaks"
    last = two_processes(["--resume", str(run), "--halt-at", "0", "--json"], cache)
    assert json.loads(last[0])["steps"] == 16
    assert [r["resumed_from"] for r in Run.open(run).records("start")] == [None, stopped]
    assert_close(tmp_path / "one", run)
    assert not (run / "bad").exists()


@pytest.mark.slow
def test_two_processes_keep_one_bad_batch(tmp_path: Path):
    run = tmp_path / "run"
    two_processes([RECIPE, "--spoil", "6", "--run", str(run)], tmp_path / "cache", 1)
    with np.load(run / "bad" / "step-6.npz") as batch:
        assert batch["x"].shape == (16, 8), "the parts of both"
        assert np.isnan(batch["x"]).all()


@pytest.mark.slow
def test_two_processes_leave_a_long_last_evaluation(tmp_path: Path):
    """Both leave it at the batch at which they agree, with the last step saved before."""
    run, cache = tmp_path / "two", tmp_path / "cache"
    options = [RECIPE, "--batch", "4", "--steps", "6", "--evaluation.every", "0", "--json"]
    halted = [*options, "--halt-evaluation-at", "3", "--run", str(run)]
    first = two_processes(halted, cache, 143)
    assert json.loads(first[0])["interrupted"] == "SIGTERM"
    assert json.loads(first[0])["final"]["metrics"] == {}
    assert (run / "checkpoints" / "6" / "manifest.json").is_file()
    last = two_processes(["--resume", str(run), "--halt-evaluation-at", "0", "--json"], cache)
    whole = two_processes([*options, "--run", str(tmp_path / "whole")], cache)
    assert json.loads(last[0])["final"] == json.loads(whole[0])["final"]
    assert losses(tmp_path / "whole") == losses(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(["--halt-at", "5"], id="in a step"),
        # The last step's batch, after which nobody asks before the evaluation.
        pytest.param(["--halt-at", "16"], id="before the last evaluation"),
        pytest.param(
            ["--halt-evaluation-at", "1", "--evaluation.every", "0"], id="in the last evaluation"
        ),
        pytest.param(
            ["--halt-evaluation-at", "2", "--evaluation.every", "4"], id="in an evaluation"
        ),
    ],
)
def test_a_signal_to_one_process_stops_both_at_one_step(tmp_path: Path, moment: list[str]):
    run, cache = tmp_path / "run", tmp_path / "cache"
    told = two_processes(
        [RECIPE, "--halt-in", "1", *moment, "--run", str(run), "--json"], cache, 143
    )
    summary = json.loads(told[0])
    assert summary["interrupted"] == "SIGTERM"
    assert summary["checkpoint"].endswith(f"/{summary['steps']}")
    last = two_processes(
        ["--resume", str(run), "--halt-at", "0", "--halt-evaluation-at", "0", "--json"], cache
    )
    assert json.loads(last[0])["steps"] == 16
    finish(start([RECIPE, "--run", str(tmp_path / "one"), "--json"], environment(cache, 4)))
    assert_close(tmp_path / "one", run)


@pytest.mark.slow
def test_one_process_trains_the_text_of_two(tmp_path: Path):
    """With the rows of both from the first step, and from a checkpoint of both."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        lines = (f"{number} {line} {'x' * (line % 60)}\n" for line in range(200))
        (text / f"{number}.txt").write_text("".join(lines))
    recipe = ["lm", "--path", str(text), *SIZES]
    environ, runs = environment(tmp_path / "cache"), tmp_path / "runs"

    def train(args: list[str], run: str, count: int) -> None:
        command = [*args, "--json"] if args[0] == "--resume" else [*args, "--run", str(runs / run)]
        if count == 1:
            finish(start([*command, "--for-devices", "2"], environ))
        else:
            together(["systolic", "train", *command], environ, count)

    train(recipe, "two", 2)
    train(recipe, "one", 1)
    assert_close(runs / "two", runs / "one")
    shutil.copytree(runs / "two", runs / "moved")
    train(["--resume", str(runs / "two"), "--steps", "6"], "", 2)
    train(["--resume", str(runs / "moved"), "--steps", "6"], "", 1)
    assert_close(runs / "two", runs / "moved")
    assert len(losses(runs / "moved")) == 6
