"""Trials of a search as real runs of a tiny recipe, in this process."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("optuna")

from systolic.chips import slice
from systolic.cli.main import main
from systolic.core.errors import OptionError, RunError
from systolic.core.reporter import Reporter, reporting
from systolic.runs.record import load_run
from systolic.tuning import sampling
from systolic.tuning.claims import this_worker
from systolic.tuning.definition import Tuning, with_values
from systolic.tuning.display.page import render
from systolic.tuning.objective import importance
from systolic.tuning.processes import DEATHS, Processes
from systolic.tuning.results import StudyResult, rows_of
from systolic.tuning.trials import BEGUN, TrialWatcher, TrialWorker
from tests.training.display.test_page import Page
from tests.tuning.databases import with_tables
from tests.tuning.searches import tuning_of

RECIPE = f"{Path(__file__).with_name('trial_recipe.py')}:job"


def tuning(folder: Path, *words: str, recipe: str = RECIPE) -> Tuning:
    return tuning_of([recipe, *words, f"--study={folder}"])


def work(made: Tuning) -> StudyResult:
    if made.address.url == f"sqlite:///{made.folder / 'study.db'}":
        with_tables(made.folder / "study.db")
    shared = made.open()
    worker = TrialWorker(tuning=made, shared=shared)
    worker.work()
    rows = rows_of(shared, made.trials, made.searched, made.aims, made.folder / "trials")
    return StudyResult(
        name=made.address.name,
        recipe=made.recipe.target,
        rows=rows,
        total=made.trials,
        searched=made.searched,
        aims=made.aims,
        importance=importance(shared.study, made.aims, made.searched),
        stopped=worker.stopped,
    )


class Recorded(Reporter):
    """Keeps the warnings and the results so far."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.results: list[StudyResult] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def update(self, state: StudyResult) -> None:
        self.results.append(state)


RATES = "--search=learning-rate=log:1e-4..1e-1"


def test_trials_are_runs_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study"
    words = (RATES, "--search=scale=0.5,1", "--sampler=random", "--evaluation.every=4")
    first = work(tuning(folder, *words, "--trials=1"))
    assert [row.state for row in first.rows] == ["done"]
    made = tuning(folder, *words, "--trials=2")
    result = work(made)
    assert [row.number for row in result.rows] == [0, 1]
    assert result.rows[:1] == first.rows
    for row in result.rows:
        run = load_run(Path(row.run))
        assert run.job.options["learning_rate"] == row.values["learning-rate"]
        assert run.summary is not None
        # The learning rate is an input of the step that both trials share.
        assert run.peak_rate == pytest.approx(row.values["learning-rate"])
        metrics = run.final_metrics
        assert row.figures == {"loss": metrics["validation_loss"]}
        assert row.seconds == run.seconds
    best = min(result.rows, key=lambda row: row.figures["loss"])
    assert result.best == best
    line = made.with_command(result).command
    assert line.startswith(
        f"systolic train {RECIPE} --evaluation.every 4 --learning-rate {best.values['learning-rate']}"
    )
    page = Page(render(made.with_command(result), folder))
    assert f"best: loss {best.figures['loss']:.4g} with learning-rate" in page.text
    assert (
        f"systolic train {RECIPE} --evaluation.every 4 --learning-rate {best.values['learning-rate']}"
        in page.text
    )
    links = [value for name, value in page.attributes if name == "href"]
    worse = 1 - best.number
    assert links == [f"trials/{one:04d}/report.html" for one in (best.number, worse)]
    assert all((folder / link).is_file() for link in links)
    assert "time run" in page.text  # no cost column, since no trial has a cost
    # A smaller total drops no trial of the study, and nothing runs.
    assert main(["tune", RECIPE, *words, "--trials=1", f"--study={folder}", "--json"]) == 0
    told = capsys.readouterr()
    study = json.loads(told.out)
    assert (study["finished"], study["total"], study["best"]["number"]) == (2, 2, best.number)
    assert json.loads((folder / "study.json").read_text())["trials"] == study["trials"]
    assert "--trials is 1, and 2 trials of the study have ended" in told.err
    assert not (folder / "workers").exists()
    _of_another_study(folder, words)
    with pytest.raises(OptionError, match=r"has the search .* not learning-rate=log:1e-3..1e-1"):
        tuning(folder, "--search=learning-rate=log:1e-3..1e-1", *words[1:]).open()
    with pytest.raises(OptionError, match=r"has the options evaluation\.every=4, not"):
        tuning(folder, RATES, *words[1:3], "--evaluation.every=2").open()
    with pytest.raises(OptionError, match="has the recipe"):
        tuning(folder, "--search=batch=8,16", recipe="digits").open()


