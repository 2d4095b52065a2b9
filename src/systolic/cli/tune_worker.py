"""``python -m systolic.cli.tune_worker RECIPE [options]``: runs trials of the study that the arguments define, until none is left."""

import os
import sys
from contextlib import closing

from systolic.cli.main import guarded
from systolic.cli.tune import REPEATS_OF, tuning_of
from systolic.core.machine import end_with
from systolic.core.shutdown import leave


def work(words: list[str]) -> int:
    """Runs trials; returns the exit code: 3 if it stopped early, with the reason on the last line."""
    from systolic.tuning.processes import INTERRUPTED, LINE, STOPPED
    from systolic.tuning.trials import TrialWorker

    number = int(words[1]) if words[0] == REPEATS_OF else None
    tuning, asked = tuning_of(words if number is None else words[2:])
    if number is not None:
        with closing(tuning.open()) as searched:
            tuning = tuning.repeating(searched, number, asked.verb.repeats)
    with closing(tuning.open()) as shared:
        worker = TrialWorker(tuning=tuning, shared=shared, tell=print)
        with shared.reported():
            worker.work()
    if not worker.stopped:
        return 0
    print(f"{LINE}{worker.stopped}", file=sys.stderr)
    return INTERRUPTED if worker.stopped == "interrupted" else STOPPED


if __name__ == "__main__":
    end_with(os.getppid())
    leave(guarded(lambda: work(sys.argv[1:])))
