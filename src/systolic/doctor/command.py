"""``systolic doctor``: examines this machine, alone or with the others of a job: connections between them, and equal clocks, versions, flags and data."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from systolic.core.arguments import command_of
from systolic.core.errors import OptionError, RunError, SystolicError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, dashed
from systolic.core.reporter import reporter
from systolic.data.fingerprint import SAMPLE_BYTES, of_files
from systolic.doctor.checks import (
    FALLEN_BACK,
    Finding,
    Status,
    examine,
    failed,
    fine,
    noted,
    warned,
)
from systolic.doctor.machine import LIMIT_SECONDS, Machine, gather, measure
from systolic.training import distributed
from systolic.training.distributed import HostReport, detect, differing, meet
from systolic.training.distributed.detect import Member

WAIT_SECONDS = 60.0
SKEW_SECONDS = 1.0
"""Clock offset above which a warning is given; logs and events are ordered by time."""
_CONNECT_SECONDS = 5.0
_ALL_PAIRS = 32
"""Largest job in which every pair is tried; in larger ones, each process tries those at distances 2**n."""
_NAMES = ("systolic", "python", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
_ABSENT = ("unreadable", "no files")
"""Prefixes of a host's data report if it has no data."""
_NAMED_FILES = 1000
"""Maximum number of files that are reported one by one."""
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")


