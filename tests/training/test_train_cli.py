"""``systolic train`` as a person types it: what it prints where, and its exit code."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from systolic import recipes
from systolic.cli.forms import request_for
from systolic.cli.main import VERBS, main
from systolic.job import Layout
from systolic.runs import Run
from systolic.runs.job_record import JobRecord, RunFlags
from systolic.training.resuming import OpenedRun, continued
from systolic.training.session import ReporterWatcher, SessionOptions
from tests.training.sessions import losses

RECIPE = f"{Path(__file__).with_name('tiny.py')}:job"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def ask(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
    """The view asks the process to stop at a step."""

    def see(self: ReporterWatcher, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ReporterWatcher, "see", see)


def test_from_start_over_an_interruption_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        ask(patch, signal.SIGTERM, 5)
        assert main(["train", RECIPE, "--run", str(run), "--json"]) == 143
    out, err = capsys.readouterr()
    summary = json.loads(out)
    step = summary["steps"]
    assert summary["interrupted"] == "SIGTERM"
    assert err == (
        f"systolic: stopped by SIGTERM at step {step}, which is saved; continue with systolic train --resume {run}\n"
    )
    a_refused_resume_leaves_summary_and_options(run, capsys)

    assert main(["train", "--resume", str(run)]) == 0
    out, err = capsys.readouterr()
    assert f"resumed from step {step}" in err
    assert out.startswith("tiny: trained\n")
    assert "steps       16 of 16 in " in out
    assert f"report      {run / 'report.html'}\n" in out
    assert out.endswith(f"next        systolic eval {run}\n")
    assert (run / "report.html").is_file()

    assert main(["train", "--resume", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == Run.open(run).read_summary()
    assert err == (
        f"systolic: {run} is finished at step 16; give a larger --steps to continue, or use the run: systolic eval {run}\n"
    )

    assert main(["train", "--resume", str(run), "--scale", "2.0", "--json"]) == 0
    _, err = capsys.readouterr()
    assert err.startswith(
        f"systolic: {run} is finished at step 16, so --scale 2 (was 1) is ignored; give a larger --steps"
    )
    assert main(["train", "--resume", str(run), "--steps", "20", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"systolic: {run} continues with --steps 20 (was 16)\n"
    assert json.loads(out)["steps"] == 20
    assert sorted(losses(run)) == list(range(1, 21))
    assert Run.open(run).read_job()["options"]["steps"] == 20


def a_refused_resume_leaves_summary_and_options(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.glob("*.*") if path.name != ".lock"}
    assert {path.name for path in before} >= {"job.json", "summary.json", "environment.json"}
    for options in (["--steps", "4"], ["--width", "8", "--scale", "2.0"]):
        assert main(["train", "--resume", str(run), *options]) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("systolic: ")
        now = {path: path.read_bytes() for path in run.glob("*.*") if path.name != ".lock"}
        assert now == before


def test_a_bad_step_is_one_line_its_batch_is_replayed_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    assert main(["train", RECIPE, "--run", str(run), "--spoil", "6", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("systolic: the loss of step 6 is not a number and the checkpoint of ")
    batch = run / "bad" / "step-6.npz"
    assert f"systolic train --replay {batch}" in line
    assert main(["train", "--replay", str(batch)]) == 0
    out, _ = capsys.readouterr()
    assert "with the weights of step 4" in out
    assert "  not finite: batch x\n" in out
    assert main(["train", "--resume", str(run), "--guard.rule", "skip", "--json"]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out)["bad_steps"] == 1
    assert Run.open(run).read_job()["job"]["guard"]["rule"] == "skip"


def test_a_metric_that_is_not_reported_leaves_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    assert main(["train", RECIPE, "--run", str(run), "--evaluation.metric", "speed"]) == 2
    assert capsys.readouterr().err.startswith("systolic: --evaluation.metric is 'speed', which ")
    assert not run.exists()


def test_a_run_keeps_its_batch_on_other_devices(tmp_path: Path):
    recipe = recipes.find("lm")
    layout = {"data": 1, "pipeline": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}

    saved = request_for(
        recipe, ["--resume", "run"], "train", VERBS["train"].forms[1].options.read, {}
    ).options
    saved = {**saved, "layout": Layout()}
    with Run.create(tmp_path / "run", {}) as directory:
        run = OpenedRun(
            directory=directory,
            record=JobRecord.from_json({"layout": layout}),
            recipe=recipe,
            saved=saved,
        )
    flags = RunFlags(given="", chip=None, compiler=())

    def batch(*args: str) -> int:
        asked = request_for(
            recipe, ["--resume", "run", *args], "train", VERBS["train"].forms[1].options.read, saved
        )
        job, record = continued(run, run.source(asked.options), SessionOptions(), flags)
        assert record.layout == (layout if job.batch.total else job.layout.mesh_shape)
        return job.batch.resolve(job.layout.on(1))

    assert batch() == 64, "8 for each of the 8 devices that it began on"
    assert batch("--batch-per-device", "4") == 4, "what is asked for counts"
