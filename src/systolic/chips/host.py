"""This machine's CPU. Its peaks are not guessed; ``systolic doctor`` measures them."""

import os
import platform
from pathlib import Path
from types import MappingProxyType
from typing import Any

from systolic.chips.record import Chip, ChipKind, Citation, Figure
from systolic.core.files import digest

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def cpu(units: dict[str, Any]) -> Chip:
    """The processor this program runs on: model, cores, memory."""
    source = Citation(
        key="machine", text=f"read from {platform.node() or 'this machine'}", url="", as_of="now"
    )
    memory = memory_bytes()
    notes = {
        "hbm_bytes": (memory, "a CPU device's arrays live in the host's memory"),
        "host_dram_bytes": (memory, ""),
        "host_vcpus": (num_cpus(), "those this process may use"),
        "devices_per_chip": (1, "8xcpu stands for 8 virtual devices on it"),
        "chips_per_host": (1, ""),
    }
    figures = {
        name: Figure(
            field=name,
            value=value,
            unit=units[name]["unit"],
            text=units[name]["text"],
            sources=(source,),
            as_of="now",
            note=note,
        )
        for name, (value, note) in notes.items()
    }
    return Chip(
        name="cpu",
        title=model_name(),
        kind=ChipKind.cpu,
        device_kind="cpu",
        figures=MappingProxyType(figures),
        **{name: figure.value for name, figure in figures.items()},
    )


def model_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system has it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "CPU"


def num_cpus() -> int:
    """Logical CPUs that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine, or of the container when that is less."""
    import psutil  # a tenth of a second that only the CPU of this machine needs

    limits = [psutil.virtual_memory().total]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(limits)


def free_bytes() -> int:
    """Memory that this process may still take, within its container's limit."""
    import psutil

    own = psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available, max(memory_bytes() - own, 0))


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Digest of the instruction sets that the processor has; empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    features = {
        word
        for line in lines
        if line.split(":", 1)[0].strip() in ("flags", "Features")
        for word in line.split(":", 1)[1].split()
    }
    return digest(sorted(features))