def _of_another_study(folder: Path, words: Sequence[str]) -> None:
    """Runs of a lost database are refused if the new database draws other values, and used if it draws the same."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    (copy / "study.db").write_bytes(b"")
    result = work(tuning(copy, *words, "--trials=2"))
    assert [row.figures for row in result.rows] == [
        row.figures for row in work(tuning(folder, *words, "--trials=2")).rows
    ]
    storage = f"--storage=sqlite:///{copy / 'new.db'}"
    # Values that are not searched, with the same draws.
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    scaled = tuning(moved, *words, "--trials=2", "--batch=8")
    with pytest.raises(OptionError, match=r"trials has runs of a study with the options"):
        work(scaled)
    (moved / "trials.json").unlink()
    with pytest.raises(OptionError, match=r"0000 was trained with batch 16, and trial 0"):
        work(scaled)
    other = tuning(copy, *words, "--trials=2", "--sampler-seed=5", storage)
    with pytest.raises(OptionError, match="the sampler seed 0, not 5"):
        work(other)
    (copy / "trials.json").unlink()
    with pytest.raises(OptionError) as error:
        work(other)
    assert "0000 was trained with learning-rate" in str(error.value)
    assert "give --study another folder" in str(error.value)
    assert other.open().trials(2)[0].state.name != "COMPLETE"


def test_a_warmup_that_the_recipe_would_shorten_is_refused(tmp_path: Path) -> None:
    """The trial would be one of another warm-up than it says."""
    words = ["--search=schedule.warmup=3,30", "--sampler=grid", "--trial-steps=20"]
    with pytest.raises(OptionError, match="warmup 30 is the recipe's default, which 20 steps shor"):
        tuning(tmp_path, *words, recipe="digits").source({"schedule.warmup": 30})
    assert tuning(tmp_path, *words, recipe="digits").source({"schedule.warmup": 3}).job.schedule


def test_a_bad_trial_is_ended_early_and_another_refused_or_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("systolic.tuning.trials.forecast_job", Forecasts())
    words = [
        "--on=v5e-4",
        "--search=factor=1.0,nan",
        "--spoil",
        "3",
        "--sampler=grid",
        "--evaluation.every=4",
    ]
    result = work(tuning(tmp_path / "diverged", *words, "--pruner=none"))
    states = {str(row.values["factor"]): row.state for row in result.rows}
    assert states == {"1.0": "done", "nan": "failed"}
    (row,) = [row for row in result.rows if row.state == "failed"]
    assert "the loss of step 3 is not a number" in row.reason
    # 3 of 16 steps ran.
    assert (row.step, row.seconds) == (3, load_run(Path(row.run)).seconds)
    assert result.done[0].dollars is not None
    assert row.dollars == pytest.approx(result.done[0].dollars * 3 / 16)

    words = ["--search=batch=0,-1", "--sampler=grid"]
    result = work(tuning(tmp_path / "refused", *words))
    assert [row.state for row in result.rows] == ["refused", "refused"]
    assert all("batch" in row.reason for row in result.rows)
    assert (result.best, result.finished) == (None, 2)


class Judge:
    """Stands in for Optuna's trial: prunes at the first evaluation."""

    def __init__(self) -> None:
        self.reported: list[tuple[float, int]] = []

    def report(self, value: float, step: int) -> None:
        self.reported.append((value, step))

    def should_prune(self) -> bool:
        return True


def test_a_trial_that_is_stopped_early_is_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optuna.trial.Trial.should_prune", lambda self: True)
    result = work(tuning(tmp_path / "s", RATES, "--trials=1", "--evaluation.every=4"))
    (row,) = result.rows
    assert (row.state, row.step, row.reason) == (
        "stopped early",
        4,
        "stopped early at step 4 of 16",
    )
    assert "loss" in row.figures
    run = load_run(Path(row.run))
    assert run.summary is not None
    assert run.summary.interrupted == "SIGTERM"
    assert result.best is None
    judge, noted = Judge(), {}
    watcher = TrialWatcher(
        trial=judge, seen=frozenset({4}), reports=True, last=8, metric="loss", note=noted.update
    )
    record: dict[str, Any] = {"kind": "eval", "split": "validation", "final": False}
    watcher.see(record | {"step": 4, "metrics": {"loss": 1.0}})  # reported before a resume
    watcher.see(record | {"step": 8, "metrics": {"loss": 1.0}})  # the last step
    watcher.see(record | {"step": 6, "split": "test", "metrics": {"loss": 1.0}})
    assert judge.reported == []


