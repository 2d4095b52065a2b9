"""Training sessions in this process: started, ended at a step of the test's choice, compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from systolic.job import Job
from systolic.runs import CheckpointStore, Run
from systolic.runs.access import Access
from systolic.setup import Setup, set_up
from systolic.training.session import SessionOptions
from systolic.training.trainer import Trainer


class Crash(Exception):
    """The process is gone, as far as the run is concerned."""


class CrashAt:
    """A watcher that ends the session without a word at a step."""

    def __init__(self, step: int):
        self.step = step

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            raise Crash

    def close(self) -> None:
        pass


class CrashAfterEvaluation:
    """A watcher that ends the session without a word when an evaluation is on record."""

    def __init__(self, step: int):
        self.step = step

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "eval" and record["step"] == self.step:
            raise Crash

    def close(self) -> None:
        pass


class Collect:
    """A watcher that keeps what it sees."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def see(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def train(
    of: Job | Setup,
    path: Path,
    resume: bool = False,
    watchers: Sequence[Any] = (),
    diagnose: int | None = None,
    log_every: int | None = None,
) -> dict[str, Any]:
    """One session; the summary."""
    setup = of if isinstance(of, Setup) else set_up(of)
    if resume:
        run = Run.open(path, access=Access.write)
    else:
        run = Run.create(path, {"job": {"name": setup.job.name}, "recipe": "tiny", "options": {}})
    with run:
        trainer = Trainer(
            setup=setup,
            run=run,
            watchers=watchers,
            options=SessionOptions(diagnose=diagnose, log_every=log_every),
        )
        return trainer.train(resume=resume)


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return list(Run.open(path).records(kind))


def losses(path: Path) -> dict[int, tuple[float, ...]]:
    """Step to every number of its train record that does not depend on the clock."""
    return {
        r["step"]: (r["loss"], r["grad_norm"], r["learning_rate"], r.get("accuracy", 0.0))
        for r in records(path, "train")
    }


def evaluations(path: Path) -> dict[tuple[int, str], dict[str, float]]:
    return {(r["step"], r["split"]): r["metrics"] for r in records(path, "eval")}


def events(path: Path, name: str) -> list[str]:
    return [r["detail"] for r in records(path, "event") if r["name"] == name]


_STATES: dict[tuple[Path, int, int], list[np.ndarray]] = {}
"""Arrays by run, step, and when that checkpoint was written: one run is compared with many."""


def state(setup: Setup, path: Path) -> list[np.ndarray]:
    """The newest checkpoint's arrays."""
    newest = max(int(one.name) for one in (path / "checkpoints").iterdir() if one.name.isdigit())
    written = (path / "checkpoints" / str(newest) / "manifest.json").stat().st_mtime_ns
    key = (path, newest, written)
    if key not in _STATES:
        _STATES[key] = _read(setup, path)
    return _STATES[key]


def _read(setup: Setup, path: Path) -> list[np.ndarray]:
    with CheckpointStore(path / "checkpoints", access=Access.read) as store:
        leaves = jax.tree.leaves(store.restore(setup.steps.saved(setup.steps.abstract_state)).state)
    return [
        np.asarray(
            jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        )
        for x in leaves
    ]


def assert_same(setup: Setup, one: Path, other: Path) -> None:
    """Bit for bit: all losses, all evaluations, the final state."""
    assert losses(one) == losses(other)
    assert evaluations(one) == evaluations(other)
    assert len(records(one, "eval")) == len(records(other, "eval")), "none is there twice"
    pairs = list(zip(state(setup, one), state(setup, other), strict=True))
    assert pairs
    for left, right in pairs:
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
