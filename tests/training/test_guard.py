"""A loss that is not a number, or jumps: the step is named, its batch kept, the state untouched."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from systolic.core.errors import DataError, RunError
from systolic.job import Checkpoints, Guard, GuardRule, Precision
from systolic.runs import CheckpointStore, Run
from systolic.runs.access import Access
from systolic.setup import Setup, set_up
from systolic.steps.state import GuardState
from systolic.training.diagnosis import replay
from tests.training import tiny
from tests.training.sessions import events, losses, records, state, train

QUIET = {"evaluation": tiny.Evaluation(), "checkpoints": Checkpoints(every=4)}
"""No evaluation before the end."""


SPOILED = {"spoil": (6, 9), "ema": 0.9, **QUIET}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Path, str]:
    """A run whose guard stopped it, and what it said."""
    setup, path = set_up(tiny.job(**SPOILED)), tmp_path_factory.mktemp("guard") / "stopped"
    with pytest.raises(RunError) as caught:
        train(setup, path)
    return setup, path, str(caught.value)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Path, dict[str, Any]]:
    """The same run under skip, and its summary."""
    path = tmp_path_factory.mktemp("guard") / "skipped"
    setup = set_up(tiny.job(guard=Guard(rule=GuardRule.skip), **SPOILED))
    return setup, path, train(setup, path)


def test_stop_names_the_step_keeps_its_batch_and_the_checkpoint(stopped: tuple[Setup, Path, str]):
    setup, path, told = stopped
    kept = path / "bad" / "step-6.npz"
    assert told == (
        f"the loss of step 6 is not a number and the checkpoint of step 4 is intact; inspect its batch with systolic train --replay {kept}, lower the learning rate, or continue with systolic train --resume {path} --guard.rule skip"
    )
    assert events(path, "bad_step") == [
        f"the loss of step 6 is not a number; its batch is in {kept}"
    ]
    assert [r["step"] for r in records(path, "event") if r["name"] == "bad_step"] == [6]
    assert max(losses(path)) <= 6, "steps after the bad one are not on record"
    assert all(np.isfinite(array).all() for array in state(setup, path))
    with np.load(kept) as batch:
        assert sorted(batch) == ["label", "mask", "weight", "x"]
        assert np.isnan(batch["x"]).all()
    found = replay(setup, Run.open(path), kept)
    assert (found["step"], found["weights"], found["metrics"]["bad"]) == (6, 4, 1)
    assert found["not_finite"] == ["batch weight", "batch x", "grad_norm", "loss"]
    assert found["arrays"]["x"] == "float32[16,8] no number, 128 not finite"


def test_a_file_that_is_no_batch_of_the_run_is_refused(tmp_path: Path):
    np.savez(tmp_path / "other.npz", y=np.ones(3))
    run = Run.create(tmp_path / "run", {})
    with run, pytest.raises(DataError, match=r"other\.npz is not a batch of tiny"):
        replay(set_up(tiny.job()), run, tmp_path / "other.npz")


def test_skip_drops_the_update_counts_it_and_goes_on(
    skipped: tuple[Setup, Path, dict[str, Any]],
):
    setup, path, summary = skipped
    assert summary["bad_steps"] == 2
    assert summary["steps"] == 16
    seen = losses(path)
    assert [step for step, values in seen.items() if not np.isfinite(values[0])] == [6, 9]
    assert np.isfinite(summary["final"]["loss"])
    assert all(np.isfinite(array).all() for array in state(setup, path))
    assert [file.name for file in sorted((path / "bad").iterdir())] == [
        "step-6.npz",
        "step-9.npz",
    ]


def test_a_run_that_stopped_goes_on_under_skip(
    stopped: tuple[Setup, Path, str],
    skipped: tuple[Setup, Path, dict[str, Any]],
    tmp_path: Path,
):
    """The same job under skip from the start is the same run."""
    setup, whole, _ = skipped
    run = shutil.copytree(stopped[1], tmp_path / "run")
    assert train(setup, run, resume=True)["bad_steps"] == 2
    for path in (run, whole):
        assert np.isnan(losses(path)[6][0])
    with CheckpointStore(run / "checkpoints", access=Access.read) as store:
        assert store.latest_step() == 16
    left, right = (state(setup, path) for path in (run, whole))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def test_skip_stops_after_patience_in_a_row(tmp_path: Path):
    guard = Guard(rule=GuardRule.skip, patience=3)
    job = tiny.job(
        spoil=(3, 6, 7, 8), guard=guard, evaluation=tiny.Evaluation(), checkpoints=Checkpoints()
    )
    told = r"step 8 is not a number \(bad steps in a row: 3\) and the run has no checkpoint yet"
    with pytest.raises(RunError, match=told):
        train(job, tmp_path)
    assert len(events(tmp_path, "skip")) == 4


def test_a_jump_is_bad_once_the_guard_knows_a_normal_loss_and_is_replayed(tmp_path: Path):
    guard = Guard(rule=GuardRule.skip)
    rare = {**QUIET, "checkpoints": Checkpoints(every=24)}
    setup = set_up(tiny.job(steps=28, spoil=(4, 25), factor=50.0, guard=guard, **rare))
    summary = train(setup, tmp_path)
    assert summary["bad_steps"] == 1, "at step 4 no loss is normal yet"
    assert events(tmp_path, "skip")[0].startswith("the loss of step 25 jumped to ")
    # Step 25 comes right after a checkpoint, so that the replay is that very step.
    found = replay(setup, Run.open(tmp_path), tmp_path / "bad" / "step-25.npz")
    assert found["weights"] == 24
    assert (found["metrics"]["loss"], found["metrics"]["grad_norm"]) == losses(tmp_path)[25][:2]
    assert found["not_finite"] == []


def test_a_noisy_batch_near_zero_is_no_jump() -> None:
    """A loss that has converged differs from batch to batch by more than any ratio tells."""
    rng = np.random.default_rng(0)
    noisy = np.exp(rng.normal(np.log(1e-3), 1.0, 400)).astype(np.float32)
    assert noisy.max() > 3 * noisy.mean()
    assert judged([*noisy]) == []
    steady = [*np.full(100, 2.0, np.float32), np.float32(7.0), np.float32(2.0)]
    assert judged(steady) == [100]
    assert judged([*noisy, np.float32(1.0)]) == [400]


def judged(losses: list[np.float32]) -> list[int]:
    """Which of these losses the guard finds bad."""
    steps = set_up(tiny.job(guard=Guard(rule=GuardRule.skip))).steps
    watch, found = GuardState.start(), []
    judge = jax.jit(lambda w, x: steps._judge(w, x, jnp.asarray(True), overflow=False))
    for index, loss in enumerate(losses):
        bad, watch = judge(watch, jnp.asarray(loss))
        if bool(bad):
            found.append(index)
    return found


def test_an_overflow_in_float16_halves_the_scale_and_is_no_bad_step(tmp_path: Path):
    once = {**QUIET, "checkpoints": Checkpoints(every=16)}
    setup = set_up(tiny.job(precision=Precision.f16, scale=64.0, **once))
    summary = train(setup, tmp_path)
    assert summary["bad_steps"] == 0
    seen = losses(tmp_path)
    overflows = [step for step, values in seen.items() if not np.isfinite(values[1])]
    assert overflows, "the first scale of 2**15 is too large for this loss"
    assert overflows[0] == 1
    assert np.isfinite(seen[16][1])
    with CheckpointStore(tmp_path / "checkpoints", access=Access.read) as store:
        end = store.restore(setup.steps.saved(setup.steps.abstract_state)).state
    assert float(end.scale.scale) == 2.0 ** (15 - len(overflows))
    assert all(np.isfinite(array).all() for array in state(setup, tmp_path))


@pytest.mark.slow
def test_ignore_applies_every_update(tmp_path: Path):
    once = {**QUIET, "checkpoints": Checkpoints(every=8)}
    setup = set_up(tiny.job(8, spoil=(6,), guard=Guard(rule=GuardRule.ignore), **once))
    summary = train(setup, tmp_path)
    assert summary["bad_steps"] == 0
    assert np.isnan(losses(tmp_path)[8][0])
    assert not (tmp_path / "bad").exists()
