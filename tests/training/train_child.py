"""Trains a Job, named by a folder and a step, in a process that is killed at that step: ``python -m tests.training.train_child RUN STEP``."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import systolic
from systolic.job import Checkpoints, Evaluation, Job
from tests.cli import tiny


def job() -> Job:
    """Of the package's own types alone."""
    return replace(
        tiny.job(steps=12, batch=4),
        checkpoints=Checkpoints(every=3),
        evaluation=Evaluation(every=4, batches=2, metric="bits_per_byte"),
    )


class KillAt:
    """Ends its process without a word when a step is on record."""

    def __init__(self, step: int) -> None:
        self.step = step

    def see(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    systolic.train(job(), run=Path(sys.argv[1]), watchers=[KillAt(int(sys.argv[2]))])
