"""A run that was cut off and resumed is, bit for bit, the run that was not."""

import os
import re
import resource
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from systolic.core.errors import RunError, SystolicError
from systolic.core.shutdown import remember_interrupts, remembered
from systolic.data.text.documents import Documents
from systolic.job import (
    Batch,
    Checkpoints,
    Dtypes,
    Evaluation,
    Job,
    Layout,
    Optimizer,
    Precision,
    Stored,
)
from systolic.models.decoder.config import Decoder
from systolic.runs import CheckpointStore, Run
from systolic.setup import Setup, set_up
from systolic.steps.tasks import LanguageModel, Unit
from systolic.training.interrupt import end_training
from tests.tiers import some
from tests.training import tiny
from tests.training.sessions import (
    Collect,
    Crash,
    CrashAfterEvaluation,
    CrashAt,
    assert_same,
    evaluations,
    events,
    losses,
    records,
    train,
)


@dataclass(frozen=True)
class Whole:
    """A run that was not cut off."""

    setup: Setup
    path: Path
    summary: dict[str, Any]


def run_whole(job: Job, path: Path) -> Whole:
    setup = set_up(job)
    return Whole(setup=setup, path=path, summary=train(setup, path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run_whole(tiny.job(), tmp_path_factory.mktemp("whole") / "run")


def cut_off_and_resume(whole: Whole, cut: Path, moments: tuple[int, ...]) -> None:
    """Compares a whole run with one that crashes at each of the steps."""
    for number, step in enumerate(moments):
        with pytest.raises(Crash):
            train(whole.setup, cut, number > 0, [CrashAt(step)])
    train(whole.setup, cut, resume=True)
    assert max(losses(whole.path)) == whole.setup.job.steps
    assert_same(whole.setup, whole.path, cut)


@pytest.mark.slow
def test_batch_norm_and_dropout(tmp_path: Path, whole: Whole):
    cut_off_and_resume(whole, tmp_path, (8, 14))
    assert [r["resumed_from"] for r in records(tmp_path, "start")] == [None, 4, 12]
    random = [path for path in whole.setup.steps.network.model_state if "rng" in path.lower()]
    assert random, "dropout draws from keys that are part of the state"


BF16 = Dtypes(parameters=Stored.bf16, gradients=Stored.bf16, moments=Stored.bf16)
"""Rounding by chance repeats itself: its random numbers come from the step."""


@pytest.mark.parity
@pytest.mark.parametrize("dtypes", [Dtypes(), BF16], ids=["f32", "bf16"])
def test_moving_average_accumulation_and_what_is_kept_in_bf16(tmp_path: Path, dtypes: Dtypes):
    job = tiny.job(ema=0.9, layout=Layout(accumulate=2), dtypes=dtypes)
    cut_off_and_resume(run_whole(job, tmp_path / "whole"), tmp_path / "cut", (6,))


PACKED: dict[str, dict[str, Any]] = {
    "all": {"dtypes": BF16, "layout": Layout(accumulate=2), "optimizer": Optimizer(ema=0.9)},
    "plain": {"optimizer": Optimizer(learning_rate=1e-2)},
    "qat": {"precision": Precision.qat_int4},
}
"""Fields of a job: with a moving average, accumulation and all that is kept in bf16; with none of them; with rounded matrices."""


@pytest.mark.parametrize("fields", some(PACKED, ["all"]))
def test_packed_text_with_a_buffer(tmp_path: Path, fields: dict[str, Any]):
    folder = tmp_path / "text"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(40):
        words = rng.choice(["def", "return", "if", "x", "y", "=", "\n"], rng.integers(5, 60))
        (folder / f"{number}.txt").write_text(" ".join(words))
    job = Job(
        name="text",
        model=Decoder(layers=1, d_model=16, d_ff=16, heads=2, kv_heads=1, head_dim=8, vocab=264),
        task=LanguageModel(unit=Unit.byte),
        data=Documents(path=folder, sequence=48, validation_share=0.2),
        steps=7,
        batch=Batch(total=4),
        evaluation=Evaluation(every=6, batches=2),
        checkpoints=Checkpoints(every=3),
        **fields,
    )
    cut_off_and_resume(run_whole(job, tmp_path / "whole"), tmp_path / "cut", (5,))


def test_killed_after_the_last_checkpoint_it_only_sums_up(tmp_path: Path, whole: Whole):
    cut = tmp_path / "cut"
    shutil.copytree(whole.path, cut)
    (cut / "summary.json").unlink()
    again = train(whole.setup, cut, resume=True)
    assert again["final"] == whole.summary["final"]
    assert again["steps"] == 16
    assert again["examples_per_second"] is None, "no step was made"
    assert_same(whole.setup, whole.path, cut)


class Ask:
    """A watcher that asks the process to stop, once or several times."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1):
        self.number, self.step, self.times = number, step, times

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], [signal.SIGINT]))
def test_a_signal_saves_and_leaves(tmp_path: Path, whole: Whole, number: signal.Signals):
    before = signal.getsignal(number)
    summary = train(whole.setup, tmp_path, watchers=[Ask(number, 5)])
    step = summary["steps"]
    assert summary["interrupted"] == number.name
    assert 5 <= step < 16
    assert summary["checkpoint"] == str((tmp_path / "checkpoints").resolve() / str(step))
    assert summary["next"] == f"systolic train --resume {tmp_path}"
    assert events(tmp_path, "interrupt") == [f"{number.name} at step {step}"]
    assert signal.getsignal(number) is before
    train(whole.setup, tmp_path, resume=True)
    assert_same(whole.setup, whole.path, tmp_path)


def test_a_signal_during_an_evaluation_repeats_it(tmp_path: Path, whole: Whole):
    """What was given up comes first after the resume, so that nothing is missing."""
    # The record of step 8 is written just before its evaluation.
    summary = train(whole.setup, tmp_path, watchers=[Ask(signal.SIGTERM, 8)])
    assert summary["steps"] == 8
    assert not records(tmp_path, "eval")
    # Killed when it is on record and before the checkpoint has its metrics: it comes once more.
    with pytest.raises(Crash):
        train(whole.setup, tmp_path, resume=True, watchers=[CrashAfterEvaluation(8)])
    assert len(records(tmp_path, "eval")) == 1
    # And once more in the last one.
    with pytest.raises(Crash):
        train(whole.setup, tmp_path, resume=True, watchers=[CrashAfterEvaluation(16)])
    train(whole.setup, tmp_path, resume=True)
    assert_same(whole.setup, whole.path, tmp_path)


class AskInEvaluation:
    """A watcher that asks the process to stop in the evaluation of a step, after a batch."""

    def __init__(self, step: int, after: int):
        self.step, self.after, self.seen = step, after, 0

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluating" and record["step"] == self.step:
            self.seen += 1
            if record["batches"] == self.after:
                os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        pass


def test_a_signal_during_the_last_evaluation_finds_the_last_step_saved(
    tmp_path: Path, whole: Whole
):
    kinds = [(r["kind"], r.get("name")) for r in Run.open(whole.path).records()]
    assert kinds.index(("event", "checkpoint"), -8) < kinds.index(("eval", None), -8)
    asked = AskInEvaluation(16, 2)
    summary = train(whole.setup, tmp_path, watchers=[asked])
    assert asked.seen == 4, "it is asked before each batch and shows those that are done"
    assert (summary["steps"], summary["interrupted"]) == (16, "SIGTERM")
    assert summary["final"]["metrics"] == {}
    with CheckpointStore(tmp_path / "checkpoints") as store:
        assert (store.latest_step(), store.metrics(16)) == (16, {})
    again = train(whole.setup, tmp_path, resume=True)
    assert again["final"] == whole.summary["final"]
    assert_same(whole.setup, whole.path, tmp_path)
    for path in (whole.path, tmp_path):
        with CheckpointStore(path / "checkpoints") as store:
            assert store.metrics(16) == evaluations(path)[16, "validation"]


def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path, whole: Whole):
    run = shutil.copytree(whole.path, tmp_path / "run")
    (run / "summary.json").unlink()
    before, job = content(run), whole.setup.job
    for other, told in (
        (
            replace(job, seed=1),
            "the checkpoint was saved with examples in the order of seed 0, the data now has examples in the order of seed 1",
        ),
        (replace(job, steps=4), f"steps is 4, but {run} has a checkpoint of step "),
        (tiny.job(width=8), "is of another model"),
    ):
        with pytest.raises(SystolicError, match=re.escape(told)):
            train(other, run, resume=True)
        assert content(run) == before


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which names the process."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path, whole: Whole, monkeypatch, capfd):
    def leave(code: int) -> None:  # this process is the test's: unwind in place of ending it
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    before = signal.getsignal(signal.SIGINT)
    remember_interrupts()  # As the command does; a Python program gets KeyboardInterrupt instead.
    try:
        with pytest.raises(SystemExit, match="130"):
            train(whole.setup, tmp_path, watchers=[Ask(signal.SIGINT, 5, times=2)])
    finally:
        signal.signal(signal.SIGINT, before)
    told = capfd.readouterr().err
    assert told.index("stopping after this step") < told.index("exited at once")
    assert not (tmp_path / "summary.json").exists()
    assert max(losses(tmp_path)) == 5


class End(Ask):
    """Ends the training at a step, as a search does with a hopeless trial, and is signalled after it."""

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            end_training()
        super().see(record)


def test_a_signal_after_the_program_ended_the_training_is_the_programs(
    tmp_path: Path, whole: Whole, capfd
):
    signals: list[int] = []
    with remembered(signals):
        summary = train(whole.setup, tmp_path, watchers=[End(signal.SIGTERM, 5)])
    assert 5 <= summary["steps"] < 16
    assert signals == [signal.SIGTERM]
    assert "Ctrl-C" not in capfd.readouterr().err


def test_without_a_checkpoint_it_starts_over_and_a_damaged_one_is_named_and_passed_over(
    tmp_path: Path, whole: Whole
):
    with pytest.raises(Crash):
        train(whole.setup, tmp_path, watchers=[CrashAt(2)])
    with pytest.raises(Crash):
        train(whole.setup, tmp_path, resume=True, watchers=[CrashAt(10)])
    assert events(tmp_path, "resume") == ["no checkpoint yet: from the start"]
    newest = tmp_path / "checkpoints" / "8"
    victim = next(path for path in sorted((newest / "params").rglob("*")) if path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    seen = Collect()
    train(whole.setup, tmp_path, resume=True, watchers=[seen])
    told = [r["detail"] for r in seen.records if r.get("name") == "resume"]
    assert told[0].startswith("checkpoint of step 8 is damaged (params/")
    assert told[0].endswith("; using the one of step 4")
    assert told[1] == "from step 4"
    assert_same(whole.setup, whole.path, tmp_path)


class FullAt:
    """From a step on, files end at 64 kB: the records still fit, a checkpoint doesn't."""

    def __init__(self, step: int, saved: Path):
        self.step, self.saved = step, saved

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            while not (self.saved / "manifest.json").exists():
                time.sleep(0.01)
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, most))

    def close(self) -> None:
        pass


def test_a_full_disk_fails_the_save_and_keeps_what_was_there(tmp_path: Path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    setup = set_up(tiny.job(width=4096, evaluation=Evaluation()))
    try:
        with pytest.raises(RunError) as caught:
            train(setup, tmp_path, watchers=[FullAt(10, tmp_path / "checkpoints" / "8")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"checkpoint of step 12 failed: File too large; the checkpoint of step 8 is intact; free space and continue with --resume {tmp_path}"
    )
    assert train(setup, tmp_path, resume=True)["steps"] == 16
    assert records(tmp_path, "start")[1]["resumed_from"] == 8
