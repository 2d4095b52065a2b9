"""A step as a profile that ``xprof`` opens: its overview, op profile, roofline and trace viewer.

The messages are XSpace, XPlane, XLine and XEvent of tsl/profiler/protobuf/xplane.proto; the planes
``/device:TPU:N`` with the lines Steps, XLA Modules and XLA Ops are those of a real TPU's profile.

What its pages take from where (xprof 2.24, xplane_to_op_stats.cc and op_stats_to_overview_page.cc): rates
of ops from ``flops`` and ``memory_access_breakdown`` of an event's metadata and the times of line XLA Ops;
peaks from stats of the device's plane; the overview's MXU and HBM utilization from stats of the host's plane,
which a TPU fills from its counters. The overview's two figures relative to the roofline stay 0 in the
published xprof for any profile: it is built without the limits that they are relative to. The graph viewer
and the memory viewer draw the compiler's HloProto, which a profile carries in the plane ``/host:metadata``; a
schedule that came as text has none, and these two pages stay empty.

The few encodings of protocol buffers that a profile needs are here: varints, doubles, text and messages
(https://protobuf.dev/programming-guides/encoding).
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from systolic.core.files import write_atomically
from systolic.forecasting import Forecast
from systolic.forecasting.display.trace import LaneEvent, unroll
from systolic.sim.timeline import Resource, Span, Timeline

CAP = 100_000
"""Events of a step in a profile; loops are cut above it."""
STEPS = 3
"""Times the step is repeated, since xprof takes statistics over steps."""
HOST = "systolic"
PICOSECONDS = 1e12

_STATS = (
    "group_id",
    "step_num",
    "program_id",
    "symbol_id",
    "hlo_category",
    "flops",
    "model_flops",
    "bytes_accessed",
    "raw_bytes_accessed",
    "memory_access_breakdown",
    "tf_op",
    "source",
    "device_type_string",
    "peak_teraflops_per_second",
    "peak_hbm_bw_gigabytes_per_second",
    "matrix_unit_utilization_percent",
    "hbm_utilization_percent",
    "Time Scale Multiplier",
    "Hlo Proto",
    "simulated_by",
)
_STAT = {name: number for number, name in enumerate(_STATS, 1)}
NOT_HBM = (Resource.ici, Resource.dcn)
"""The bytes of these spans are on the links."""
HBM_LANES = ("dma", "host")
"""Lanes beside the core whose transfers read or write HBM."""
READ, HBM = 1, 1
"""OperationType and MemorySpace in xprof's op_metrics.proto."""
PROGRAM = 1
MODULE_ID = 1
FIRST_STEP_ID = 2
FIRST_OP_ID = 100
VARINT, FIXED64, BYTES = 0, 1, 2


def write_xprof(forecast: Forecast, folder: Path) -> Path:
    """Writes ``folder/plugins/profile/forecast/HOST.xplane.pb`` and returns its path.

    Raises:
        RunError: the file can't be written.
    """
    assert forecast.timeline is not None
    path = folder / "plugins" / "profile" / "forecast" / f"{HOST}.xplane.pb"
    write_atomically(path, xspace(forecast, forecast.timeline))
    return path


def xspace(forecast: Forecast, timeline: Timeline, cap: int = CAP) -> bytes:
    """A serialized XSpace with one device, on which the step runs :data:`STEPS` times."""
    events = unroll(timeline, cap).events
    spans = list({(e.span.name, e.span.opcode): e.span for e in events}.values())
    numbers = {(s.name, s.opcode): n for n, s in enumerate(spans, FIRST_OP_ID)}
    core = [_issued(e) for e in events if e.span.lane in ("core", *HBM_LANES)]
    beside = [e for e in events if e.span.lane != "core"]
    step = timeline.seconds
    lines = [
        _line(1, "Steps", _every(lambda n: [_step(n, step)])),
        _line(2, "XLA Modules", _every(lambda n: [_module(n, step)])),
        _line(3, "XLA Ops", _every(lambda n: _ops(core, numbers, n, step))),
        _line(4, "Async XLA Ops", _every(lambda n: _ops(beside, numbers, n, step))),
    ]
    metadata = [
        (MODULE_ID, integer(1, MODULE_ID) + text(2, f"jit_step({PROGRAM})")),
        *(
            (FIRST_STEP_ID + n, integer(1, FIRST_STEP_ID + n) + text(2, str(n)))
            for n in range(STEPS)
        ),
        *(
            (number, _metadata(number, span))
            for number, span in zip(numbers.values(), spans, strict=True)
        ),
    ]
    names = ((number, integer(1, number) + text(2, name)) for name, number in _STAT.items())
    plane = (
        integer(1, 1),
        text(2, "/device:TPU:0"),
        *lines,
        table(4, metadata),
        table(5, names),
        *_peaks(forecast),
    )
    held = forecast.answer.proto if forecast.answer is not None else None
    planes = [plane, _host(forecast, timeline), *([] if held is None else [_compiled(held)])]
    return b"".join(message(1, *fields) for fields in planes) + text(4, HOST)


