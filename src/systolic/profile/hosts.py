"""Files of one folder that are of one run: its hosts, each with a file of its own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from systolic.core.errors import OptionError
from systolic.profile.trace import DeviceTrace

APART = 30.0
"""Seconds between the profiler's sessions of two hosts from which they are of different runs: hosts begin a trace at one step, by clocks of their own."""


@dataclass(frozen=True)
class HostFile:
    """A file with the devices of one host."""

    path: Path
    traces: Sequence[DeviceTrace]

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds on all devices by program, with its fingerprint where the file has one."""
        found: dict[str, float] = defaultdict(float)
        for trace in self.traces:
            for run in trace.runs:
                found[run.name] += run.end - run.start
            if not trace.runs:
                for op in trace.ops:
                    found[op.module] += op.end - op.start
        return found

    @property
    def main(self) -> str:
        """The program that most of the time goes to."""
        return max(self.seconds, key=lambda name: self.seconds[name], default="")

    def of_one_run_with(self, other: "HostFile") -> bool:
        """Whether both are of one run: of like devices, with each other's main program, traced at one time."""
        kinds = {trace.kind for trace in (*self.traces, *other.traces)} - {""}
        backends = {trace.backend for trace in (*self.traces, *other.traces)}
        if len(kinds) > 1 or len(backends) > 1:
            return False
        mine, theirs = self.traces[0].recorded, other.traces[0].recorded
        timed = mine is not None and theirs is not None
        # Where both say their time, a host may have a fingerprint of its own for its part of the program.
        ours, others = ({_key(name, timed) for name in one.seconds} for one in (self, other))
        if _key(self.main, timed) not in others or _key(other.main, timed) not in ours:
            return False
        if mine is None or theirs is None:
            return True
        return max(mine[0], theirs[0]) <= min(mine[1], theirs[1]) + APART

    def __str__(self) -> str:
        """``host.xplane.pb (jit_step on TPU v5 lite, 2026-01-11 21:26 UTC)``."""
        trace = self.traces[0]
        text = f"{self.main.split('(')[0] or 'no program'} on {trace.kind or trace.backend.value}"
        if trace.recorded is not None:
            text += f", {datetime.fromtimestamp(trace.recorded[0], UTC):%Y-%m-%d %H:%M} UTC"
        return f"{self.path.name} ({text})"


def _key(program: str, plain: bool) -> str:
    return program.split("(")[0] if plain else program


def check_one_run(path: Path, hosts: Mapping[Path, Sequence[DeviceTrace]]) -> None:
    """Refuses files that are not those of one run's hosts: what they say would be averaged.

    Raises:
        OptionError: so; the message lists the files.
    """
    files = [HostFile(file, traces) for file, traces in hosts.items()]
    runs: list[list[HostFile]] = []
    for file in files:
        home = next((run for run in runs if run[0].of_one_run_with(file)), None)
        if home is None:
            runs.append([file])
        else:
            home.append(file)
    if len(runs) < 2:
        return
    shown = [f"{run[0]}{f' with {len(run) - 1} more' if run[1:] else ''}" for run in runs]
    raise OptionError(
        f"{path} holds profiles of {len(runs)} runs, and those of one run's hosts are read together: {'; '.join(shown)}; give one of these files, or a folder for each run"
    )
