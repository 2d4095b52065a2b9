"""Content of a profile as plain values, whatever file it came from: a device's ops and runs, the host's threads."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from systolic.chips import by_device_kind
from systolic.hlo import Module
from systolic.sim.rates import number_format, peaks_of


class Backend(enum.Enum):
    """Backends that run a step."""

    tpu = "TPU"
    gpu = "GPU"
    cpu = "CPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEvent:
    """Something on the host; seconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something on a line of a plane; seconds of the trace's clock."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOp:
    """One run of an op on the device; seconds of the trace's clock."""

    name: str
    """The HLO instruction; a kernel's or a copy's own name where it stands for none."""
    start: float
    end: float
    line: str = ""
    module: str = ""
    program: int | None = None
    run: int | None = None
    """Ops of one run of a program share it, where the profile says so."""
    opcode: str = ""
    text: str = ""
    """The instruction, where the profile has it."""
    category: str = ""
    op_name: str = ""
    source: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    """All that it accesses, wherever."""
    hbm: float | None = None
    """Bytes of device memory among them; None where the profile doesn't say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """One run of a program, or a step."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """One device of a profile, and its host."""

    path: Path
    backend: Backend
    device: str
    """``TPU:0``; of several hosts ``host TPU:0``."""
    host: str = ""
    """Name of the host, as its file has it."""
    kind: str = ""
    """JAX's name of the device; empty where the profile has none."""
    simulated_by: str = ""
    """The program that wrote a schedule as this profile; empty for a measurement."""
    peak_flops: float | None = None
    """FLOP/s of the matrix units in bf16, as the profile has it."""
    peak_bytes: float | None = None
    """Bytes/s of device memory, as the profile has it."""
    peak_vector_bytes: float | None = None
    """Bytes/s of vector memory, reads and writes together, as the profile has it."""
    ops: Sequence[DeviceOp]
    beside: Sequence[DeviceOp] = ()
    """Asynchronous ops, which run beside the others."""
    sparse: Sequence[DeviceOp] = ()
    """Ops of the device's SparseCores."""
    marks: Sequence[Mark] = ()
    """Steps on the device."""
    runs: Sequence[Mark] = ()
    """Runs of modules on the device, where it has a line of them."""
    steps: Sequence[Mark] = ()
    """``StepTraceAnnotation`` on the host."""
    loop: Sequence[HostEvent] = ()
    """The host's thread that runs the loop."""
    threads: Sequence[Sequence[HostEvent]] = ()
    """The host's other threads."""
    modules: Mapping[int, Module] = field(default_factory=dict)
    """Modules by program id."""
    recorded: tuple[float, float] | None = None
    """Seconds since 1970 at which the profiler began and ended, by the host's clock; None where the file does not say."""
    notes: Sequence[str] = ()

    def peak(self, dtype: str = "bf16") -> float | None:
        """FLOP/s of a matmul with operands of that HLO dtype; None where neither profile nor catalogue has a peak.

        A profile has the peak in bf16 only. The catalogue says by how much another number format is faster.
        """
        chip = by_device_kind(self.kind) if self.kind else None
        peaks = peaks_of(chip) if chip is not None else {}
        known = peaks.get("bf16")
        if chip is None or known is None:
            return self.peak_flops
        bf16 = self.peak_flops or known / (chip.devices_per_chip or 1)
        return bf16 * peaks.get(number_format(dtype), known) / known
