"""Cores of this machine, and worker processes that end with their parent."""

import os
import sys
import threading
import time

POLL_SECONDS = 0.5


def num_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bounded(workers: int) -> int:
    """Number of worker processes, at most one a core: more would only take memory."""
    return min(workers, num_cores())


def end_with(parent: int) -> None:
    """Ends this process soon after ``parent``, which started it, has ended in whatever way."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
