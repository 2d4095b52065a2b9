"""A profile's devices as plain values: ops and runs of each, the host's threads, the modules.

One file holds the planes of one host. ``jax.profiler.ProfileData`` reads lines and events of an ``xplane.pb``,
:func:`metadata_of` the metadata of events, :func:`read_chrome` a ``trace.json``.

- TPU: ``/device:TPU:n`` with the lines Steps, XLA Modules, XLA Ops and Async XLA Ops. An op's event is
  named by its whole HLO text, with stats hlo_category, flops, bytes_accessed, tf_op and source.
  ``/device:TPU:n SparseCore m`` has the line Sparse Core Ops.
- GPU: ``/device:GPU:n`` with a line for each stream; kernels carry hlo_op and hlo_module.
- CPU: thunks in lines of ``/host:CPU``, with hlo_op, program_id, run_id and device_ordinal.

Of a device it has the lines and events of the ``xplane.pb``, with the stats of an op in ``args`` (``long_name`` is
its HLO line), and times in microseconds with six decimals. It has neither the device's kind and peaks nor the
compiled modules, and XProf keeps a million events at most.
Format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

A TPU's figures of an op (FLOPs, bytes, its place in the model) and the compiled modules are stats of
an event's metadata, which ``ProfileData`` leaves out. The messages are XSpace, XPlane, XEventMetadata
and XStat of tsl/profiler/protobuf/xplane.proto and HloProto of xla/service/hlo.proto; the wire format:
https://protobuf.dev/programming-guides/encoding
"""

import gzip
import json
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from systolic.core.errors import DataError
from systolic.hlo import Module, parse
from systolic.profile.files import CHROME, WANTED, beginning, check_one_run, find, host_of, other
from systolic.profile.trace import (
    ASYNC,
    DEVICE,
    NANOSECONDS,
    OPS,
    RUNS,
    SPARSE,
    STEPS,
    Backend,
    DeviceOp,
    DeviceTrace,
    Event,
    HostEvent,
    Mark,
    Plane,
    of_jax,
)

METADATA = "/host:metadata"
_PROGRAM = re.compile(r"\((-?\d+)\)$")

# Fields of the messages
PLANES = 1
NAME, EVENT_METADATA, STAT_METADATA = 2, 4, 5
KEY, VALUE = 1, 2
STATS = 5
STAT, DOUBLE, SIGNED, TEXT, BYTES, REFERENCE = 1, 2, 4, 5, 6, 7
MODULE = 1
SPACE, ACCESSED, HBM = 2, 3, 1

Stats = Mapping[str, Any]
MICROSECONDS = 1e6
MOST = 1_000_000
"""Events that XProf writes into one file."""
HOST = "/host:CPU"
ENVIRONMENT = "Task Environment"
"""Plane that has the profiler's times as its stats."""
_TEXT = re.compile(r"^%?(?P<name>\S+) = (?:.*?\s)?(?P<opcode>[a-z][\w-]*)\(", re.DOTALL)
_DISPATCH = re.compile(r"^PjitFunction|Executable::Execute|^ExecuteReplicated")


def metadata_of(content: bytes) -> dict[str, dict[str, Stats]]:
    """Plane to name of an event to the stats of its metadata: int, float, str or bytes.

    Args:
        content: A serialized XSpace.

    Raises:
        DataError: a message ends too early.
    """
    return {
        _text(plane, NAME): _plane_events(plane)
        for number, plane in _fields(memoryview(content))
        if number == PLANES and not isinstance(plane, int)
    }


def modules_of(planes: Mapping[str, Mapping[str, Stats]]) -> dict[int, tuple[str, bytes]]:
    """Program id to name and serialized HloModuleProto of what :func:`metadata` found.

    Raises:
        DataError: a message ends too early.
    """
    protos = {}
    for event, stats in planes.get(METADATA, {}).items():
        program = _PROGRAM.search(event)
        proto = next((value for value in stats.values() if isinstance(value, bytes)), None)
        if program is None or proto is None:
            continue
        module = dict(_fields(memoryview(proto))).get(MODULE)
        if module is not None:
            protos[int(program[1])] = (event[: program.start()], bytes(module))
    return protos


