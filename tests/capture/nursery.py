"""Programs under capture that are forked from a process in which the hook has seen JAX being imported: that takes half of a small one's time.

What the hook does from the import on (its first events, its threads, its limit) it does in each program. Tests of how
a program is started, found and ended have interpreters of their own: ``test_capture.py``, ``test_other_jax.py``.
"""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests import forked

HOOK = Path(__file__).parents[2] / "src/systolic/capture/hook"


def programs(folder: Path) -> forked.Nursery:
    """The nursery of programs under capture.

    Args:
        folder: An empty one, for what the hook tells before there is a program.
    """
    paths = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get(forked.PATHS)])])
    (folder / "request.json").write_text('{"gpu": null}')  # each program has its own
    variables = {forked.CAPTURE: str(folder), forked.PATHS: paths, "PYTHONUNBUFFERED": "1"}
    return forked.Nursery("tests.capture.nursery", variables=variables)


@contextmanager
def forking(nursery: forked.Nursery) -> Generator[None]:
    """Begins programs under capture by forking, while it lasts; those of slow tests are started as users do."""
    if not forked.NURSERY:
        yield
        return
    forked.CAPTURED.append(nursery)
    try:
        yield
    finally:
        forked.CAPTURED.remove(nursery)


def _serve(line: socket.socket) -> None:
    """Imports JAX as a program does, and becomes each of the programs."""
    hook, calls, report = (
        importlib.import_module(f"systolic_capture{name}") for name in ("", ".calls", ".report")
    )
    start = calls.start
    calls.start = lambda: None
    added = forked.import_all(["jax", "jax.numpy", "jax.experimental.topologies"])
    words = forked.serve(line, forked.base_paths(), added)
    report.FOLDER = os.environ[forked.CAPTURE]
    report.request.cache_clear()
    report.say(python=sys.executable)
    report.say(stage="importing")
    report.check_environment()
    hook._asked_platforms[:] = [os.environ.get("JAX_PLATFORMS")]
    sys.modules["jax"].config.update("jax_platforms", "cpu")
    hook.show_platforms()
    report.say(stage="running until the first call", jax=sys.modules["jax"].__version__)
    start()
    forked.run(words)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
