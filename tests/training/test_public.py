"""``systolic.train`` and ``systolic.resume``: the command line's words from Python, values in and out."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import systolic
from systolic import recipes
from systolic.cli.main import main
from systolic.core.errors import NotFoundError, OptionError, RunError, TakenError
from systolic.core.files import write_json
from systolic.core.reporter import Reporter, reporting
from systolic.data.text.documents import StandardLibrary
from systolic.job import Job, Layout, Mode, Precision, Schedule
from systolic.job.optimizer import Shortened
from systolic.recipes.digits import MODELS, DigitsModel
from systolic.recipes.jobs import candidate_of, source_of, with_plan
from systolic.runs import Run
from systolic.runs.job_record import job_from_json, types_of
from systolic.runs.plan_choice import StepTime, read
from systolic.setup import set_up
from systolic.training.session import Audience
from tests.formats.outlines import outline
from tests.planning import fabricated
from tests.training import tiny, train_child
from tests.training.children import ROOT, environment
from tests.training.sessions import Collect, assert_same, losses

RECIPE = f"{Path(tiny.__file__)}:job"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


class Told(Reporter):
    """Keeps warnings."""

    def __init__(self, lines: list[str], *, shows_events: bool = False) -> None:
        self.lines, self.shows_events = lines, shows_events

    def warn(self, text: str) -> None:
        self.lines.append(text)


class StopAt:
    """Asks the process to stop when a step is on record."""

    closed = 0

    def __init__(self, step: int) -> None:
        self.step = step

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.slow
def test_killed_in_python_and_resumed_in_python_and_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train_child.job()
    whole = systolic.train(job, on="cpu", run=tmp_path / "whole")
    assert (whole.run, whole.trained, whole.interrupted) == (tmp_path / "whole", True, None)
    cut = tmp_path / "cut"
    child = [sys.executable, "-m", "tests.training.train_child", str(cut), "8"]
    done = subprocess.run(child, cwd=ROOT, env=environment(tmp_path / "cache"), check=False)
    assert done.returncode == -signal.SIGKILL
    assert max(losses(cut)) == 8
    typed = shutil.copytree(cut, tmp_path / "typed")
    capsys.readouterr()

    result = systolic.resume(cut)
    assert capsys.readouterr() == ("", "")
    assert result.summary["steps"] == 12
    setup = set_up(job)
    assert_same(setup, tmp_path / "whole", cut)

    assert main(["train", "--resume", str(typed), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["final"]["metrics"] == result.summary["final"]["metrics"]
    assert err == ""
    assert_same(setup, tmp_path / "whole", typed)

    again = systolic.resume(cut)
    assert (again.trained, again.summary["steps"]) == (False, 12)
    assert "is finished at step 12" in again.warnings[0]
    assert main(["train", "--resume", str(typed), "--steps", "14", "--json"]) == 0
    assert sorted(losses(typed)) == list(range(1, 15))
    assert systolic.open(cut).step == 12


def test_a_recipe_takes_options_and_is_interrupted_and_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, stop, told = tmp_path / "run", StopAt(5), Collect()
    first = systolic.train(RECIPE, run=run, steps=12, width=8, watchers=[stop, told])
    assert first.interrupted == "SIGTERM"
    assert first.summary["checkpoint"] is not None
    assert stop.closed == 1
    assert {record["kind"] for record in told.records} >= {"start", "train", "event"}
    second = systolic.resume(run, scale=2.0)
    assert (second.interrupted, second.summary["steps"]) == (None, 12)
    assert second.warnings == (f"{run} continues with --scale 2 (was 1)",)
    record = Run.open(run).read_job()
    assert (record["recipe"], record["options"]["width"], record["options"]["scale"]) == (
        RECIPE,
        8,
        2.0,
    )
    out, err = capfd.readouterr()
    # What a signal's handler says on its own is not the session's.
    assert out == ""
    assert [
        line for line in err.splitlines() if line and "stopping after this step" not in line
    ] == []


@pytest.mark.slow
def test_types_of_a_user_are_asked_for_again(tmp_path: Path) -> None:
    run, job = tmp_path / "run", tiny.job(steps=8)
    systolic.train(job, run=run, watchers=[StopAt(4)])
    for resume in (lambda: systolic.resume(run), lambda: systolic.open(run)):
        with pytest.raises(
            RunError, match=r"is tests\.training\.tiny\.Perceptron.*resume\('.*', job=…\)"
        ):
            resume()
    with pytest.raises(RunError, match="is of another model"):
        systolic.resume(run, tiny.job(steps=8, width=24))
    assert systolic.resume(run, tiny.job(steps=8)).summary["steps"] == 8
    assert systolic.open(run, job=tiny.job(steps=8)).step == 8
    more = systolic.resume(run, tiny.job(steps=10))
    assert more.warnings == (f"{run} continues with --steps 10 (was 8)",)
    assert sorted(losses(run)) == list(range(1, 11))


def test_the_slice_that_is_expected(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"on is v5e-4 \(4 x TPU v5 lite\) and this machine has 1 x cpu"
    ):
        systolic.train(tiny.job(), on="v5e-4", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_slice_that_is_expected_of_a_run_that_has_begun(tmp_path: Path) -> None:
    recipe, run = f"{Path(tiny.__file__)}:job", tmp_path / "run"
    systolic.train(recipe, run=run, steps=2)
    with pytest.raises(RunError, match=r"on is v5e-4"):
        systolic.train(recipe, on="v5e-4", run=run, continue_=True, steps=4)
    assert sorted(losses(run)) == [1, 2]


def test_a_plan_is_a_value_or_a_file(tmp_path: Path) -> None:
    made, path, warnings = fabricated.plan(), tmp_path / "plan.json", []
    write_json(path, made.to_json())
    for number in (1, 2):
        assert replace(candidate_of(made, number), path=str(path)) == read(path, number)
    with pytest.raises(OptionError, match="candidate is 9 and plan has 5; give 1 to 5"):
        candidate_of(made, 9)
    with pytest.raises(OptionError, match="nothing in the plan fits"):
        candidate_of(replace(made, tried=()), 1)

    job, chosen = made.facts.job, candidate_of(made, 1)
    source = with_plan(job, {}, chosen, warnings.append, job)
    assert warnings == []
    assert (source.chosen, source.job.steps) == (chosen, chosen.steps)
    assert source.job.layout.mesh_shape["fsdp"] == chosen.settings["layout.fsdp"]
    source = with_plan(job, {"steps": 9}, read(path), warnings.append)
    (warning,) = warnings
    assert warning.startswith(f"{path} does not say which Job it forecast")
    assert source.chosen is not None
    assert (source.chosen.forecast, source.job.steps) == (StepTime(), 9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nonsense": 1}, "nonsense.*its options are steps, batch"),
        ({"batch": 0}, "batch.total is 0"),
        ({"steps": "ten"}, "^steps is 'ten'; it takes a whole number$"),
        ({"layout": "fsdp"}, r"^layout is 'fsdp'; it takes a systolic\.job\.Layout$"),
    ],
)
def test_options_that_a_recipe_does_not_take(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        systolic.train(RECIPE, run=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["lm", "mlm"])
def test_text_is_a_path_where_a_recipe_takes_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("some text\n" * 100)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    options = {"path": "../corpus", "validation": "../corpus", "precision": "f32"}
    source = source_of(name, options)
    assert source.options["path"] == tmp_path / "here" / "../corpus"
    assert source.options["precision"] is Precision.f32
    assert source.job.data == recipes.find(name)(source.options).data
    paths = {**options, "path": Path("../corpus"), "validation": Path("../corpus")}
    function = recipes.find(name).function
    assert function(**options).data == function(**paths).data
    with pytest.raises(NotFoundError, match="nowhere"):
        systolic.train(name, path="nowhere", run=tmp_path / "run")
    with pytest.raises(NotFoundError, match="nowhere"):
        systolic.train(name, path="../corpus", tokenizer="nowhere", run=tmp_path / "run")


def test_text_is_a_path_in_image_recipes(tmp_path: Path) -> None:
    for name in ("image", "fashion"):
        with pytest.raises(NotFoundError, match="nowhere"):
            systolic.train(name, path="nowhere", run=tmp_path / "run")
        with pytest.raises(NotFoundError, match="nowhere"):
            set_up(recipes.find(name).function(path=str(tmp_path / "nowhere")))
    root = StandardLibrary(root=str(ROOT / "src"))  # ty: ignore[invalid-argument-type]
    assert root == StandardLibrary(root=ROOT / "src")


@pytest.mark.parametrize("few", [{}, {"steps": 7}])
@pytest.mark.parametrize("name", recipes.shipped())
def test_a_job_is_read_back_from_its_json(name: str, few: dict[str, int], tmp_path: Path) -> None:
    outline(tmp_path)
    options = {
        "image": {"path": tmp_path, "classes": 3},
        "sft": {"from_": tmp_path, "data": tmp_path},
    }.get(name, {})
    job = recipes.find(name)({**options, **few})
    if few and name in ("bytes", "lm", "mlm"):
        assert type(job.schedule) is Shortened
    plain = json.loads(json.dumps(job.to_json()))
    assert job_from_json(plain, types_of(job), tmp_path) == job


def test_a_job_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    job = recipes.find("bytes")({})
    plain, types = json.loads(json.dumps(job.to_json())), types_of(job)
    for damage in ({"steps": "many"}, {"model": {**plain["model"], "layers": None}}):
        with pytest.raises(RunError, match="does not read in this version") as raised:
            job_from_json({**plain, **damage}, types, tmp_path)
        assert "\n" not in str(raised.value)
    with pytest.raises(RunError, match="a type that Systolic has not"):
        job_from_json(plain, {**types, "model": "os.system"}, tmp_path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A job for as many devices as there are, and its run, which was stopped."""
    job = replace(tiny.job(steps=8), layout=Layout(fsdp=-1))
    run = tmp_path_factory.mktemp("stopped") / "run"
    systolic.train(job, run=run, watchers=[StopAt(4)])
    return job, run