def device_memory(breakdown: bytes) -> float | None:
    """Bytes read from and written to device memory by a MemoryAccessBreakdown; None where it lists nothing.

    The message is that of xprof's op_metrics.proto: entries of operation, memory space (1 is HBM) and bytes.

    Raises:
        DataError: it ends too early.
    """
    entries = [dict(_fields(value)) for _, value in _fields(memoryview(breakdown))]
    accessed = [entry.get(ACCESSED, 0) for entry in entries if entry.get(SPACE) == HBM]
    return float(sum(accessed)) if entries else None


def _plane_events(plane: Any) -> dict[str, Stats]:
    parts = defaultdict(list)
    for key, value in _fields(plane):
        if key in (EVENT_METADATA, STAT_METADATA):
            parts[key].append(dict(_fields(value)))
    names = {
        entry.get(KEY, 0): _text(entry[VALUE], NAME)
        for entry in parts[STAT_METADATA]
        if VALUE in entry
    }
    events: dict[str, Stats] = {}
    for entry in parts[EVENT_METADATA]:
        if VALUE in entry:
            stats = [value for key, value in _fields(entry[VALUE]) if key == STATS]
            if stats:
                events.setdefault(_text(entry[VALUE], NAME), _stats(stats, names))
    return events


def _stats(messages: list[Any], names: Mapping[int, str]) -> Stats:
    stats: dict[str, Any] = {}
    for message in messages:
        fields = dict(_fields(message))
        name = names.get(fields.pop(STAT, 0))
        for number, value in fields.items():
            if name is not None:
                stats[name] = _value(number, value, names)
    return stats


def _value(number: int, value: Any, names: Mapping[int, str]) -> Any:
    if number == DOUBLE:
        return struct.unpack("<d", value)[0]
    if number == SIGNED:
        return value - (1 << 64) if value >> 63 else value
    if number == TEXT:
        return bytes(value).decode(errors="replace")
    if number == REFERENCE:
        return names.get(value, "")
    return bytes(value) if number == BYTES else value


def _text(message: Any, number: int) -> str:
    text = next((value for key, value in _fields(message) if key == number), b"")
    return bytes(text).decode(errors="replace")


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Number and value of a message's fields: an int, or the bytes of what is longer."""
    at, end = 0, len(message)
    try:
        while at < end:
            key, at = _varint(message, at)
            number, kind = key >> 3, key & 7
            if kind == 0:
                value, at = _varint(message, at)
                yield number, value
                continue
            size = {1: 8, 5: 4}.get(kind)
            if size is None:
                size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
    except IndexError as error:
        raise DataError("the profile ends in the middle of a message; record it again") from error