@pytest.mark.parametrize(
    ("words", "trials"),
    [
        (["--search=batch=8,16,32"], 3),
        (["--search=batch=8,16,32", "--trials=2"], 2),
        (["--search=batch=8..256"], 20),
        (["--search=batch=8..256", "--trials=300"], 249),
        (["--search=batch=8..256:8", "--sampler=grid"], 32),
        ([RATES], 20),
        ([RATES, "--trials=300"], 300),
    ],
    ids=str,
)
def test_there_are_no_more_trials_than_settings(
    words: Sequence[str], trials: int, tmp_path: Path
) -> None:
    assert tuning(tmp_path / "study", *words).trials == trials


@pytest.mark.slow
def test_a_stopped_trial_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe interrupts its own process, as Ctrl-C does; the trial waits with its values and its run."""
    folder = tmp_path / "study"
    words = [RATES, "--trials=1", "--halt-at", "7", "--objective=loss", "--objective=seconds"]
    result = work(made := tuning(folder, *words))
    (row,) = result.rows
    assert (result.stopped, row.state) == ("interrupted", "waiting")
    values = row.values
    before = load_run(Path(row.run))
    assert 0 < before.step < 16
    assert (row.step, row.seconds) == (before.step, before.seconds)
    # The batch that interrupted it was prefetched, and is read again.
    monkeypatch.setattr("os.kill", lambda *_: None)
    result = work(made)
    (row,) = result.rows
    assert (row.state, row.values) == ("done", values)
    run = load_run(Path(row.run))
    assert run.num_sessions == 2
    assert [record.step for record in run.train] == list(range(1, 17))
    # Its time is that of both sessions.
    assert row.seconds == run.seconds
    records = run.path / "metrics.jsonl"
    *lines, end = records.read_text().splitlines(keepends=True)
    last = json.loads(end)["time"]["step"]
    first = sum(
        one.num_steps * one.step_seconds * (1 - one.data_wait)
        for one in run.train
        if one.step <= run.resumed_from
    )
    assert first > 0
    assert row.figures["seconds"] == pytest.approx(first + last)
    # A killed session has no final record.
    records.write_text("".join(lines))
    assert load_run(run.path).step_seconds > first


@pytest.mark.slow
def test_several_objectives_make_a_front(tmp_path: Path) -> None:
    made = tuning(
        tmp_path / "study",
        "--search=width=4,16",
        "--sampler=grid",
        "--objective=loss",
        "--objective=parameters",
        "--objective=max:accuracy",
    )
    result = work(made)
    assert len(result.done) == 2
    sizes = [row.figures["parameters"] for row in result.rows]
    assert len(set(sizes)) == 2
    smallest = min(result.rows, key=lambda row: row.figures["parameters"])
    assert smallest in result.front
    assert result.best in result.front
    text = Page(render(result, made.folder)).text
    assert text.count("Loss against parameters") == text.count("Loss against accuracy") == 1
    assert "stopped early (last evaluation)" not in text


def test_values_of_one_record_change_together() -> None:
    options = tuning_of(["bytes", "--search=steps=1,2"]).options
    with pytest.raises(OptionError):
        with_values(options, {"model.heads": 3})
    made = with_values(options, {"model.heads": 6, "model.kv-heads": 3, "steps": 7})
    assert (made["model"].heads, made["model"].kv_heads, made["steps"]) == (6, 3, 7)
    assert options["model"].heads == 2


class Forecasts:
    """Stands in for the compiler: a step takes a second; a wide model does not fit."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, job: Any, on: Any, **_: Any) -> Any:
        self.asked.append(job)
        fits = job.model.width < 64
        return SimpleNamespace(
            fits=fits, step_seconds=1.0, capacity_bytes=2**34, need_bytes=2**35, on=on
        )


def test_a_forecast_refuses_what_does_not_fit_and_a_budget_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Forecasts()
    monkeypatch.setattr("systolic.tuning.trials.forecast_job", asked)
    price = slice("v5e-4").usd_per_hour.on_demand
    assert price is not None
    trial = price * 16 / 3600
    words = ["--search=width=8,64", "--search=learning-rate=0.01,0.02", "--sampler=grid"]
    budget = f"--budget={trial * 1.5}"
    made = tuning(tmp_path / "study", *words, "--on=v5e-4", budget)
    result = work(made)
    refused = [row for row in result.rows if row.state == "refused"]
    assert len(result.done) == 1
    assert result.done[0].dollars == pytest.approx(trial)
    assert all(row.values["width"] == 64 and row.dollars is None for row in refused)
    assert all(
        "does not fit v5e-4 (32.00 GiB per device needed, 16.00 GiB" in row.reason
        for row in refused
    )
    assert "the next trial costs" in result.stopped
    # Learning rates share one compile: the forecast gets only one of them.
    assert len({job.optimizer.learning_rate for job in asked.asked}) == 1
    more = tuning(tmp_path / "study", *words, "--on=v5e-4", f"--budget={trial * 2.5}")
    result = work(more)
    assert (len(result.done), result.finished, result.stopped) == (2, 4, "")