def test_a_job_resumes_on_other_devices_with_its_layout_as_it_was_given(
    stopped: tuple[Job, Path],
) -> None:
    saved = Run.open(stopped[1]).read_job()
    assert saved["options"]["layout"]["fsdp"] == -1
    assert saved["job"]["layout"]["fsdp"] == 1


@pytest.mark.slow
def test_a_run_of_a_digits_job_that_stopped_early_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, made = tmp_path / "run", recipes.find("digits")({"steps": 40})
    # The loss is to rise, and it falls: the second evaluation stops the run.
    rule = replace(
        made.evaluation,
        every=4,
        batches=2,
        final_batches=2,
        metric="loss",
        mode=Mode.max,
        patience=1,
    )
    model = replace(MODELS[DigitsModel.cnn], channels=(4,))
    job = replace(made, model=model, evaluation=rule, schedule=Schedule())
    systolic.train(job, run=run, watchers=[StopAt(1)])

    def rewritten(*_: Any) -> None:
        raise AssertionError("job.json is written again")

    with monkeypatch.context() as patched:
        patched.setattr(Run, "write_job", rewritten)
        stopped = systolic.resume(run, job=job)
    assert stopped.warnings == ()
    assert 0 < stopped.summary["steps"] < 40
    again = systolic.resume(run)
    assert (again.trained, again.summary["steps"]) == (False, stopped.summary["steps"])

    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--optimizer.learning-rate", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"systolic: systolic train --resume {run} has no option --optimizer.lear"
    )
    assert "; a run made from a Job takes steps and layout only; see" in line


