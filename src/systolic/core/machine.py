"""Cores of this machine, worker processes that end with their parent, and its accelerators as far as libtpu must know."""

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


def quiet_libtpu() -> None:
    """Stops an installed libtpu from searching for a TPU, for seconds and with warnings, on a machine without an accelerator.

    Runs before jax looks for devices; what a user has set stays.
    """
    if any(os.path.exists(path) for path in ("/dev/accel0", "/dev/vfio/0")):
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if os.path.exists("/dev/nvidia0") or "JAX_PLATFORMS" in os.environ:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = sys.modules.get("jax")
    # jax reads the variable when it is imported, which a user's script may have done before.
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