def examine_hosts(
    place: Member,
    machine: Machine,
    data: Path | None,
    seconds: float = WAIT_SECONDS,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Exchanges reports with the other processes and compares them; the findings are the same in all that connect.

    Args:
        place: Place of this process in the job.
        machine: Record of this machine.
        data: File or folder that must be the same on all hosts.
        seconds: Timeout for the other processes.
        tell: Called periodically with a line that names the missing processes.
    """
    try:
        with _listener() as listener:
            facts = report(machine, data) | {"port": listener.getsockname()[1]}
            reports = meet(place, facts, seconds, tell)
            unreached = _try(place, reports)
            links = meet(place, {"unreached": unreached}, seconds, tell)
    except RunError as error:
        text, _, fix = str(error).partition("; ")
        return [failed("hosts", text, fix or "run the same command in every process")]
    return [*judge(reports), *judge_links(links)]


def report(machine: Machine, data: Path | None) -> dict[str, Any]:
    """Facts that this host reports."""
    versions = {name: machine.version(name) for name in _NAMES} | {"python": machine.python}
    flags = {name: machine.variable(name) for name in _FLAGS}
    return {
        **versions,
        **flags,
        "chips": machine.accelerators or "none",
        "data": None if data is None else _data(data),
        "files": {} if data is None else _marks(data),
    }


def judge(reports: Sequence[HostReport]) -> list[Finding]:
    """Findings from the reports of all processes."""
    hosts = {report.host for report in reports}
    plural = "s" if len(hosts) > 1 else ""
    rows = [fine("hosts", f"{len(reports)} processes on {len(hosts)} host{plural} connected")]
    rows += _clocks(reports)
    for name in _NAMES:
        fix = f"install the same {name} on all hosts"
        rows += [failed("versions", text, fix) for text in _others(reports, name, name)]
    fix = "give all hosts the same devices, or train on those that have them"
    rows += [failed("devices", text, fix) for text in _others(reports, "chips", "")]
    for name in _FLAGS:
        fix = f"set {name} to the same value in all processes, or in none"
        rows += [warned("flags", text, fix) for text in _others(reports, name, name)]
    if any(report.facts["data"] is not None for report in reports):
        rows += _of_data(reports)
    return rows


def _of_data(reports: Sequence[HostReport]) -> list[Finding]:
    fix = "copy the same files to all hosts, or mount one folder"
    absent = [host for host in reports if str(host.facts["data"]).startswith(_ABSENT)]
    if absent:
        return [failed("data", f"{host.name}: {host.facts['data']}", fix) for host in absent]
    (usual, most), *rest = differing(reports, "data").items()
    if not rest:
        return [fine("data", f"same on all hosts: {usual}")]
    return [
        failed(
            "data",
            f"{host.name} has different data from {most[0].name}: {_differ(host, most[0])}",
            fix,
        )
        for _, those in rest
        for host in those
    ]


def _differ(host: HostReport, other: HostReport) -> str:
    """First file that differs between two hosts; the overall digests if there are too many files to list."""
    mine, theirs = host.facts.get("files", {}), other.facts.get("files", {})
    names = sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))
    if not names:
        return f"{host.facts['data']} instead of {other.facts['data']}"
    name = names[0]
    how = (
        "is missing"
        if name not in mine
        else "is extra"
        if name not in theirs
        else "differs in size or content"
    )
    return f"{name} {how}" + (f", and {len(names) - 1} more files" if names[1:] else "")


def judge_links(reports: Sequence[HostReport]) -> list[Finding]:
    """Findings about connections between processes."""
    names = {report.index: report.name for report in reports}
    rows = [
        failed(
            "network",
            f"{report.name} cannot reach {names[int(index)]} at {where}",
            "open all ports between the hosts of the job: collectives use arbitrary ports",
        )
        for report in reports
        for index, where in report.facts["unreached"].items()
    ]
    return rows or [fine("network", "processes reach each other")]


def _clocks(reports: Sequence[HostReport]) -> list[Finding]:
    """Clock offsets against the middle one, and of the two that differ most: each may be close to the middle."""

    def distance(host: HostReport) -> float:
        return sum(abs(host.ahead_seconds - each.ahead_seconds) for each in reports)

    def offset(host: HostReport, other: HostReport) -> list[Finding]:
        seconds = host.ahead_seconds - other.ahead_seconds
        if abs(seconds) - host.error_seconds - other.error_seconds <= SKEW_SECONDS:
            return []
        way = "ahead of" if seconds > 0 else "behind"
        text = f"the clock of {host.name} is {abs(seconds):.1f} s {way} that of {other.name}"
        return [warned("clocks", text, "sudo timedatectl set-ntp true")]

    middle = min(reports, key=distance)
    ahead, behind = (choose(reports, key=lambda host: host.ahead_seconds) for choose in (max, min))
    most = ahead.ahead_seconds - behind.ahead_seconds
    rows = [row for host in reports for row in offset(host, middle)] or offset(ahead, behind)
    return rows or [noted("clocks", f"within {most * 1e3:.0f} ms")]


def _others(reports: Sequence[HostReport], fact: str, called: str) -> list[str]:
    """One line for each process that differs from the majority."""
    (usual, most), *rest = differing(reports, fact).items()
    name = f"{called} " if called else ""
    return [
        f"{each.name} has {name}{value}, {most[0].name}{' and others' if len(most) > 1 else ''} {name}{usual}"
        for value, those in rest
        for each in those
    ]


def _data(path: Path) -> str:
    """Number, size and digest of the files; independent of the folder's path."""
    if not path.exists():
        return f"{_ABSENT[0]} ({path} does not exist)"
    try:
        root, files = _files(path)
        digests = of_files(root, files)
    except SystolicError as error:
        return f"{_ABSENT[0]} ({error})"
    if digests is None:
        return f"{_ABSENT[1]} in {path}"
    plural = "s" if digests.files > 1 else ""
    some = digests.bytes > SAMPLE_BYTES
    of = f"{SAMPLE_BYTES >> 20} MiB of the contents" if some else "contents"
    return f"{digests.files} file{plural}, {digests.bytes} bytes; digest of names, sizes and {of}: {digests.names}-{digests.digest}"


def _marks(path: Path) -> dict[str, str]:
    """Size and digest of each file by name; sizes only for large data, nothing for too many files."""
    try:
        root, files = _files(path)
        if len(files) > _NAMED_FILES:
            return {}
        sizes = {file: file.stat().st_size for file in files}
        whole = sum(sizes.values()) <= SAMPLE_BYTES
        return {
            file.relative_to(
                root
            ).as_posix(): f"{size} {sha256(file.read_bytes()).hexdigest()[:16]}"
            if whole
            else str(size)
            for file, size in sizes.items()
        }
    except OSError:
        return {}


def _files(path: Path) -> tuple[Path, list[Path]]:
    """Folder that names are relative to, and the files."""
    if not path.is_dir():
        return path.parent, [path]
    return path, sorted(file for file in path.rglob("*") if file.is_file())


def _listener() -> socket.socket:
    """Socket to which the other hosts connect to check that they can reach this one."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)

    def answer() -> None:
        with suppress(OSError):  # The listener was closed.
            while True:
                listener.accept()[0].close()

    threading.Thread(target=answer, name="systolic-doctor-listener", daemon=True).start()
    return listener


def _try(place: Member, reports: Sequence[HostReport]) -> dict[int, str]:
    """Processes that this one cannot reach, with the address that it tried."""
    count = len(reports)
    steps = range(1, count) if count <= _ALL_PAIRS else [2**n for n in range(count.bit_length())]
    unreached = {}
    for step in steps:
        other = reports[(place.index + step) % count]
        if other.index == place.index:
            continue
        address = (other.address or place.coordinator.rpartition(":")[0], other.facts["port"])
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            unreached[other.index] = f"{address[0]}:{address[1]} ({error.strerror or error})"
    return unreached


@dataclass(frozen=True, kw_only=True)
class Examination:
    """A machine, and what was found about it."""

    machine: Machine
    findings: tuple[Finding, ...]

    @property
    def fit(self) -> bool:
        """Whether no check failed; warnings don't count."""
        return all(finding.status is not Status.failed for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Verdict on one line, with the number of failed checks and warnings."""
        count = {status: sum(f.status is status for f in self.findings) for status in Status}
        warnings = f"{count[Status.warning]} warning{'s' if count[Status.warning] != 1 else ''}"
        if count[Status.failed]:
            checks = (
                f"{count[Status.failed]} check{'s' if count[Status.failed] != 1 else ''} failed"
            )
            fallen = any(f.text.startswith(FALLEN_BACK) for f in self.findings)
            return f"NOT FIT: {f'{FALLEN_BACK}; ' if fallen else ''}{checks}, {warnings}"
        return f"All fine, {warnings}" if count[Status.warning] else "All fine"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "verdict": self.verdict,
            "fit": self.fit,
            "findings": [finding.to_json() for finding in self.findings],
            "machine": self.machine.to_json(),
        }


@command_of
def diagnose(
    *,
    no_measure: bool = False,
    limit_seconds: Annotated[float, POSITIVE] = LIMIT_SECONDS,
    multi_host: bool = False,
    data: Path | str | None = None,
    wait_seconds: Annotated[float, POSITIVE] = WAIT_SECONDS,
    coordinator: str | None = None,
    processes: Annotated[int | None, COUNT] = None,
    process: Annotated[int | None, NOT_NEGATIVE] = None,
) -> Examination:
    """Checks this machine: versions, devices, processes that hold the TPU, measured peak rates.

    Exit code 1 if a check failed; warnings don't count.

    Args:
        no_measure: Don't start JAX: no measurements, and no device is opened.
        limit_seconds: Time limit in seconds for JAX to start and measure.
        multi_host: Run in every process of the job: check connections between hosts, and compare clocks, versions and data.
        data: With --multi-host: file or folder that must be the same on all hosts.
        wait_seconds: With --multi-host: seconds to wait for the other processes.
        coordinator: With --multi-host: HOST:PORT of process 0, where Cloud TPU, GKE, Slurm or MPI doesn't provide it.
        processes: With --coordinator: number of processes.
        process: With --coordinator: index of this process, from 0.

    Raises:
        OptionError: an option of ``multi_host`` is given without it, or no multi-process job is described.
    """
    if multi_host:
        distributed.describe(coordinator, processes, process)
    else:
        _refuse(
            data=data,
            wait_seconds=None if wait_seconds == WAIT_SECONDS else wait_seconds,
            coordinator=coordinator,
            processes=processes,
            process=process,
        )
    machine = gather()
    # On a multi-host slice no device responds until all hosts open theirs, so hosts connect first.
    shared = _of_hosts(machine, data, wait_seconds) if multi_host else []
    if not no_measure and machine.version("jax") is not None:
        machine = replace(machine, measured=measure(machine, limit_seconds))
    # The note on peers advises what has just been done.
    alone = replace(machine, peers="") if multi_host else machine
    return Examination(machine=machine, findings=(*shared, *examine(alone)))


def _refuse(**options: Any) -> None:
    """Refuses options of ``--multi-host`` that are given without it.

    Raises:
        OptionError: one is not None.
    """
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"--{dashed(name)} applies only with --multi-host; add it, or leave --{dashed(name)} out"
            )


def _of_hosts(machine: Machine, data: Path | str | None, wait_seconds: float) -> list[Finding]:
    """Findings about all processes of the job.

    Raises:
        OptionError: no multi-process job is described.
    """
    place = detect.find(os.environ)
    if place is None:
        raise OptionError(
            "no other processes found: neither Cloud TPU, GKE, SkyPilot, Slurm nor MPI describes a multi-process job; give --coordinator HOST:PORT --processes N --process I in every process"
        )
    folder = None if data is None else Path(data)
    return examine_hosts(place, machine, folder, wait_seconds, reporter().warn)
