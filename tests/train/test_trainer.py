"""What a session records: recompiles, kernels, checkpoints and their best, early stops, time."""

import math
from pathlib import Path

import pytest

from systolic.artifact import CheckpointStore, Run, weights
from systolic.artifact.access import Access
from systolic.core.errors import OptionError
from systolic.job import Checkpoints, Evaluation, Mode
from systolic.train.ledger import KINDS, Ledger
from systolic.train.setup import set_up
from tests.train import tiny
from tests.train.sessions import Collect, evaluations, events, records, train


def test_a_recompile_says_which_argument_changed(tmp_path: Path):
    job = tiny.job(steps=6, halve=(4, 5), evaluation=Evaluation(), checkpoints=Checkpoints())
    summary = train(job, tmp_path)
    assert summary["recompiles"] == 1, "the smaller batch comes twice and is compiled once"
    assert len(events(tmp_path, "compile")) == 2
    (told,) = events(tmp_path, "recompile")
    assert told.startswith("train step: ")
    assert sorted(told.removeprefix("train step: ").split("; ")) == [
        "label was int32[16] and is int32[8]",
        "mask was float32[16] and is float32[8]",
        "weight was float32[16] and is float32[8]",
        "x was float32[16,8] and is float32[8,8]",
    ]


def test_the_best_checkpoint_is_kept_and_used(tmp_path: Path):
    """Evaluations save too; the best of them outlives the newest ones."""
    job = tiny.job(
        steps=8,
        learning_rate=0.3,
        dropout=0.5,
        evaluation=Evaluation(every=2, metric="loss"),
        checkpoints=Checkpoints(keep_last=1),
    )
    setup = set_up(job)
    train(setup, tmp_path)
    scores = {
        step: metrics["loss"]
        for (step, split), metrics in evaluations(tmp_path).items()
        if split == "validation"
    }
    assert sorted(scores) == [2, 4, 6, 8]
    best = min(scores, key=lambda step: scores[step])
    with CheckpointStore(tmp_path / "checkpoints", metric="loss", access=Access.read) as store:
        assert store.steps() == sorted({best, 8})
    assert weights.load(Run.open(tmp_path), setup.steps).step == best
    assert weights.load(Run.open(tmp_path), setup.steps, "last").step == 8


def test_early_stopping(tmp_path: Path):
    evaluation = Evaluation(every=2, metric="accuracy", mode=Mode.min, patience=2)
    job = tiny.job(steps=40, learning_rate=0.05, evaluation=evaluation)
    setup = set_up(job)
    summary = train(setup, tmp_path)
    assert summary["steps"] < 40
    reason = "accuracy has not improved in 2 evaluations"
    assert summary["stopped"] == reason
    assert events(tmp_path, "stop") == [reason]
    (tmp_path / "summary.json").unlink()
    again = train(setup, tmp_path, resume=True)
    assert (again["steps"], again["stopped"]) == (summary["steps"], reason)


def test_a_metric_that_is_not_reported_is_refused_before_any_step(tmp_path: Path):
    job = tiny.job(evaluation=Evaluation(every=8, metric="acuracy"))
    message = "evaluation.metric is 'acuracy', which tiny does not report; did you mean accuracy?; choose one of accuracy, loss"
    with pytest.raises(OptionError) as caught:
        set_up(job).check_metric()
    assert str(caught.value) == message
    with pytest.raises(OptionError):
        train(job, tmp_path)
    assert not list(Run.open(tmp_path).records())


def test_the_time_of_a_session_adds_up(tmp_path: Path):
    seen = Collect()
    summary = train(tiny.job(), tmp_path, watchers=[seen])
    time = summary["time"]
    assert tuple(time) == KINDS
    assert math.fsum(time.values()) == pytest.approx(summary["seconds"])
    assert all(time[kind] > 0 for kind in ("compile", "step", "eval", "checkpoint"))
    assert summary["goodput"] == pytest.approx(time["step"] / summary["seconds"])
    assert summary == Run.open(tmp_path).read_summary()
    (end,) = [r for r in seen.records if r["kind"] == "end"]
    assert end["final"] == summary["final"]
    assert set(summary["final"]["metrics"]) == {
        f"{split}_{name}" for split in ("validation", "test") for name in ("loss", "accuracy")
    }
    assert summary["next"] == f"systolic eval {tmp_path}"


def test_every_second_of_a_ledger_is_somewhere():
    """By a clock of the test's own: nested claims count once, the rest is other."""
    now = [100.0]
    ledger = Ledger(lambda: now[0])
    now[0] = 103
    with ledger.spend("step"):
        now[0] = 105
        with ledger.spend("eval"):
            now[0] = 109
            ledger.add("data_wait", 1.0)
        now[0] = 110
    now[0] = 112
    assert ledger.close() == {
        "compile": 0,
        "step": 3,
        "data_wait": 1,
        "eval": 3,
        "checkpoint": 0,
        "diagnose": 0,
        "other": 5,
    }


def test_records_are_the_same_on_disk_and_for_watchers(tmp_path: Path):
    seen = Collect()
    train(tiny.job(steps=4), tmp_path, watchers=[seen])
    assert events(tmp_path, "kernel") == ["a plain product was chosen"]
    on_disk = [r["kind"] for kind in ("start", "train", "end") for r in records(tmp_path, kind)]
    assert on_disk == ["start"] + ["train"] * 4 + ["end"]
    assert [r["kind"] for r in seen.records] == [r["kind"] for r in Run.open(tmp_path).records()]
