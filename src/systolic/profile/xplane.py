"""Content of an XLA profile as plain values: a device's ops and runs, the host's threads, the modules.

One ``xplane.pb`` holds the planes of one host. ``jax.profiler.ProfileData`` reads lines and events,
:mod:`systolic.profile.xspace` the metadata of events.

- TPU: ``/device:TPU:n`` with the lines Steps, XLA Modules, XLA Ops and Async XLA Ops. An op's event is
  named by its whole HLO text, with stats hlo_category, flops, bytes_accessed, tf_op and source.
- GPU: ``/device:GPU:n`` with a line for each stream; kernels carry hlo_op and hlo_module.
- CPU: thunks in lines of ``/host:CPU``, with hlo_op, program_id, run_id and device_ordinal.
"""

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from systolic.chips import by_device_kind
from systolic.core.errors import DataError, NotFoundError
from systolic.hlo import Module, parse
from systolic.profile import xspace
from systolic.sim.rates import number_format, peaks_of

SUFFIX = ".xplane.pb"
HOST = "/host:CPU"
NANOSECONDS = 1e9

_DEVICE = re.compile(r"^/device:(TPU|GPU):(\d+)")
_TEXT = re.compile(r"^%?(?P<name>\S+) = (?:.*?\s)?(?P<opcode>[a-z][\w-]*)\(", re.DOTALL)
_DISPATCH = re.compile(r"^PjitFunction|Executable::Execute|^ExecuteReplicated")


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
    kind: str = ""
    """JAX's name of the device; empty where the profile has none."""
    peak_flops: float | None = None
    """FLOP/s of the matrix units in bf16, as the profile has it."""
    peak_bytes: float | None = None
    """Bytes/s of device memory, as the profile has it."""
    ops: Sequence[DeviceOp]
    beside: Sequence[DeviceOp] = ()
    """Asynchronous ops, which run beside the others."""
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


def find(path: Path) -> tuple[Path, list[str]]:
    """The newest profile in a directory, or the file itself, and what was left out.

    Raises:
        NotFoundError: there is none.
    """
    if path.is_file():
        return path, []
    files = list(path.rglob(f"*{SUFFIX}")) if path.is_dir() else []
    if not files:
        raise NotFoundError(
            f"{path} holds no *{SUFFIX}; give what jax.profiler.trace wrote, or systolic train RECIPE --profile 5"
        )
    newest = max(file.parent for file in files)
    hosts = sorted(file for file in files if file.parent == newest)
    notes = []
    if len({file.parent for file in files}) > 1:
        notes.append(f"older traces beside {newest.name}")
    if len(hosts) > 1:
        notes.append(f"{len(hosts) - 1} other hosts than {hosts[0].name.removesuffix(SUFFIX)}")
    return hosts[0], notes


def load(path: Path) -> DeviceTrace:
    """The first device of a profile.

    Raises:
        NotFoundError: there is no such file, or no profile in the directory.
        DataError: the file is damaged, or nothing ran on a device while it was made.
    """
    import jax.profiler

    file, notes = find(path)
    content = file.read_bytes()
    try:
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(content).planes)
    except RuntimeError as error:
        raise DataError(
            f"{file} is no profile, or damaged ({error}); give an XProf {SUFFIX}"
        ) from error
    devices = sorted(
        (int(found[2]), plane) for plane in planes if (found := _DEVICE.match(plane.name))
    )
    host = next((plane for plane in planes if plane.name == HOST), None)
    lines = [] if host is None else [(line.name, list(line.events)) for line in host.lines]
    metadata = xspace.metadata(content)
    if devices:
        plane = devices[0][1]
        trace = _of_device(file, plane, metadata.get(plane.name, {}))
    else:
        trace = _of_cpu(file, lines)
    if not trace.ops:
        raise DataError(
            f"nothing runs on a device in {file}; trace a few whole steps, the program compiled before"
        )
    if len(devices) > 1:
        notes.append(f"{len(devices) - 1} other devices than {trace.device}")
    loop, threads, steps = _host(lines)
    modules, missing = _modules(
        xspace.modules(metadata), {(op.program, op.module) for op in trace.ops}
    )
    return replace(
        trace,
        steps=steps,
        loop=loop,
        threads=threads,
        modules=modules,
        notes=[*notes, *missing],
    )


# Devices


def _of_device(path: Path, plane: Any, metadata: Mapping[str, xspace.Stats]) -> DeviceTrace:
    """A TPU's or a GPU's plane."""
    backend = Backend.tpu if "TPU" in plane.name else Backend.gpu
    stats = dict(plane.stats)
    teraflops, gigabytes = (
        stats.get(f"peak_{name}")
        for name in ("teraflops_per_second", "hbm_bw_gigabytes_per_second")
    )
    trace = DeviceTrace(
        path=path,
        backend=backend,
        device=plane.name.removeprefix("/device:"),
        kind=str(stats.get("device_type_string", "")),
        peak_flops=float(teraflops) * 1e12 if teraflops else None,
        peak_bytes=float(gigabytes) * 1e9 if gigabytes else None,
        ops=(),
    )
    lines = {line.name: list(line.events) for line in plane.lines}
    if backend is Backend.gpu:
        streams = {name: events for name, events in lines.items() if "Stream" in name}
        ops = [
            _kernel(event, name, metadata) for name, events in streams.items() for event in events
        ]
        return replace(trace, ops=_sorted(ops))
    return replace(
        trace,
        ops=_sorted(_tpu_op(event, "XLA Ops", metadata) for event in lines.get("XLA Ops", ())),
        beside=_sorted(
            _tpu_op(event, "async", metadata) for event in lines.get("Async XLA Ops", ())
        ),
        marks=_marks(lines.get("Steps", ())),
        runs=_marks(lines.get("XLA Modules", ())),
    )


