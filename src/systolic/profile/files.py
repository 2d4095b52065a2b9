"""Files of a profile: which of a path are of one run, a file a host, and the kind of a file that is no profile."""

import gzip
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from systolic.core.errors import NotFoundError, OptionError
from systolic.profile.trace import DeviceTrace

SUFFIX = ".xplane.pb"
CHROME = (".trace.json.gz", ".trace.json")
"""Trace of XProf's viewer, which some tools store in place of the profile."""
SUFFIXES = (SUFFIX, *CHROME)
WANTED = "give an xplane.pb, a trace.json.gz of XProf or a folder plugins/profile/RUN, as jax.profiler.trace and systolic train RECIPE --profile 5 write them"

SHOWN = 3
"""Most older profiles that a note names."""
_HEAD = 4096
_TIME = re.compile(r"\d{4}_\d{2}_\d{2}(_\d{2}){0,3}(?!\d)")
"""Beginning of the name of a run's folder: 2026_01_11_21_26_41."""
_OTHERS = {
    ".nsys-rep": "a report of Nsight Systems; trace the run with jax.profiler.trace",
    ".ncu-rep": "a report of Nsight Compute; trace the run with jax.profiler.trace",
    ".pftrace": "a Perfetto trace in protocol buffers; give the xplane.pb that was recorded with it",
    ".zip": "an archive; unpack it and give the folder",
    ".tar": "an archive; unpack it and give the folder",
    ".tgz": "an archive; unpack it and give the folder",
    ".tar.gz": "an archive; unpack it and give the folder",
    ".hlo.txt": "a compiler's dump, not a profile: systolic forecast FILE --on SLICE",
    ".hlo_proto.pb": "a compiled program that XProf took from a profile; give the xplane.pb beside it",
    ".hlo.pb": "a compiled program, not a profile; give an xplane.pb",
    ".overview_page.pb": "a page that XProf made of a profile; give the xplane.pb beside it",
    ".op_stats.pb": "a table that XProf made of a profile; give the xplane.pb beside it",
    ".kernel_stats.pb": "a table that XProf made of a profile; give the xplane.pb beside it",
    ".input_pipeline.pb": "a page that XProf made of a profile; give the xplane.pb beside it",
    ".tensorflow_stats.pb": "a table that XProf made of a profile; give the xplane.pb beside it",
    ".memory_profile.json.gz": "a page that XProf made of a profile; give the xplane.pb beside it",
    ".prof": "a memory profile or one of Python's; trace the run with jax.profiler.trace",
}
APART = 30.0
"""Seconds between the profiler's sessions of two hosts from which they are of different runs: hosts begin a trace at one step, by clocks of their own."""


def is_profile_file(path: Path) -> bool:
    """Whether a file is named as a profile, or is one by its beginning."""
    if not path.is_file():
        return False
    return path.name.endswith(SUFFIXES) or (not _other(path) and _is_chrome(beginning(path)))


def other(path: Path) -> str:
    """Kind of a file that is not a profile, and what to give in its place; empty where it isn't known."""
    kind = _other(path)
    if kind:
        return kind
    head = beginning(path)
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS and not the file itself: git lfs pull"
    if head.startswith(b"HloModule"):
        return "a compiler's dump, not a profile: systolic forecast FILE --on SLICE"
    if head.startswith(b"SQLite format 3"):
        return "a database, such as Nsight Systems exports; trace the run with jax.profiler.trace"
    return ""


def find(path: Path) -> tuple[Sequence[Path], list[str]]:
    """Files of the newest profile in a directory, one a host, or the file itself, and what was left out.

    Raises:
        NotFoundError: there is none.
    """
    if path.is_file():
        return [path], []
    files = (
        [entry for entry in path.rglob("*") if entry.name.endswith(SUFFIXES)]
        if path.is_dir()
        else []
    )
    if not files:
        raise NotFoundError(f"{path} holds no profile; {WANTED}")
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        folders[file.parent].append(file)
    *older, newest = sorted(folders, key=lambda folder: (_recorded(folders[folder]), folder))
    full = sorted(file for file in folders[newest] if file.name.endswith(SUFFIX))
    notes = []
    if older:
        names = [str(folder.relative_to(path)) for folder in reversed(older)]
        what = "an older profile" if len(names) == 1 else f"{len(names)} older profiles"
        notes.append(
            f"{what} than {newest.relative_to(path)}: {', '.join(names[:SHOWN])}{', …' if names[SHOWN:] else ''}"
        )
    if full:
        hosts = {host_of(file) for file in full}
        beside = sorted(file.name for file in folders[newest] if host_of(file) not in hosts)
        notes += [f"{name}, a viewer's copy beside an xplane.pb" for name in beside]
    return full or sorted(folders[newest]), notes


def _recorded(files: Sequence[Path]) -> datetime:
    """Time of a run's folder: that of its name, as jax.profiler writes it, else of its newest file."""
    named = _TIME.match(files[0].parent.name)
    if named is not None:
        try:
            year, month, day, *rest = map(int, named[0].split("_"))
            hour, minute, second = [*rest, 0, 0, 0][:3]
            return datetime(year, month, day, hour, minute, second)
        except ValueError:
            pass
    return datetime.fromtimestamp(max(file.stat().st_mtime for file in files))


def host_of(path: Path) -> str:
    """Name of the host that a file is of."""
    ending = next((end for end in SUFFIXES if path.name.endswith(end)), path.suffix)
    return path.name.removesuffix(ending)


def beginning(path: Path) -> bytes:
    """The first bytes of a file, unpacked where it is packed; empty where it can't be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as packed:
                return packed.read(_HEAD)
    except (OSError, EOFError):
        return b""
    return head


def _is_chrome(head: bytes) -> bool:
    return head.lstrip()[:1] == b"{" and b'"traceEvents"' in head


def _other(path: Path) -> str:
    name = os.fspath(path.name).lower()
    return next((text for end, text in _OTHERS.items() if name.endswith(end)), "")


@dataclass(frozen=True)
class HostFile:
    """A file with the devices of one host."""

    path: Path
    traces: Sequence[DeviceTrace]

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds on all devices by program, with its fingerprint where the file has one."""
        seconds: dict[str, float] = defaultdict(float)
        for trace in self.traces:
            for run in trace.runs:
                seconds[run.name] += run.end - run.start
            if not trace.runs:
                for op in trace.ops:
                    seconds[op.module] += op.end - op.start
        return seconds

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
        ours, others = ({_key(name, timed) for name in host.seconds} for host in (self, other))
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