def _compiled(module: bytes) -> Iterable[bytes]:
    """The plane of the compiler's own module, under the number that the ops' ``program_id`` has."""
    name, number = "Hlo Proto", _STAT["Hlo Proto"]
    stat = message(5, integer(1, number), message(6, module))
    yield integer(1, 3)
    yield text(2, "/host:metadata")
    yield table(4, [(PROGRAM, integer(1, PROGRAM) + text(2, f"jit_step({PROGRAM})") + stat)])
    yield table(5, [(number, integer(1, number) + text(2, name))])


def _issued(event: LaneEvent) -> LaneEvent:
    """The event on the core's line: of a copy beside it the start alone, which takes no time.

    xprof counts the bytes of this line only, so that a copy's would be missing otherwise.
    """
    return event if event.span.lane == "core" else replace(event, seconds=0.0)


def utilization(forecast: Forecast, timeline: Timeline) -> dict[str, float]:
    """Stats of the overview by name: percent of a device's peaks over the step.

    Matrix FLOPs that the step computes (with those of rematerialization) over the published bf16 peak,
    and bytes of HBM that it moves over the published bandwidth. A peak that is not published is left out.
    """
    flops = sum(span.flops * times for span, times in timeline.leaves())
    moved = sum(
        span.bytes * times
        for span, times in timeline.leaves()
        if span.resource not in NOT_HBM and span.lane in ("core", *HBM_LANES)
    )
    done = {
        "matrix_unit_utilization_percent": (flops, _peak(forecast, "flops")),
        "hbm_utilization_percent": (moved, _peak(forecast, "bytes")),
    }
    return {
        name: 100 * work / timeline.seconds / peak for name, (work, peak) in done.items() if peak
    }


def _peak(forecast: Forecast, of: str) -> float | None:
    """Peak rates of one device per second."""
    chip = forecast.on.chip
    peak = chip.peak_bf16_flops_per_second if of == "flops" else chip.hbm_bytes_per_second
    return None if peak is None else peak / (chip.devices_per_chip or 1)


def _host(forecast: Forecast, timeline: Timeline) -> Iterable[bytes]:
    """The host's plane, without events: the host is not simulated."""
    shares = utilization(forecast, timeline)
    yield integer(1, 2)
    yield text(2, "/host:CPU")
    yield table(5, ((_STAT[name], integer(1, _STAT[name]) + text(2, name)) for name in shares))
    for name, share in shares.items():
        yield message(6, integer(1, _STAT[name]), double(2, share))


def _peaks(forecast: Forecast) -> Iterable[bytes]:
    """Stats of the roofline: rates of one device; and that no device was measured."""
    chip = forecast.on.chip
    yield message(
        6, integer(1, _STAT["device_type_string"]), text(5, chip.device_kind or chip.name)
    )
    yield message(6, integer(1, _STAT["simulated_by"]), text(5, "systolic forecast"))
    peaks = {
        "peak_teraflops_per_second": (_peak(forecast, "flops"), 1e12),
        "peak_hbm_bw_gigabytes_per_second": (_peak(forecast, "bytes"), 1e9),
    }
    for name, (peak, unit) in peaks.items():
        if peak is not None:
            yield message(6, integer(1, _STAT[name]), double(2, peak / unit))


def _every(events_of: Callable[[int], Iterable[bytes]]) -> list[bytes]:
    return [event for n in range(STEPS) for event in events_of(n)]


def _line(number: int, name: str, events: Sequence[bytes]) -> bytes:
    return message(3, integer(1, number), text(2, name), integer(3, 0), *events)


def _step(n: int, step: float) -> bytes:
    stats = _number("step_num", n) + _number("group_id", n)
    return _placed(FIRST_STEP_ID + n, n * step, step, stats)


def _module(n: int, step: float) -> bytes:
    stats = _number("program_id", PROGRAM) + _number("group_id", n)
    return _placed(MODULE_ID, n * step, step, stats)