def _sorted(ops: Iterable[DeviceOp]) -> list[DeviceOp]:
    return sorted(ops, key=lambda op: op.start)


def _marks(events: Iterable[Any]) -> list[Mark]:
    found = [
        Mark(name=e.name, start=e.start_ns / NANOSECONDS, end=e.end_ns / NANOSECONDS)
        for e in events
    ]
    return sorted(found, key=lambda mark: mark.start)


def _tpu_op(event: Any, line: str, metadata: Mapping[str, xspace.Stats]) -> DeviceOp:
    stats = {**metadata.get(event.name, {}), **dict(event.stats)}
    found = _TEXT.match(event.name)
    return DeviceOp(
        name=found["name"] if found else event.name,
        opcode=found["opcode"] if found else "",
        text=event.name if found else "",
        start=event.start_ns / NANOSECONDS,
        end=event.end_ns / NANOSECONDS,
        line=line,
        program=_integer(stats.get("program_id")),
        category=str(stats.get("hlo_category", "")),
        op_name=str(stats.get("tf_op", "")).rstrip(":"),
        source=str(stats.get("source", "")),
        flops=float(stats.get("flops") or 0.0),
        bytes=float(stats.get("bytes_accessed") or 0.0),
    )


def _kernel(event: Any, line: str, metadata: Mapping[str, xspace.Stats]) -> DeviceOp:
    """A kernel or a copy on a GPU's stream."""
    stats = {**metadata.get(event.name, {}), **dict(event.stats)}
    return DeviceOp(
        name=str(stats.get("hlo_op", event.name)),
        start=event.start_ns / NANOSECONDS,
        end=event.end_ns / NANOSECONDS,
        line=line,
        module=str(stats.get("hlo_module", "")),
        program=_integer(stats.get("program_id")),
        category="" if "hlo_op" in stats else event.name,
        op_name=str(stats.get("tf_op", "")).rstrip(":"),
    )


def _of_cpu(path: Path, lines: Sequence[tuple[str, Sequence[Any]]]) -> DeviceTrace:
    """Thunks of the first of the CPU's devices."""
    ops = []
    first: int | None = None
    for name, events in lines:
        for event in events:
            stats = dict(event.stats)
            if "hlo_op" not in stats:
                continue
            device = _integer(stats.get("device_ordinal")) or 0
            first = device if first is None else min(first, device)
            op = DeviceOp(
                name=str(stats["hlo_op"]),
                start=event.start_ns / NANOSECONDS,
                end=event.end_ns / NANOSECONDS,
                line=name,
                module=str(stats.get("hlo_module", "")),
                program=_integer(stats.get("program_id")),
                run=_integer(stats.get("run_id")),
            )
            ops.append((device, op))
    mine = _sorted(op for device, op in ops if device == first)
    return DeviceTrace(path=path, backend=Backend.cpu, device=f"CPU:{first or 0}", ops=mine)


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


# The host


def _host(
    lines: Sequence[tuple[str, Sequence[Any]]],
) -> tuple[list[HostEvent], list[list[HostEvent]], list[Mark]]:
    """The thread that runs the loop, the others, and the annotated steps."""
    best, threads, steps = (-1, -1), [], {}
    main = None
    for _, events in lines:
        thread, marks, dispatches = [], [], 0
        for event in events:
            if event.duration_ns <= 0:
                continue
            start, end = event.start_ns / NANOSECONDS, event.end_ns / NANOSECONDS
            stats = dict(event.stats)
            if "hlo_op" in stats:
                continue
            if "step_num" in stats:
                marks.append(Mark(name=str(stats["step_num"]), start=start, end=end))
                continue
            dispatches += bool(_DISPATCH.search(event.name))
            thread.append(HostEvent(name=event.name, start=start, end=end))
        threads.append(sorted(thread, key=lambda event: (event.start, -event.end)))
        steps[len(threads) - 1] = marks
        if (len(marks), dispatches) > best:
            best, main = (len(marks), dispatches), len(threads) - 1
    if main is None or best == (0, 0):
        return [], threads, []
    others = [thread for number, thread in enumerate(threads) if number != main]
    return threads[main], others, sorted(steps[main], key=lambda mark: mark.start)


# Compiled modules


def _modules(
    protos: Mapping[int, tuple[str, bytes]], used: Collection[tuple[int | None, str]]
) -> tuple[dict[int, Module], list[str]]:
    """Program id to module of the programs that are used; none with a note where they can't be read."""
    if not protos:
        return {}, []
    try:
        hlo = import_module("jaxlib._hlo")
    except ImportError:
        return {}, ["this jaxlib does not read the compiled modules in a profile"]
    found, notes = {}, []
    for program, chosen in _chosen(protos, used).items():
        try:
            module = hlo.HloModule.from_serialized_hlo_module_proto(protos[chosen][1])
            found[program] = parse(module.to_string())
        except (RuntimeError, ValueError, DataError) as error:
            reason = (str(error).splitlines() or ["?"])[0]
            notes.append(f"the module of {protos[chosen][0]}: {reason}")
    return found, notes


def _chosen(
    protos: Mapping[int, tuple[str, bytes]], used: Collection[tuple[int | None, str]]
) -> dict[int, int]:
    """Program of ops to that of its module.

    They differ for a program from JAX's persistent cache: then the module is the one of the same name
    that no other program claims.
    """
    ids = {program for program, _ in used}
    found = {}
    for program, module in used:
        if program is None:
            continue
        same = [key for key, (name, _) in protos.items() if name == module and key not in ids]
        if program in protos:
            found[program] = program
        elif len(same) == 1:
            found[program] = same[0]
    return found