def _varint(message: Any, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def read_chrome(path: Path) -> tuple[list[Plane], list[str]]:
    """Planes of a file, and what it lacks.

    Raises:
        DataError: it is damaged, or has no device of XProf's.
    """
    events = _events(path)
    names: dict[int, str] = {}
    lines: dict[tuple[int, int], str] = {}
    by: dict[int, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    number = 0
    for event in events:
        phase = event.get("ph")
        if phase == "M":
            text = str(event.get("args", {}).get("name", ""))
            if event.get("name") == "process_name":
                names[event["pid"]] = text
            elif event.get("name") == "thread_name":
                lines[event["pid"], event.get("tid", 0)] = text
        elif phase == "X" and "ts" in event:
            number += 1
            by[event.get("pid", 0)][event.get("tid", 0)].append(_event(event))
    planes = [
        Plane(
            name=name,
            lines=[
                (lines.get((pid, tid), str(tid)), line_events)
                for tid, line_events in by[pid].items()
            ],
        )
        for pid, name in names.items()
    ]
    if not any(plane.name.startswith(("/device:", "/host:")) for plane in planes):
        whose = ", ".join(sorted(filter(None, names.values()))[:3]) or "nobody's processes"
        raise DataError(
            f"{path} is a trace of {whose}, not of XProf: no plane of it is a device's or a host's; {WANTED}"
        )
    cut = [f"events that XProf left out of {path.name}: it keeps {MOST:,}"]
    return planes, cut if number >= MOST else []


def _events(path: Path) -> list[Mapping[str, Any]]:
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        tree = json.loads(content)
        events = tree["traceEvents"] if isinstance(tree, dict) else tree
        return [event for event in events if isinstance(event, dict)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no trace of XProf, or damaged ({type(error).__name__}: {error}); copy it again, or {WANTED}"
        ) from error


def _event(event: Mapping[str, Any]) -> Event:
    start = float(event["ts"]) / MICROSECONDS
    return Event(
        name=str(event.get("name", "")),
        start=start,
        end=start + float(event.get("dur", 0.0)) / MICROSECONDS,
        stats=event.get("args") or {},
    )


def load(path: Path) -> DeviceTrace:
    """The first device of a profile.

    Raises:
        NotFoundError: there is no such file, or no profile in the directory.
        DataError: the file is damaged, or nothing ran on a device while it was made.
    """
    return load_all(path)[0]


def load_all(path: Path) -> list[DeviceTrace]:
    """All devices of a profile: of each host in the order of their numbers; of CPU devices the first.

    Raises:
        NotFoundError: there is no such file, or no profile in the directory.
        OptionError: the files in the directory are not those of one run's hosts.
        DataError: a file is damaged, or nothing ran on a device while it was made.
    """
    files, notes = find(path)
    hosts: dict[Path, list[DeviceTrace]] = {}
    problem: DataError | None = None
    for file in files:
        try:
            hosts[file] = _of_host(file)
        except DataError as error:
            if len(files) == 1:
                raise
            problem = error
            notes.append(f"the host {host_of(file)}: {error}")
    if not hosts:
        assert problem is not None
        raise problem
    check_one_run(path, hosts)
    devices = [trace for traces in hosts.values() for trace in traces]
    if len(files) > 1:
        devices = [replace(device, device=f"{device.host} {device.device}") for device in devices]
    first = replace(devices[0], notes=[*notes, *devices[0].notes])
    return [first, *devices[1:]]


def _of_host(file: Path) -> list[DeviceTrace]:
    """The devices in one file."""
    planes, protos, recorded, notes = _planes(file)
    devices = _devices(planes)
    host = next((plane for plane in planes if plane.name == HOST), None)
    lines = [] if host is None else host.lines
    traces = (
        [_of_device(file, *device) for device in devices] if devices else [_of_cpu(file, lines)]
    )
    traces = [trace for trace in traces if trace.ops]
    if not traces:
        raise DataError(
            f"nothing runs on a device in {file}; trace a few whole steps, the program compiled before"
        )
    loop, threads, steps = _host(lines)
    used = {(op.program, op.module) for trace in traces for op in trace.ops}
    modules, missing = _modules(protos, used)
    traces = [
        replace(
            trace,
            host=host_of(file),
            steps=steps,
            loop=loop,
            threads=threads,
            modules=modules,
            recorded=recorded,
        )
        for trace in traces
    ]
    return [replace(traces[0], notes=[*notes, *missing]), *traces[1:]]


def _planes(
    file: Path,
) -> tuple[list[Plane], Mapping[int, tuple[str, bytes]], tuple[float, float] | None, Sequence[str]]:
    """Planes, compiled modules, time and notes of a file."""
    import jax.profiler

    head = beginning(file)
    if file.name.endswith(CHROME) or head.lstrip()[:1] in (b"{", b"["):
        planes, notes = read_chrome(file)
        return planes, {}, None, notes
    content = file.read_bytes()
    try:
        jax_planes = list(jax.profiler.ProfileData.from_serialized_xspace(content).planes)
    except RuntimeError as error:
        what = other(file)
        raise DataError(
            f"{file} is {what}"
            if what
            else f"{file} is no profile, or damaged ({error}); copy it again, or {WANTED}"
        ) from error
    metadata = metadata_of(content)
    wanted = [p for p in jax_planes if p.name == HOST or DEVICE.match(p.name)]
    planes = [of_jax(plane, metadata.get(plane.name, {})) for plane in wanted]
    environment = next((dict(p.stats) for p in jax_planes if p.name == ENVIRONMENT), {})
    return planes, modules_of(metadata), _recorded(environment), []


def _recorded(stats: Mapping[str, Any]) -> tuple[float, float] | None:
    """Beginning and end of the profiler's session."""
    times = [_integer(stats.get(f"profile_{end}_time")) for end in ("start", "stop")]
    return (times[0] / NANOSECONDS, times[1] / NANOSECONDS) if times[0] and times[1] else None


def _devices(planes: Sequence[Plane]) -> list[tuple[Plane, Sequence[Plane]]]:
    """Planes of devices in order, each with those of its SparseCores."""
    cores: dict[tuple[str, int], Plane] = {}
    sparse: dict[tuple[str, int], list[Plane]] = {}
    for plane in planes:
        match = DEVICE.match(plane.name)
        if match is None:
            continue
        key = match["kind"], int(match["number"])
        if match["sparse"] is not None:
            sparse.setdefault(key, []).append(plane)
        elif match["kind"] == "GPU" or match.end() == len(plane.name):
            cores[key] = plane
    return [(cores[key], sparse.get(key, ())) for key in sorted(cores)]


# Devices


def _of_device(path: Path, plane: Plane, sparse: Sequence[Plane]) -> DeviceTrace:
    """A TPU's or a GPU's plane."""
    backend = Backend.tpu if "TPU" in plane.name else Backend.gpu
    stats = plane.stats

    def rate(name: str, scale: float) -> float | None:
        value = stats.get(f"peak_{name}")
        return float(value) * scale if value else None

    read, written = (rate(f"vmem_{way}_bw_gigabytes_per_second", 1e9) for way in ("rd", "wr"))
    trace = DeviceTrace(
        path=path,
        backend=backend,
        device=plane.name.removeprefix("/device:"),
        kind=str(stats.get("device_type_string", "")),
        simulated_by=str(stats.get("simulated_by", "")),
        peak_flops=rate("teraflops_per_second", 1e12),
        peak_bytes=rate("hbm_bw_gigabytes_per_second", 1e9),
        peak_vector_bytes=read + written if read and written else None,
        ops=(),
    )
    if backend is Backend.gpu:
        streams = [(name, events) for name, events in plane.lines if "Stream" in name]
        ops = [
            _kernel(event, name, plane.constants) for name, events in streams for event in events
        ]
        return replace(trace, ops=_sorted(ops))
    read_op = _TpuOps(plane.constants)
    return replace(
        trace,
        ops=_sorted(read_op(event, OPS) for event in plane.of(OPS)),
        beside=_sorted(read_op(event, "async") for event in plane.of(ASYNC)),
        sparse=_sorted(
            op
            for core in sparse
            for read_one in [_TpuOps(core.constants)]
            for op in (
                read_one(event, core.name.partition(" ")[2]) for event in core.of(SPARSE, OPS)
            )
        ),
        marks=_marks(plane.of(STEPS)),
        runs=_marks(plane.of(RUNS)),
    )


def _sorted(ops: Iterable[DeviceOp]) -> list[DeviceOp]:
    return sorted(ops, key=lambda op: op.start)


def _marks(events: Iterable[Event]) -> list[Mark]:
    marks = [Mark(name=e.name, start=e.start, end=e.end) for e in events]
    return sorted(marks, key=lambda mark: mark.start)


class _TpuOps:
    """Reads events of a TPU's ops; what all runs of an op share is read once."""

    def __init__(self, constants: Mapping[str, Mapping[str, Any]]) -> None:
        self._constants = constants
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, event: Event, line: str) -> DeviceOp:
        key = event.name, str(event.stats.get("long_name", ""))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._read(event, key[1])
        return DeviceOp(start=event.start, end=event.end, line=line, **known)

    def _read(self, event: Event, long_name: str) -> dict[str, Any]:
        stats = {**self._constants.get(event.name, {}), **event.stats}
        text = event.name if _TEXT.match(event.name) else str(stats.get("long_name", long_name))
        match = _TEXT.match(text)
        parts = stats.get("memory_access_breakdown")
        return {
            "name": match["name"] if match else event.name,
            "opcode": match["opcode"] if match else "",
            "text": text if match else "",
            "program": _integer(stats.get("program_id")),
            "category": str(stats.get("hlo_category", "")),
            "op_name": str(stats.get("tf_op", "")).rstrip(":"),
            "source": str(stats.get("source", "")),
            "flops": float(stats.get("flops") or stats.get("model_flops") or 0.0),
            "bytes": float(stats.get("bytes_accessed") or 0.0),
            "hbm": device_memory(parts) if isinstance(parts, bytes) else None,
        }


def _kernel(event: Event, line: str, constants: Mapping[str, Stats]) -> DeviceOp:
    """A kernel or a copy on a GPU's stream."""
    stats = {**constants.get(event.name, {}), **event.stats}
    return DeviceOp(
        name=str(stats.get("hlo_op", event.name)),
        start=event.start,
        end=event.end,
        line=line,
        module=str(stats.get("hlo_module", "")),
        program=_integer(stats.get("program_id")),
        category="" if "hlo_op" in stats else event.name,
        op_name=str(stats.get("tf_op", "")).rstrip(":"),
    )


def _of_cpu(path: Path, lines: Sequence[tuple[str, Sequence[Event]]]) -> DeviceTrace:
    """Thunks of the first of the CPU's devices."""
    ops = []
    first: int | None = None
    for name, events in lines:
        for event in events:
            if "hlo_op" not in event.stats:
                continue
            device = _integer(event.stats.get("device_ordinal")) or 0
            first = device if first is None else min(first, device)
            op = DeviceOp(
                name=str(event.stats["hlo_op"]),
                start=event.start,
                end=event.end,
                line=name,
                module=str(event.stats.get("hlo_module", "")),
                program=_integer(event.stats.get("program_id")),
                run=_integer(event.stats.get("run_id")),
            )
            ops.append((device, op))
    mine = _sorted(op for device, op in ops if device == first)
    others = len({device for device, _ in ops}) - 1
    return DeviceTrace(
        path=path,
        backend=Backend.cpu,
        device=f"CPU:{first or 0}",
        ops=mine,
        notes=[f"{others} other devices than CPU:{first}, on the same cores"] if others > 0 else [],
    )


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


# The host


def _host(
    lines: Sequence[tuple[str, Sequence[Event]]],
) -> tuple[list[HostEvent], list[list[HostEvent]], list[Mark]]:
    """The thread that runs the loop, the others, and the annotated steps."""
    best, threads, steps = (-1, -1), [], {}
    main = None
    for _, events in lines:
        thread, marks, dispatches = [], [], 0
        for event in events:
            if event.end <= event.start or "hlo_op" in event.stats:
                continue
            if "step_num" in event.stats:
                number = str(event.stats["step_num"])
                marks.append(Mark(name=number, start=event.start, end=event.end))
                continue
            dispatches += bool(_DISPATCH.search(event.name))
            thread.append(HostEvent(name=event.name, start=event.start, end=event.end))
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
    modules, notes = {}, []
    for program, chosen in _chosen(protos, used).items():
        try:
            module = hlo.HloModule.from_serialized_hlo_module_proto(protos[chosen][1])
            modules[program] = parse(module.to_string())
        except (RuntimeError, ValueError, DataError) as error:
            reason = (str(error).splitlines() or ["?"])[0]
            notes.append(f"the module of {protos[chosen][0]}: {reason}")
    return modules, notes


def _chosen(
    protos: Mapping[int, tuple[str, bytes]], used: Collection[tuple[int | None, str]]
) -> dict[int, int]:
    """Program of ops to that of its module.

    They differ for a program from JAX's persistent cache: then the module is the one of the same name
    that no other program claims.
    """
    ids = {program for program, _ in used}
    programs = {}
    for program, module in used:
        if program is None:
            continue
        same = [key for key, (name, _) in protos.items() if name == module and key not in ids]
        if program in protos:
            programs[program] = program
        elif len(same) == 1:
            programs[program] = same[0]
    return programs