def _ops(
    events: Sequence[LaneEvent], numbers: dict[tuple[str, str], int], n: int, step: float
) -> Iterable[bytes]:
    group = _number("group_id", n)
    for event in events:
        number = numbers[event.span.name, event.span.opcode]
        scale = _scale(own_share(event)) if event.span.inside else b""
        yield _placed(number, n * step + event.start, event.seconds, group + scale)


def _placed(number: int, start: float, seconds: float, stats: bytes) -> bytes:
    """An event: both ends are rounded, so that neighbours touch and children stay inside."""
    begin, end = round(start * PICOSECONDS), round((start + seconds) * PICOSECONDS)
    return message(4, integer(1, number), integer(2, begin), integer(3, end - begin), stats)


def _metadata(number: int, span: Span) -> bytes:
    stats = [
        _number("program_id", PROGRAM, event=5),
        _number("symbol_id", number, event=5),
        _text("hlo_category", category(span)),
        _text("tf_op", f"{span.layer or 'unnamed'}/{span.opcode.split()[-1]}"),
    ]
    if not span.inside:
        stats += [
            _number("flops", round(span.flops), event=5),
            _number("model_flops", round(span.flops), event=5),
        ]
        if span.resource not in NOT_HBM:
            stats += [
                _number("bytes_accessed", round(span.bytes), event=5),
                _number("raw_bytes_accessed", round(span.bytes), event=5),
                message(
                    5,
                    integer(1, _STAT["memory_access_breakdown"]),
                    message(6, _traffic(round(span.bytes))),
                ),
            ]
    if span.source:
        stats.append(_text("source", span.source))
    name = f"{span.name}-done" if span.opcode.startswith("wait ") else span.name
    hlo = f"%{name} = {span.opcode.removeprefix('wait ')}()"
    return b"".join([integer(1, number), text(2, hlo), text(4, name), *stats])


def _traffic(size: int) -> bytes:
    """MemoryAccessBreakdown of xprof's op_metrics.proto: so many bytes read from HBM.

    A simulated op has one figure for reads and writes together.
    """
    return message(1, integer(1, READ), integer(2, HBM), integer(3, size))


def _number(name: str, value: int, event: int = 4) -> bytes:
    """A stat; ``event`` is the field of the enclosing message: 4 of an event, 5 of its metadata.

    xprof reads group_id as an int64 and the others as either.
    """
    kind = 4 if name == "group_id" else 3
    return message(event, integer(1, _STAT[name]), integer(kind, value))


def own_share(event: LaneEvent) -> float:
    """Share of a loop's time that no event inside it has.

    xprof adds the times of loops to those of what is in them, at the nominal clock, and divides FLOPs by
    the sum: as if a loop had run at a clock that leaves it this share alone.
    """
    turn = sum(span.seconds for span in event.span.inside if span.lane == "core")
    return max(0.0, 1 - event.iterations * turn / event.seconds)


def _scale(value: float) -> bytes:
    """Factor by which xprof scales an event's time to the nominal clock."""
    return message(4, integer(1, _STAT["Time Scale Multiplier"]), double(2, value))


def _text(name: str, value: str) -> bytes:
    return message(5, integer(1, _STAT[name]), text(5, value))


def category(span: Span) -> str:
    """XLA's name of a kind of op in a profile."""
    opcode = span.opcode
    if span.inside:
        return opcode
    if opcode.startswith("wait "):
        kind = opcode.removeprefix("wait ").removesuffix("-start")
        return f"{kind}-done"
    if opcode == "fusion":
        return "convolution fusion" if span.resource is Resource.mxu else "loop fusion"
    if opcode in ("reshape", "transpose", "bitcast-convert"):
        return "data formatting"
    return opcode


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer(field: int, value: int) -> bytes:
    """An int64, uint64 or bool field."""
    return varint(field << 3 | VARINT) + varint(value)


def double(field: int, value: float) -> bytes:
    """A double field."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def message(field: int, *parts: bytes) -> bytes:
    """A field that holds a message of these fields, or raw bytes."""
    body = b"".join(parts)
    return varint(field << 3 | BYTES) + varint(len(body)) + body


def text(field: int, value: str) -> bytes:
    """A string field."""
    return message(field, value.encode())


def table(field: int, entries: Iterable[tuple[int, bytes]]) -> bytes:
    """A map field from int64 to messages."""
    return b"".join(message(field, integer(1, key), message(2, value)) for key, value in entries)
