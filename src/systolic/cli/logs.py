"""``systolic logs NAME [-f]``: prints the output of a launch."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from systolic.cli.parse import parse
from systolic.core.errors import OptionError, RunError
from systolic.core.ranges import COUNT, NOT_NEGATIVE


@dataclass(frozen=True, kw_only=True)
class LogsOptions:
    """Prints the output of a launch: that of the first host, or of all hosts for tpu-vm.

    Args:
        name: Name of the launch, as systolic runs lists it, or its folder.
        follow: Keep printing until the training ends; short form: -f.
        lines: Number of last lines to print.
        process: local: index of the process, from 0.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    follow: bool = False
    lines: Annotated[int, COUNT] = 50
    process: Annotated[int, NOT_NEGATIVE] = 0


def run(args: Sequence[str]) -> int:
    """The verb."""
    from systolic.launching import logs as launch_logs
    from systolic.launching import record as launched
    from systolic.launching import state as launch_phase

    words = ["--follow" if word == "-f" else word for word in args]
    options = parse(LogsOptions, words, "systolic logs")
    found = launched.find(options.name)
    count = found.commands["hosts"] if found.via == launched.LOCAL else 1
    if options.process >= count:
        raise OptionError(
            f"process is {options.process}, but {found.name} has {count} here, numbered from 0"
        )
    path = launch_logs.log_of(found, options.process)
    if path is None:
        launch_logs.show_logs(found, follow=options.follow)
        return 0
    if not path.exists() and not (options.follow and found.alive()):
        raise RunError(
            f"{found.name} has no log {path}: it is {launch_phase.phase(found)['phase']}; systolic status {shlex.quote(options.name)} shows more"
        )
    # The log of a process on another host grows on a shared disk.
    alive = (lambda: found.alive() or bool(found.host)) if options.follow else None
    for text in launch_logs.lines(path, options.lines, alive):
        sys.stdout.write(text)
        sys.stdout.flush()
    return 0
