"""Checkpoints are ranked by one measure: the batches that evaluations during training read."""

from dataclasses import replace
from pathlib import Path

import pytest

from systolic.data.arrays import Arrays
from systolic.job import Evaluation
from systolic.runs import CheckpointStore
from systolic.runs.access import Access
from systolic.setup import Setup, set_up
from systolic.training.trainer import UNRATED
from tests.training import tiny
from tests.training.sessions import Crash, CrashAfterEvaluation, events, records, train

RULE = Evaluation(every=4, batches=1, final_batches=0)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return set_up(tiny.job(steps=8, evaluation=RULE))


def test_the_last_step_is_ranked_by_as_many_batches_as_the_others(
    setup: Setup, tmp_path: Path
) -> None:
    summary = train(setup, tmp_path)
    evaluated = [r for r in records(tmp_path, "eval") if r["split"] == "validation"]
    during = {r["step"]: r["metrics"]["loss"] for r in evaluated if not r["final"]}
    assert set(during) == {4, 8}
    assert summary["final"]["metrics"]["validation_loss"] != during[8], "it read more batches"
    store = CheckpointStore(tmp_path / "checkpoints", metric="loss", access=Access.read)
    assert store.metrics(8)["loss"] == during[8]
    assert store.best_step() == min(during, key=during.__getitem__)


def test_a_kill_after_that_evaluation_leaves_it_on_record_once(
    setup: Setup, tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        train(setup, tmp_path, watchers=[CrashAfterEvaluation(8)])
    train(setup, tmp_path, resume=True)
    kinds = [
        (r["step"], r["split"], r["final"])
        for r in records(tmp_path, "eval")
        if r["split"] == "validation"
    ]
    assert kinds == [(4, "validation", False), (8, "validation", False), (8, "validation", True)]


def test_test_metrics_rate_no_checkpoint(tmp_path: Path) -> None:
    splits = tiny.load()
    data = Arrays.of(train=splits["train"], test=splits["test"])
    job = replace(tiny.job(steps=8), data=data, evaluation=Evaluation(every=2))
    summary = train(set_up(job), tmp_path)
    assert [(r["step"], r["split"]) for r in records(tmp_path, "eval")] == [(8, "test")]
    assert "test_loss" in summary["final"]["metrics"]
    store = CheckpointStore(tmp_path / "checkpoints", metric="loss", access=Access.read)
    assert store.latest_step() == 8
    assert store.best_step() is None
    assert events(tmp_path, "data") == [UNRATED]
