"""``systolic doctor``: prints the verdict first, then problems with their fixes, then facts."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from systolic.cli.parse import parse
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, dashed
from systolic.core.units import GIB, si
from systolic.doctor import Finding, Machine, Status, examine, measure
from systolic.doctor.checks import FALLEN_BACK
from systolic.doctor.collect import PACKAGES, gather
from systolic.doctor.machine import Measured
from systolic.doctor.measure import LIMIT_SECONDS
from systolic.doctor.multi_host import WAIT_SECONDS, examine_hosts
from systolic.training import distributed
from systolic.training.distributed import detect

WIDTH = 100
LONGEST_VARIABLE = 70
STYLES = {
    Status.ok: "green",
    Status.note: "dim",
    Status.warning: "yellow",
    Status.failed: "bold red",
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Checks this machine: versions, devices, processes that hold the TPU, measured peak rates.

    Exit code 1 if a check failed; warnings don't count.

    Args:
        json: Print one JSON object.
        no_measure: Don't start JAX: no measurements, and no device is opened.
        limit_seconds: Time limit in seconds for JAX to start and measure.
        multi_host: Run in every process of the job: check connections between hosts, and compare clocks, versions and data.
        data: With --multi-host: file or folder that must be the same on all hosts.
        wait_seconds: With --multi-host: seconds to wait for the other processes.
        coordinator: With --multi-host: HOST:PORT of process 0, where Cloud TPU, GKE, Slurm or MPI doesn't provide it.
        processes: With --coordinator: number of processes.
        process: With --coordinator: index of this process, from 0.
    """

    json: bool = False
    no_measure: bool = False
    limit_seconds: Annotated[float, POSITIVE] = LIMIT_SECONDS
    multi_host: bool = False
    data: Path | None = None
    wait_seconds: Annotated[float, POSITIVE] = WAIT_SECONDS
    coordinator: str | None = None
    processes: Annotated[int | None, COUNT] = None
    process: Annotated[int | None, NOT_NEGATIVE] = None


def run(args: Sequence[str]) -> int:
    """Runs ``systolic doctor``; returns the exit code."""
    options = parse(DoctorOptions, args, "systolic doctor")
    if not options.multi_host:
        check_alone(options)
    else:
        distributed.describe(options.coordinator, options.processes, options.process)
    machine = gather()
    # On a multi-host slice no device responds until all hosts open theirs, so hosts connect first.
    shared = others(options, machine) if options.multi_host else []
    if not options.no_measure and machine.version("jax") is not None:
        machine = replace(machine, measured=measure(machine, options.limit_seconds))
    findings = [*shared, *examine(machine)]
    if options.json:
        print(json.dumps(record(machine, findings), indent=2, ensure_ascii=False))
    else:
        show(machine, findings, Console(width=WIDTH, highlight=False))
    return int(any(finding.status is Status.failed for finding in findings))


def check_alone(options: DoctorOptions) -> None:
    """Checks that no option of ``--multi-host`` is given without it.

    Raises:
        OptionError: an option is given.
    """
    for name in ("data", "wait_seconds", "coordinator", "processes", "process"):
        if vars(options)[name] != vars(DoctorOptions())[name]:
            raise OptionError(
                f"--{dashed(name)} applies only with --multi-host; add it, or leave --{dashed(name)} out"
            )


def others(options: DoctorOptions, machine: Machine) -> list[Finding]:
    """Findings about all processes of the job.

    Raises:
        OptionError: no multi-process job is described.
    """
    place = detect.find(os.environ)
    if place is None:
        raise OptionError(
            "no other processes found: neither Cloud TPU, GKE, SkyPilot, Slurm nor MPI describes a multi-process job; give --coordinator HOST:PORT --processes N --process I in every process"
        )
    tell = lambda text: print(f"systolic: {text}", file=sys.stderr, flush=True)  # noqa: E731
    return examine_hosts(place, machine, options.data, options.wait_seconds, tell)


def record(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """JSON object of ``systolic doctor --json``."""
    return {
        "verdict": verdict(findings),
        "fit": all(finding.status is not Status.failed for finding in findings),
        "findings": [finding.to_json() for finding in findings],
        "machine": machine.to_json(),
    }


def verdict(findings: list[Finding]) -> str:
    """Verdict on one line, with the number of failed checks and warnings."""
    count = {status: sum(f.status is status for f in findings) for status in Status}
    warnings = f"{count[Status.warning]} warning{'s' if count[Status.warning] != 1 else ''}"
    if count[Status.failed]:
        checks = f"{count[Status.failed]} check{'s' if count[Status.failed] != 1 else ''} failed"
        fallen = any(f.text.startswith(FALLEN_BACK) for f in findings)
        return f"NOT FIT: {f'{FALLEN_BACK}; ' if fallen else ''}{checks}, {warnings}"
    return f"All fine, {warnings}" if count[Status.warning] else "All fine"


def show(machine: Machine, findings: list[Finding], console: Console) -> None:
    """Prints the findings and the facts."""
    worst = max((f.status for f in findings), key=list(Status).index, default=Status.ok)
    style = STYLES[Status.ok] if worst is Status.note else STYLES[worst]
    console.print(Text(verdict(findings), style=f"bold {style}"))
    loud = [f for f in findings if f.status in (Status.failed, Status.warning)]
    for finding in sorted(loud, key=lambda f: f.status is Status.warning):
        mark = "x" if finding.status is Status.failed else "!"
        line = Text(f"{mark} {finding.name}: ", style=STYLES[finding.status])
        console.print(line.append(finding.text, style="default"))
        console.print(Text(f"    fix: {finding.fix}", style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in facts(machine).items():
        table.add_row(name, text)
    for finding in findings:
        if finding.status is Status.note or finding.name.endswith(("matmul", "copy")):
            table.add_row(finding.name, finding.text)
    console.print(table)
    passed = dict.fromkeys(f.name for f in findings if f.status is Status.ok)
    if passed:
        console.print(Text(f"passed: {', '.join(passed)}", style="dim"))


def facts(machine: Machine) -> dict[str, str]:
    """Summary of the machine, by row label."""
    hardware = [machine.accelerators] if machine.accelerators else []
    if machine.nvidia is not None:
        hardware += [*machine.nvidia.names[:1], f"driver {machine.nvidia.driver or '?'}"]
    if machine.tpu_kind is not None:
        hardware.append(machine.tpu_kind)
    host = f"{machine.num_cpus} CPUs, {machine.memory_bytes / GIB:.0f} GiB"
    rows = {
        "machine": "; ".join([machine.place.value, *hardware, machine.cpu, host]),
        "python": f"{machine.python}, {machine.system}",
        "packages": ", ".join(f"{n} {version}" for n, version in machine.packages if n in PACKAGES),
        "free": ", ".join(
            [
                f"memory {machine.memory_free_bytes / GIB:.1f} GiB",
                *(f"{folder} {free / GIB:.1f} GiB" for folder, free in machine.disk_free_bytes),
            ]
        ),
    }
    if machine.environment:
        pairs = [_shortened(f"{key}={value}") for key, value in machine.environment]
        rows["environment"] = " ".join(pairs)
    if isinstance(machine.measured, Measured):
        found = machine.measured
        seen = f"{found.num_devices} x {found.device_kind} on {found.platform}"
        rows["JAX"] = f"{seen}, started and measured in {si(found.seconds, 's')}"
    return rows


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VARIABLE else f"{text[: LONGEST_VARIABLE - 1]}…"
