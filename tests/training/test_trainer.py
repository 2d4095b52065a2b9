"""What a session records: recompiles, kernels, checkpoints and their best, early stops, time."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from systolic.core.errors import OptionError
from systolic.job import Checkpoints, Evaluation, Guard, GuardRule, Layout, Mode, Schedule, Split
from systolic.job.model import Mean
from systolic.runs import CheckpointStore, Run, weights
from systolic.runs.access import Access
from systolic.setup import Setup, set_up
from systolic.training.evaluate import Evaluator
from systolic.training.interrupt import Interrupt
from systolic.training.ledger import Ledger, Meter, Spent
from systolic.training.session import Audience, SessionOptions, run_session
from tests.tiers import some
from tests.training import tiny
from tests.training.sessions import (
    Collect,
    Crash,
    CrashAt,
    evaluations,
    events,
    losses,
    records,
    train,
)


def test_a_recompile_says_which_argument_changed(tmp_path: Path):
    job = tiny.job(steps=6, halve=(4, 5), evaluation=Evaluation(), checkpoints=Checkpoints())
    summary = train(job, tmp_path)
    assert summary["recompiles"] == 1, "the smaller batch comes twice and is compiled once"
    assert len(events(tmp_path, "compile")) == 3, "initial weights, and both steps"
    (told,) = events(tmp_path, "recompile")
    assert told.startswith("train step: ")
    assert sorted(told.removeprefix("train step: ").split("; ")) == [
        "label was int32[16] and is int32[8]",
        "mask was float32[16] and is float32[8]",
        "weight was float32[16] and is float32[8]",
        "x was float32[16,8] and is float32[8,8]",
    ]


@pytest.mark.parametrize("resume", [False, True])
def test_a_session_resumes_where_resume_says_so(tmp_path: Path, resume: bool):
    """Not by whether the caller has something to write before it: both may have."""
    setup, calls = set_up(tiny.job(steps=2)), []
    entries = {"job": {"name": "tiny"}, "recipe": "tiny", "options": {}}
    with Run.create(tmp_path / "run", entries) as run:
        run_session(
            setup,
            run,
            SessionOptions(diagnose=0),
            Audience(),
            Ledger(),
            resume=resume,
            accept=lambda: calls.append([*run.records()]),
        )
    assert calls == [[]], "before anything is written"
    again = ["no checkpoint yet: from the start"] if resume else []
    assert events(tmp_path / "run", "resume") == again


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


def test_the_time_of_a_session_adds_up_and_its_records_are_told(recorded: "Recorded"):
    seen, path, summary = recorded.seen, recorded.each, recorded.first
    time = summary["time"]
    assert tuple(time) == tuple(kind.value for kind in Spent)
    assert math.fsum(time.values()) == pytest.approx(summary["seconds"])
    assert all(time[kind] > 0 for kind in ("compile", "step", "eval", "checkpoint"))
    assert summary["goodput"] == pytest.approx(time["step"] / summary["seconds"])
    # Compiles are told one by one as they are added up, in events and on the page's time line.
    compiles = [r for r in seen.records if r.get("name") in ("compile", "recompile")]
    told = {r["detail"]: r["seconds"] for r in compiles}
    assert list(told) == ["initial weights", "train step", "eval step"]
    assert math.fsum(told.values()) == pytest.approx(time["compile"], abs=0.02)
    assert summary == Run.open(path).read_summary()
    (start,) = [r for r in seen.records if r["kind"] == "start"]
    assert start["devices"] == f"{start['num_devices']} x {start['device_kind']}"
    assert (start["num_devices"], start["device_kind"]) == (len(jax.devices()), "cpu")
    (end,) = [r for r in seen.records if r["kind"] == "end"]
    assert end["final"] == summary["final"]
    assert set(summary["final"]["metrics"]) == {
        f"{split}_{name}" for split in ("validation", "test") for name in ("loss", "accuracy")
    }
    assert summary["next"] == f"systolic eval {path}"
    # Records are the same on disk and for watchers.
    assert events(path, "kernel") == ["a plain product was chosen"]
    on_disk = [r["kind"] for kind in ("start", "train", "end") for r in records(path, kind)]
    assert on_disk == ["start"] + ["train"] * 14 + ["end"]
    seen_kinds = [r["kind"] for r in seen.records if r["kind"] != "evaluating"]
    assert seen_kinds == [r["kind"] for r in Run.open(path).records()]


def test_every_second_of_a_ledger_is_somewhere():
    """By a clock of the test's own: nested claims count once, the rest is other."""
    now = [100.0]
    ledger = Ledger(lambda: now[0])
    now[0] = 103
    ledger.claim_rest(Spent.start)
    with ledger.spend(Spent.step):
        now[0] = 105
        with ledger.spend(Spent.eval):
            now[0] = 109
            ledger.add(Spent.data_wait, 1.0)
        now[0] = 110
    now[0] = 112
    assert ledger.close() == {
        "start": 3,
        "compile": 0,
        "step": 3,
        "data_wait": 1,
        "eval": 3,
        "checkpoint": 0,
        "diagnose": 0,
        "sample": 0,
        "other": 2,
    }


