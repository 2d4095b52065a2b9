"""Logs of launches: files on this machine, or the platform's."""

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from systolic.core.errors import RunError
from systolic.launching.clients import check_client, here
from systolic.launching.record import LOCAL, OUTPUT, POLL_SECONDS, Launched
from systolic.launching.supervisor import LOGS

LIBRARY = re.compile(
    r"\[Gloo\]|[IWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "
    r"|WARNING: All log messages before absl"
)
"""Start of a line that Gloo or XLA has printed."""
RECENT_LINES = 200
"""Number of last lines among which the training's own is looked for."""


def log_of(launched: Launched, process: int = 0) -> Path | None:
    """Log file of a launch on this machine; None if the platform has the logs."""
    if launched.via == LOCAL:
        return launched.path / LOGS / f"{process}.log"
    return launched.path / OUTPUT if launched.detached else None


def last_line(path: Path) -> str:
    """Last line of a log that is from the training and not from a library; empty if there is none."""
    recent = [line.strip() for line in lines(path, RECENT_LINES, None)]
    own = [line for line in recent if line and not LIBRARY.match(line)]
    return own[-1] if own else ""


def lines(path: Path, last: int, alive: Callable[[], bool] | None) -> Iterator[str]:
    """Yields the last lines of a log, then new ones while ``alive`` returns true.

    Args:
        path: Log file, which need not exist yet.
        last: Number of existing lines to yield.
        alive: Whether more may be written; None stops after the existing lines.
    """
    while not path.exists():
        if alive is None or not alive():
            return
        time.sleep(POLL_SECONDS)
    with path.open(errors="replace") as file:
        yield from file.readlines()[-last:]
        while alive is not None:
            going = alive()
            if new := file.read():
                yield new
            elif not going:
                return
            else:
                time.sleep(POLL_SECONDS)


def show_logs(launched: Launched, *, follow: bool) -> None:
    """Prints the platform's logs of a launch.

    Raises:
        RunError: the client is missing or fails.
    """
    words = launched.commands["follow" if follow else "logs"]
    check_client(words[0])
    if subprocess.run(here(words), cwd=launched.path, check=False).returncode:
        raise RunError(f"{shlex.join(words)} failed in {launched.folder}; its output is above")