def test_resume_lists_the_fields_of_a_changed_job(
    stopped: tuple[Job, Path], tmp_path: Path
) -> None:
    job, run = stopped[0], Path(shutil.copytree(stopped[1], tmp_path / "run"))
    slower = replace(job.optimizer, learning_rate=0.0625)
    changed = replace(job, optimizer=slower, evaluation=replace(job.evaluation, every=5))
    result = systolic.resume(run, job=changed)
    assert result.warnings == (
        f"{run} continues with optimizer.learning_rate 0.0625 (was {job.optimizer.learning_rate}),"
        f" evaluation.every 5 (was {job.evaluation.every})",
    )
    record = Run.open(run).read_job()
    assert record["job"]["optimizer"]["learning_rate"] == 0.0625


@pytest.mark.slow
def test_events_that_are_warnings_reach_python(tmp_path: Path) -> None:
    run, told = tmp_path / "run", []
    schedule = Schedule(warmup=2000).shortened(Schedule(warmup=2000), 20)
    job = replace(tiny.job(steps=20), schedule=schedule)
    shortened = "schedule.warmup is 2000 by default and the job has 20 steps"
    with reporting(Told(told)):
        first = systolic.train(job, run=run, watchers=[StopAt(10)])
    assert [line.startswith(shortened) for line in first.warnings] == [True]
    assert tuple(told) == first.warnings
    kept = sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))
    victim = next(
        path
        for path in sorted((run / "checkpoints" / str(kept[-1]) / "params").rglob("*"))
        if path.is_file() and path.stat().st_size
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    told.clear()
    with reporting(Told(told)):
        second = systolic.resume(run, job=job)
    assert tuple(told) == second.warnings
    assert second.warnings[1].startswith(f"checkpoint of step {kept[-1]} is damaged (params/")
    assert second.warnings[1].endswith(f"; using the one of step {kept[-2]}")


def test_a_reporter_that_shows_events_is_told_nothing_twice() -> None:
    told: list[str] = []
    for shows in (False, True):
        audience = Audience()
        with reporting(Told(told, shows_events=shows)):
            audience.caution("no validation")
        assert audience.warnings == ["no validation"]
    assert told == ["no validation"]


@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        (tiny.job(), {"workers": -1}, "workers is -1; it must be at least 0"),
        (tiny.job(), {"workers": 1.5}, "workers is 1.5; it takes a whole number"),
        (tiny.job(), {"log_every": 0}, "log_every is 0; it must be at least 1"),
        (tiny.job(), {"profile": -1}, "profile is -1; it must be at least 0"),
        (tiny.job(), {"flags": "--xla_nope=1"}, "refuses the flags --xla_nope=1"),
        (tiny.job(), {"layout": "fsdp"}, r"layout is 'fsdp'; it takes a systolic\.job\.Layout"),
        ("bytes", {"layout": "fsdp"}, r"layout is 'fsdp'; it takes a systolic\.job\.Layout"),
        (tiny.job(), {"on": 3}, "on is 3; it takes a slice or its name"),
        (tiny.job(), {"plan": {}}, r"plan is \{\}; it takes what systolic\.plan returned"),
        (tiny.job(), {"init_from": 3}, "init_from is 3; it takes a path"),
        (3, {}, "job is 3; it takes a Job, the name of a recipe or"),
        (None, {}, "job is None; it takes a Job"),
        (tiny.job, {}, "job is the function job, not what it returns; it takes a Job"),
    ],
)
def test_a_wrong_value_is_one_line_and_leaves_no_run(
    tmp_path: Path, job: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said) as raised:
        systolic.train(job, run=tmp_path / "run", **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_quoted_for_the_shell(
    stopped: tuple[Job, Path], tmp_path: Path
) -> None:
    job, run = stopped[0], Path(shutil.copytree(stopped[1], tmp_path / "py r1"))
    with pytest.raises(TakenError, match=re.escape(f"systolic train --resume '{run}' or choose")):
        systolic.train(job, run=run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(NotFoundError, match=re.escape(f"systolic train --resume '{run}'")):
        systolic.open(run, job=job)


def test_a_plan_for_other_devices_names_no_option_that_python_lacks(tmp_path: Path) -> None:
    made = fabricated.plan()
    with pytest.raises(RunError, match=r"train there, or rehearse \S+ to try it here"):
        systolic.train(made.facts.job, plan=made, run=tmp_path / "run")
