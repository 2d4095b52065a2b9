"""Output of ``systolic doctor``: the verdict first, then problems with their fixes, then facts."""

import json as jsonlib
from typing import TYPE_CHECKING

from systolic.core.units import GIB, si
from systolic.doctor.checks import Status
from systolic.doctor.machine import PACKAGES, Measured

if TYPE_CHECKING:
    from rich.console import Console

    from systolic.doctor.command import Examination
    from systolic.doctor.machine import Machine

WIDTH = 100
LONGEST_VARIABLE = 70
STYLES = {
    Status.ok: "green",
    Status.note: "dim",
    Status.warning: "yellow",
    Status.failed: "bold red",
}


def show(examination: "Examination", *, json: bool = False) -> int:
    """Prints an examination; returns the exit code, 1 where a check failed.

    Args:
        examination: The machine and its findings.
        json: Print one JSON object.
    """
    if json:
        print(jsonlib.dumps(examination.to_json(), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        print_examination(examination, Console(width=WIDTH, highlight=False))
    return int(not examination.fit)


def print_examination(examination: "Examination", console: "Console") -> None:
    """Prints the verdict first, then problems with their fixes, then facts."""
    from rich.table import Table
    from rich.text import Text

    machine, findings = examination.machine, examination.findings
    worst = max((f.status for f in findings), key=list(Status).index, default=Status.ok)
    style = STYLES[Status.ok] if worst is Status.note else STYLES[worst]
    console.print(Text(examination.verdict, style=f"bold {style}"))
    loud = [f for f in findings if f.status in (Status.failed, Status.warning)]
    for finding in sorted(loud, key=lambda f: f.status is Status.warning):
        mark = "x" if finding.status is Status.failed else "!"
        line = Text(f"{mark} {finding.name}: ", style=STYLES[finding.status])
        console.print(line.append(finding.text, style="default"))
        console.print(Text(f"    fix: {finding.fix}", style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, text in _facts(machine).items():
        table.add_row(name, text)
    for finding in findings:
        if finding.status is Status.note or finding.name.endswith(("matmul", "copy")):
            table.add_row(finding.name, finding.text)
    console.print(table)
    passed = dict.fromkeys(f.name for f in findings if f.status is Status.ok)
    if passed:
        console.print(Text(f"passed: {', '.join(passed)}", style="dim"))


def _facts(machine: "Machine") -> dict[str, str]:
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
        measured = machine.measured
        seen = f"{measured.num_devices} x {measured.device_kind} on {measured.platform}"
        rows["JAX"] = f"{seen}, started and measured in {si(measured.seconds, 's')}"
    return rows


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VARIABLE else f"{text[: LONGEST_VARIABLE - 1]}…"
