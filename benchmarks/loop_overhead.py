"""What the training loop costs: `systolic train` against a bare jitted loop over the same step and data.

    python benchmarks/loop_overhead.py [bytes digits] [--steps 300] [--rounds 5]

Both loops run in one process on the same compiled program, in turn; the ratio is of steps per second,
paired by round. The trainer logs, guards, meters and watches as it does for a user.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from systolic import recipes
from systolic.job import Checkpoints
from systolic.runs import Run
from systolic.setup import Setup, set_up
from systolic.steps.programs import jit_train, training
from systolic.training.display.live import Live
from systolic.training.display.tensorboard import TensorBoard
from systolic.training.interrupt import Interrupt
from systolic.training.trainer import Trainer


def bare(setup: Setup, program: Any, steps: int) -> float:
    """Steps per second of next(data), program(state, batch) and nothing else."""
    programs = setup.steps
    state = jax.jit(programs.init, out_shardings=programs.shardings)(jax.random.key(0))
    feed = training(setup.job, programs, 0)
    try:
        state, metrics = program(state, next(feed))
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = program(state, next(feed))
        jax.block_until_ready((state, metrics))
        return steps / (time.perf_counter() - start)
    finally:
        feed.close()


def trained(setup: Setup, program: Any, steps: int) -> float:
    """Steps per second of the trainer's own loop, from its second step to its last."""
    evaluation = replace(setup.job.evaluation, every=0)
    job = replace(setup.job, steps=steps + 1, checkpoints=Checkpoints(), evaluation=evaluation)
    description = {"job": {"name": job.name}}
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.create(Path(folder) / "run", description) as run,
    ):
        watchers = [Live(), TensorBoard(run.tensorboard)]
        trainer = Trainer(setup=replace(setup, job=job), run=run, watchers=watchers)
        feed = training(trainer.job, trainer.functions, 0)
        try:
            state = trainer._begin(feed, False, Interrupt())
            trainer._await_program(Interrupt())
            watch = Stopwatch(trainer.train_program)
            trainer.train_program = watch  # ty: ignore[invalid-assignment]
            state = trainer._loop(state, feed, Interrupt())
            jax.block_until_ready(state)
            return steps / (time.perf_counter() - watch.started)
        finally:
            feed.close()
            trainer.store.close()
            for watcher in watchers:
                watcher.close()


class Stopwatch:
    """Passes calls on; starts when the first one is done, as the bare loop does."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.started = 0.0

    def __call__(self, state: Any, batch: Any) -> Any:
        out = self.program(state, batch)
        if not self.started:
            jax.block_until_ready(out[1])
            self.started = time.perf_counter()
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=["bytes", "digits"])
    parser.add_argument("--steps", type=int, default=0, help="0: 150 for bytes, 600 for digits")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    results = {}
    for name in asked.recipes:
        setup = set_up(recipes.find(name)({}))
        program = jit_train(setup.steps)
        steps = asked.steps or {"bytes": 150, "digits": 600}.get(name, 100)
        pairs = []
        for index in range(asked.rounds):
            order = [(bare, "bare"), (trained, "trained")]
            found = {
                key: function(setup, program, steps)
                for function, key in order[:: 1 if index % 2 else -1]
            }
            pairs.append(found)
            print(
                f"{name} round {index + 1}: bare {found['bare']:.2f}, systolic {found['trained']:.2f} steps/s, ratio {found['trained'] / found['bare']:.4f}",
                flush=True,
            )
        results[name] = {
            "steps": steps,
            "bare_steps_per_second": statistics.median(p["bare"] for p in pairs),
            "systolic_steps_per_second": statistics.median(p["trained"] for p in pairs),
            "ratio_median": statistics.median(p["trained"] / p["bare"] for p in pairs),
            "ratios": [p["trained"] / p["bare"] for p in pairs],
        }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