def test_a_budget_that_has_nothing_left_costs_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that was claimed and never started does not count as one whose process died."""
    monkeypatch.setattr("systolic.tuning.trials.forecast_job", Forecasts())
    words = ["--search=learning-rate=0.01,0.02", "--sampler=grid", "--trials=1", "--on=v5e-4"]
    for _ in range(BEGUN + 1):
        result = work(tuning(tmp_path / "study", *words, "--budget=0.0001"))
        assert "the next trial costs" in result.stopped
    assert [row.state for row in result.rows] == ["waiting"]
    for word, told in (("--price=spot", "price on-demand"), ("--quick", "forecast full")):
        with pytest.raises(OptionError, match=f"has the {told}, not"):
            tuning(tmp_path / "study", *words, word).open()


@pytest.mark.slow
def test_a_batch_that_does_not_divide_the_slice_is_refused(tmp_path: Path) -> None:
    words = ["--search=batch=10,12", "--sampler=grid", "--on=v5e-16", "--quick"]
    result = work(tuning(tmp_path / "study", *words))
    assert [row.state for row in result.rows] == ["refused", "refused"]
    assert all("16" in row.reason for row in result.rows)


def test_a_worker_whose_trial_was_taken_over_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine takes the trial over and ends it while this one trains; the run here ends, and the study keeps the other's result."""
    made = tuning(tmp_path / "study", RATES, "--trials=1", "--evaluation.every=4")
    shared, recorded = made.open(), Recorded()
    see = TrialWatcher.see

    def late(watcher: TrialWatcher, record: Any) -> None:
        if record["kind"] == "eval" and record["step"] == 8:
            with closing(made.open()) as other:
                trial = watcher.trial.number
                assert other.release(trial, this_worker())
                again = other.claim(1, "elsewhere/1/0")
                drawn = other.drawn(again, sampling.build(made.sampler, [], 0, 0), None)
                assert other.finish(drawn, "elsewhere/1/0", [7.0], "")
        see(watcher, record)

    monkeypatch.setattr(TrialWatcher, "see", late)
    worker = TrialWorker(tuning=made, shared=shared)
    with reporting(recorded):
        worker.work()
    (trial,) = shared.trials(1)
    assert (trial.values, worker.stopped) == ([7.0], "")
    assert sorted(trial.intermediate_values) == [4]
    summary = load_run(made.run(0)).summary
    assert summary is not None
    assert summary.steps == 8
    assert "trial 0 sent no heartbeats and was taken over" in recorded.warnings[0]


@pytest.mark.parametrize("gets_on", [2, 0])
def test_workers_that_die_are_started_again_while_a_trial_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gets_on: int
) -> None:
    """Every worker is killed; the trial has a later checkpoint this many times."""
    monkeypatch.setattr("systolic.tuning.processes.SEE_SECONDS", 0.0)
    monkeypatch.setattr("systolic.tuning.processes.POLL_SECONDS", 0.01)
    made = tuning(tmp_path / "study", RATES, "--trials=1")
    with closing(made.open()) as shared:
        trial = shared.claim(1, this_worker()).number

        class GetsOn(Recorded):
            def update(self, state: StudyResult) -> None:
                if len(told) in range(1, 1 + DEATHS * gets_on):
                    shared.note(trial, begun=(len(told) // DEATHS + 1, 1))

        recorded = GetsOn()
        told = recorded.warnings
        processes = Processes(
            tuning=made,
            shared=shared,
            search={},
            command=["sh", "-c", "kill -9 $$"],
            count=1,
        )
        with (
            reporting(recorded),
            pytest.raises(RunError, match=r"without progress \(last: SIGKILL\)"),
        ):
            processes.run()
    assert len(told) >= DEATHS * (gets_on + 1)
    assert len(told) < DEATHS * (gets_on + 2)


def test_memory_that_others_have_is_not_the_settings_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trials run out of memory: the worker stops, and samplers do not learn from them."""

    def full(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes")

    made = tuning(tmp_path / "study", RATES, "--trials=8")
    with monkeypatch.context() as patch:
        patch.setattr(TrialWorker, "_train", full)
        with pytest.raises(RunError, match=r"3 trials in a row .* out of memory on this machine"):
            work(made)
    with closing(made.open()) as shared:
        assert [one.state.name for one in shared.trials(8)] == ["FAIL"] * 3


@pytest.mark.slow
def test_trials_are_forecast_by_the_compiler(tmp_path: Path) -> None:
    words = ["--search=width=8,16", "--sampler=grid", "--on=v5e-1", "--quick", "--trials=1"]
    result = work(tuning(tmp_path / "study", *words, "--objective=loss", "--objective=dollars"))
    (row,) = result.rows
    assert row.state == "done"
    assert 0 < row.figures["dollars"] < 0.1
