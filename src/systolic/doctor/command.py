"""``systolic doctor``: examines this machine, alone or with the others of a job."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from systolic.core.arguments import command_of
from systolic.core.errors import OptionError
from systolic.core.ranges import COUNT, NOT_NEGATIVE, POSITIVE, dashed
from systolic.core.reporter import reporter
from systolic.doctor.checks import FALLEN_BACK, Finding, Status, examine
from systolic.doctor.machine import LIMIT_SECONDS, Machine, gather, measure
from systolic.doctor.multi_host import WAIT_SECONDS, examine_hosts
from systolic.training import distributed
from systolic.training.distributed import detect


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
    shared = _others(machine, data, wait_seconds) if multi_host else []
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


def _others(machine: Machine, data: Path | str | None, wait_seconds: float) -> list[Finding]:
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