@dataclass(frozen=True)
class Recorded:
    """A run of 14 steps of which the third is dropped, with a record of each and with one of five."""

    setup: Setup
    each: Path
    five: Path
    first: dict[str, Any]
    """Summary of ``each``."""
    seen: Collect
    """What a watcher saw of ``each``."""
    summary: dict[str, Any]
    """Of ``five``."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    home = tmp_path_factory.mktemp("recorded")
    evaluation, guard = Evaluation(every=7, batches=1), Guard(rule=GuardRule.skip)
    job = tiny.job(
        14, spoil=(3,), guard=guard, checkpoints=Checkpoints(every=3), evaluation=evaluation
    )
    setup = set_up(job)
    seen = Collect()
    first = train(setup, home / "each", watchers=[seen])
    summary = train(setup, home / "five", log_every=5)
    return Recorded(setup, home / "each", home / "five", first, seen, summary)


def test_a_record_holds_the_mean_of_its_steps_but_dropped_ones(recorded: Recorded):
    each, five = records(recorded.each, "train"), records(recorded.five, "train")
    assert not np.isfinite(each[2]["loss"])
    assert [r["step"] for r in five] == [5, 10, 14]
    for name in ("loss", "grad_norm", "accuracy"):
        values = [r[name] for r in each]
        means = [np.mean([*values[:2], *values[3:5]]), np.mean(values[5:10]), np.mean(values[10:])]
        assert [r[name] for r in five] == pytest.approx(means)
    assert [r["learning_rate"] for r in five] == [each[i]["learning_rate"] for i in (4, 9, 13)]


def test_means_of_a_resumed_run_are_those_of_one_that_was_not_cut_off(
    recorded: Recorded, tmp_path: Path
):
    setup, cut = recorded.setup, tmp_path / "cut"
    with pytest.raises(Crash):
        train(setup, cut, watchers=[CrashAt(10)], log_every=5)
    train(setup, cut, resume=True, log_every=5)
    assert [r["resumed_from"] for r in records(cut, "start")] == [None, 9]
    assert losses(recorded.five) == losses(cut)
    assert sorted(losses(cut)) == [5, 10, 14]


def test_a_record_is_of_its_own_steps_whenever_the_host_sees_them():
    """By a clock of the test's own: a slow first step, a step a second, and results seen together at the end."""
    now = [0.0]
    meter = Meter(set_up(tiny.job(steps=100)), Ledger(lambda: now[0]), 0)
    seen = []

    def see() -> None:
        meter.done()
        seen.append(meter.read())

    for second in range(10, 30):  # the host waits for each
        now[0] = second
        see()
    for pending in (1, 2, 3):  # the host is ahead: it notices that they end and reads them later
        now[0] += 1.0
        meter.notice(pending)
    now[0] += 5.0
    for _ in range(3):
        see()
    now[0] += 1.0
    meter.notice(2)  # both ended in the last six seconds
    see()
    see()
    measured = [record["step_seconds"] for record in seen]
    assert measured == pytest.approx([10.0] + [1.0] * 19 + [1.0] * 3 + [3.0] * 2)
    assert [record["num_steps"] for record in seen] == [1] * 25
    # 75 steps left, by the mean of the last eight: 3 + 3 + 6 * 1 seconds.
    assert seen[-1]["eta_seconds"] == pytest.approx(75 * 12 / 8)


def test_the_times_on_record_add_up_to_those_of_the_steps(recorded: Recorded):
    steps = [(r["num_steps"], r["step_seconds"]) for r in records(recorded.five, "train")]
    assert sum(count for count, _ in steps) == 14
    loop = recorded.summary["time"]["step"] + recorded.summary["time"]["data_wait"]
    assert 0 < sum(count * seconds for count, seconds in steps) < loop + 0.01


