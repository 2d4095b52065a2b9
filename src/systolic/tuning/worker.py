"""``python -m systolic.tuning.worker``: runs trials of the search that stdin describes, until none is left."""

import json
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from systolic.core.errors import RunError, SystolicError
from systolic.core.machine import end_with, set_up_xla
from systolic.core.reporter import Reporter, reporting
from systolic.core.shutdown import TerminatedError, leave
from systolic.tuning.processes import INTERRUPTED, LINE, STOPPED, TERMINATED

if TYPE_CHECKING:
    from systolic.tuning.definition import SearchRecord


class LogReporter(Reporter):
    """Warnings as lines of the worker's log."""

    def warn(self, text: str) -> None:
        """Prints it."""
        print(text, flush=True)


def work(search: "SearchRecord") -> int:
    """Runs trials of a search; returns the exit code: 3 if it stopped early, with the reason on the last line.

    Args:
        search: The search, or its repeats.
    """
    from systolic.tuning.definition import Tuning
    from systolic.tuning.trials import INTERRUPTED as BY_SIGNAL
    from systolic.tuning.trials import TrialWorker

    tuning = Tuning.from_record(search)
    if (number := search.repeats_of) is not None:
        with closing(tuning.open()) as searched:
            tuning = tuning.repeating(searched, number)
    with closing(tuning.open()) as shared:
        worker = TrialWorker(tuning=tuning, shared=shared)
        with shared.reported():
            worker.work()
    if not worker.stopped:
        return 0
    print(f"{LINE}{worker.stopped}", file=sys.stderr)
    return INTERRUPTED if worker.stopped == BY_SIGNAL else STOPPED


def read(text: str) -> "SearchRecord":
    """Reads a search.

    Raises:
        RunError: it is damaged, or of another version.
    """
    from systolic.tuning.definition import SearchRecord

    try:
        return msgspec.convert(json.loads(text), SearchRecord)
    except ValueError as error:
        raise RunError(
            f"the search on stdin is damaged ({error}); start workers by systolic tune"
        ) from error


def main() -> int:
    """Reads the search and runs its trials; an error is one line on stderr."""
    try:
        with reporting(LogReporter()):
            return work(read(sys.stdin.read()))
    except SystolicError as error:
        print(f"{LINE}{error}", file=sys.stderr)
        return error.exit_code
    except TerminatedError:
        print(f"{LINE}ended by SIGTERM", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt as error:
        print(f"{LINE}{str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    end_with(os.getppid())
    set_up_xla()
    leave(main())
