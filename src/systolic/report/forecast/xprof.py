"""A step as a profile that ``xprof`` opens: its overview, op profile, roofline and trace viewer.

The messages are XSpace, XPlane, XLine and XEvent of tsl/profiler/protobuf/xplane.proto; the planes
``/device:TPU:N`` with the lines Steps, XLA Modules and XLA Ops are those of a real TPU's profile.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from systolic.core.files import write_atomically
from systolic.forecasting import Forecast
from systolic.report.forecast.lanes import Event, unroll
from systolic.report.forecast.protobuf import double, integer, message, table, text
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
)
_STAT = {name: number for number, name in enumerate(_STATS, 1)}
READ, HBM = 1, 1
"""OperationType and MemorySpace in xprof's op_metrics.proto."""
PROGRAM = 1
MODULE_ID = 1
FIRST_STEP_ID = 2
FIRST_OP_ID = 100


def write_xprof(forecast: Forecast, folder: Path, run: str = "forecast") -> Path:
    """Writes ``folder/plugins/profile/RUN/HOST.xplane.pb`` and returns its path.

    Raises:
        RunError: the file can't be written.
    """
    assert forecast.timeline is not None
    path = folder / "plugins" / "profile" / run / f"{HOST}.xplane.pb"
    write_atomically(path, xspace(forecast, forecast.timeline))
    return path


def xspace(forecast: Forecast, timeline: Timeline, cap: int = CAP) -> bytes:
    """A serialized XSpace with one device, on which the step runs :data:`STEPS` times."""
    events = unroll(timeline, cap).events
    spans = list({(e.span.name, e.span.opcode): e.span for e in events}.values())
    numbers = {(s.name, s.opcode): n for n, s in enumerate(spans, FIRST_OP_ID)}
    core = [e for e in events if e.span.lane == "core"]
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
    return message(1, *plane) + text(4, HOST)


def _peaks(forecast: Forecast) -> Iterable[bytes]:
    """What the roofline is drawn from: rates of one device."""
    chip = forecast.on.chip
    devices = chip.devices_per_chip or 1
    yield message(
        6, integer(1, _STAT["device_type_string"]), text(5, chip.device_kind or chip.name)
    )
    peaks = {
        "peak_teraflops_per_second": (chip.peak_bf16_flops_per_second, 1e12),
        "peak_hbm_bw_gigabytes_per_second": (chip.hbm_bytes_per_second, 1e9),
    }
    for name, (peak, unit) in peaks.items():
        if peak is not None:
            yield message(6, integer(1, _STAT[name]), double(2, peak / devices / unit))


def _every(made: Callable[[int], Iterable[bytes]]) -> list[bytes]:
    return [event for n in range(STEPS) for event in made(n)]


def _line(number: int, name: str, events: Sequence[bytes]) -> bytes:
    return message(3, integer(1, number), text(2, name), integer(3, 0), *events)


def _step(n: int, step: float) -> bytes:
    stats = _number("step_num", n) + _number("group_id", n)
    return _placed(FIRST_STEP_ID + n, n * step, step, stats)


def _module(n: int, step: float) -> bytes:
    stats = _number("program_id", PROGRAM) + _number("group_id", n)
    return _placed(MODULE_ID, n * step, step, stats)


def _ops(
    events: Sequence[Event], numbers: dict[tuple[str, str], int], n: int, step: float
) -> Iterable[bytes]:
    group = _number("group_id", n)
    for event in events:
        number = numbers[event.span.name, event.span.opcode]
        yield _placed(number, n * step + event.start, event.seconds, group)


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
        if span.resource not in (Resource.ici, Resource.dcn):
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
    told = f"%{name} = {span.opcode.removeprefix('wait ')}()"
    return b"".join([integer(1, number), text(2, told), text(4, name), *stats])


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


def _text(name: str, value: str) -> bytes:
    return message(5, integer(1, _STAT[name]), text(5, value))


def category(span: Span) -> str:
    """As XLA names kinds of ops in a profile."""
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