def test_a_warm_up_that_is_shortened_is_told(tmp_path: Path):
    own = Schedule(warmup=100)
    job = replace(tiny.job(steps=4, evaluation=Evaluation()), schedule=own.shortened(own, 4))
    summary = train(job, tmp_path)
    # What no phase claims is little, also of a run that trains for a moment.
    assert summary["time"]["start"] > 0
    assert summary["time"]["other"] < 0.05 * summary["seconds"]
    line = "schedule.warmup is 100 by default and the job has 4 steps, so it is shortened to 1, a tenth of them; give another --schedule.warmup, or more --steps"
    assert events(tmp_path, "schedule") == [line]


def test_a_warm_up_that_takes_all_steps_is_refused():
    job = tiny.job(steps=20)
    assert set_up(replace(job, schedule=Schedule(warmup=19))).job.schedule.warmup == 19
    with pytest.raises(
        OptionError, match=r"schedule\.warmup is 20 and the job has 20 steps; .* 2 "
    ):
        set_up(replace(job, schedule=Schedule(warmup=20)))


@pytest.mark.parametrize(
    "rule",
    some([(0, None, [4, 3]), (2, None, [2, 2]), (2, 0, [4, 3]), (0, 3, [3, 3])], [(0, 3, [3, 3])]),
)
def test_the_last_evaluation_reads_so_many_batches(
    tmp_path: Path, rule: tuple[int, int | None, list[int]]
):
    """Batches of an evaluation, of the last one, and what that reads: of 60 and 40 examples in batches of 16 4 and 3."""
    batches, final, read = rule
    job = tiny.job(steps=2, evaluation=Evaluation(batches=batches, final_batches=final))
    told: list[tuple[int, int]] = []

    class Look:
        def see(self, record: dict[str, Any]) -> None:
            if record["kind"] == "evaluating" and record["split"] == "validation":
                told.append((record["batches"], record["of"]))

        def close(self) -> None:
            pass

    train(job, tmp_path, watchers=[Look()])
    found = records(tmp_path, "eval")
    assert [r["batches"] for r in found] == read
    assert [r["of"] for r in found] == [4, 3]
    assert told == [(max(n - 1, 0), read[0]) for n in range(read[0])]


def test_what_is_beside_the_metrics_is_of_whole_splits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny.Spoiled, "baselines", lambda self: {"gzip": 2.0})
    program: Any = None

    def baselines(batches: int, final: int | None) -> dict[str, float]:
        job = tiny.job(evaluation=Evaluation(batches=batches, final_batches=final))
        evaluator = Evaluator(
            setup=set_up(job), program=program, ledger=Ledger(), say=print, show=print
        )
        return evaluator.baselines()

    assert baselines(2, None) == baselines(0, 3) == {}
    assert baselines(2, 0) == baselines(4, None) == {"gzip": 2.0}


@pytest.mark.parametrize("batches", [1, 2, 0])
def test_fewer_devices_evaluate_the_same_examples(batches: int):
    """Passes of 16 in place of 24: the last batch is read in part, where an evaluation does not read all 60."""
    rule, seen = Evaluation(batches=batches), []

    class Program:
        def wait(self, seconds: float) -> bool:
            return True

        def __call__(self, params: Any, model_state: Any, batch: dict[str, Any]) -> Any:
            seen.extend(np.asarray(batch["x"])[np.asarray(batch["mask"]) > 0])
            return {"loss": Mean(0.0, 1.0)}

    def examples(passes: int, intended: Layout | None) -> np.ndarray:
        job = tiny.job(batch=48, layout=Layout(accumulate=passes), evaluation=rule)
        program: Any = Program()
        evaluator = Evaluator(
            setup=replace(set_up(job), intended_layout=intended),
            program=program,
            ledger=Ledger(),
            say=lambda *_, **__: None,
            show=lambda _: None,
        )
        state: Any = SimpleNamespace(evaluated=None, model_state=None)
        seen.clear()
        evaluator(state, Split.validation, batches, Interrupt())
        return np.stack(seen)

    full = examples(2, None)
    assert len(full) == (24 * batches or 60)
    np.testing.assert_array_equal(examples(3, Layout(fsdp=3, accumulate=2)), full)
