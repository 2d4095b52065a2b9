"""A calibration from profiles: the corrections with what they rest on.

Each op of a profile is set beside its price: in the simulated program, where the profile holds its module or the user
gives its dump; else alone, from its HLO line, and a matmul from the FLOPs and bytes that the profile counts.

The factor of a kind is the mean of its ops' measured over simulated seconds between their 10th and their 90th
percentile, each op weighted by its simulated seconds. Weighted so it is the ratio of the sums, which is what a step's
time needs: a median would be that of the largest op. Trimmed so that an op whose price is far off, and that takes less
than a tenth of the kind's time, does not move it.
"""

import bisect
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate
from pathlib import Path

from systolic import __version__
from systolic.chips import Chip, Slice, slice
from systolic.compiling.kernels import counted_elsewhere
from systolic.core.errors import DataError, NotFoundError, OptionError, SystolicError
from systolic.core.units import duration, plural, si
from systolic.explaining.alone import devices_named, devices_of, matmul_seconds, module_of
from systolic.explaining.profiles import run_of
from systolic.forecasting.calibrations import CalibrationRecord, ProfileSource, check_name
from systolic.forecasting.profiled import LEAST, begun_by, ops_beyond, programs_of
from systolic.hlo import Module, parse
from systolic.profile import Profile, open_profile
from systolic.profile.ops import Activity
from systolic.profile.profile import HOST_LINK, name_of
from systolic.profile.table import OpRow, ProfileTable
from systolic.profile.trace import Backend, DeviceOp
from systolic.runs.record import slice_with
from systolic.runs.run import ENVIRONMENT
from systolic.sim.calibration import BOUNDS, Calibration, CostKind, Factor
from systolic.sim.cost_kinds import COLLECTIVES, kind_of_span
from systolic.sim.rates import Rates, rates_of
from systolic.sim.simulate import simulate
from systolic.sim.timeline import Span

LEAST_SIMULATED = 2.5e-7
"""Simulated seconds of an op from which its ratio counts: shorter ones have a price for bookkeeping."""
FIXED = 2.0
"""Simulated seconds of a collective over its fixed cost from which it shows the rate of the links."""
LARGE_COPY = 1 << 20
"""Bytes from which a copy shows the rate of the host link rather than its latency."""
LOW, HIGH = 0.1, 0.9
LINKS = frozenset((*COLLECTIVES, CostKind.host))
"""Kinds whose factor is a link's, whatever is sent over it."""
LEAST_WORKS = 3
"""Ops of different arrays from which those of another kind stand for others.

A factor of one matmul made 257 others of the same chip 16 % too slow that were 7 % too fast without it
(benchmarks/results/2026-11-27-calibration.md).
"""


Work = tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]
"""Opcode, and dtype and dims of each array; FLOPs and bytes where the profile has no line of it."""
COMPILER = "libtpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRatio:
    """One op of a program, measured and simulated."""

    kind: CostKind
    program: str
    name: str
    value: float
    """Measured over simulated seconds of one call; of a host copy bytes/s."""
    weight: float
    """Simulated seconds in a run of its program; of a host copy its bytes."""
    call_seconds: float
    """Measured seconds of one call."""
    seconds: float
    """Measured seconds in a run of its program."""
    work: Work
    """The work that it computes: ops that are alike in it tell as much as one of them."""


@dataclass(frozen=True, kw_only=True)
class MeasuredOps:
    """Ops of one profile beside their prices."""

    ratios: Sequence[OpRatio]
    total: float
    """Measured seconds of all ops in one run of each program."""
    unmatched: Mapping[str, float]
    """Seconds of the ops without a ratio, by kind as ``systolic explain`` names it; the most first."""
    simulated: Sequence[str]
    """Programs that were simulated whole."""
    alone: bool
    """Whether ops were priced alone, without their program."""
    notes: Sequence[str] = ()

    @property
    def matched(self) -> float:
        """Measured seconds, in one run of each program, of ops that have a price."""
        return sum(ratio.seconds for ratio in self.ratios)


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """The simulated op: its span where it is simulated, else a kind and seconds."""

    kind: CostKind
    seconds: float
    lane: str = "core"


@dataclass
class _OpPrices:
    """Prices of a profile's ops on a slice."""

    on: Slice
    programs: Mapping[str, Module]
    """Program to its module."""
    simulated: dict[str, None] = field(default_factory=dict)
    alone: bool = False
    notes: list[str] = field(default_factory=list)
    _spans: dict[str, Mapping[str, Span]] = field(default_factory=dict)
    _lines: dict[str, _Priced | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates: Rates = rates_of(self.on)

    def of(self, row: OpRow) -> _Priced | None:
        """Price of one call; None of an op that has none, or that no kind stands for."""
        module = self.programs.get(row.program)
        return self._in(module, row) if module is not None else self._alone(row)

    def _in(self, module: Module, row: OpRow) -> _Priced | None:
        if row.program not in self._spans:
            self._spans[row.program] = self._simulated(module, row.program)
        span = self._spans[row.program].get(begun_by(row))
        return None if span is None else self._usable(span)

    def _usable(self, span: Span) -> _Priced | None:
        """A span's price; None of a kind that is not corrected, and of a collective that is mostly its fixed cost."""
        kind = kind_of_span(span)
        least = FIXED * self.rates.collective_seconds if kind in COLLECTIVES else 0.0
        if kind is None or span.seconds < least:
            return None
        return _Priced(kind=kind, seconds=span.seconds, lane=span.lane)

    def _simulated(self, module: Module, program: str) -> Mapping[str, Span]:
        try:
            timeline = simulate(module, self.on)
        except SystolicError as error:
            self.notes.append(f"{program} could not be simulated: {error}")
            return {}
        self.simulated[program] = None
        return {
            span.name: span for span, _ in timeline.leaves() if not span.opcode.startswith("wait ")
        }

    def _alone(self, row: OpRow) -> _Priced | None:
        text = row.op.raw.text
        if not text or row.op.opcode.endswith("-done"):
            return None
        if text not in self._lines:
            self._lines[text] = self._of_line(text) or self._of_work(row)
        price = self._lines[text]
        self.alone |= price is not None
        return price

    def _of_line(self, text: str) -> _Priced | None:
        held = module_of(text, self.on.num_devices)
        if not held:
            return None
        try:
            timeline = simulate(parse(held), self.on)
        except (SystolicError, KeyError, ValueError, AssertionError):
            return None
        spans = [span for span, _ in timeline.leaves() if span.lane == "core"]
        price = self._usable(spans[0]) if len(spans) == 1 else None
        if price is None or price.kind not in (CostKind.elementwise, CostKind.vmem_elementwise):
            return price
        # What a fusion computes is not known: only what passes over device memory stands for others.
        memory = spans[0].bytes / self.rates.hbm
        return price if memory > price.seconds / 2 else None

    def _of_work(self, row: OpRow) -> _Priced | None:
        seconds = matmul_seconds(row, self.rates, self.on)
        return None if seconds is None else _Priced(kind=CostKind.matmul, seconds=seconds)


def measured_ops(table: ProfileTable, on: Slice, programs: Mapping[str, Module]) -> MeasuredOps:
    """Ops of a profile beside their prices on a slice.

    Args:
        table: Ops of the profile.
        on: The slice that it was recorded on.
        programs: Program to its module, of the profile or of a dump; ops of others are priced alone.
    """
    prices = _OpPrices(on=on, programs=programs)
    runs = {row.name: row.runs for row in table.programs}
    together = _Together(table)
    ratios, total, unmatched = [], 0.0, defaultdict[str, float](float)
    for row in table.ops:
        times = row.calls / runs.get(row.program, 1.0)
        busy = row.seconds / runs.get(row.program, 1.0)
        total += busy
        ratio = _host(row, times, busy) or _ratio(row, prices.of(row), times, busy, together)
        if ratio is not None:
            ratios.append(ratio)
        else:
            unmatched[row.op.kind.value] += busy
    return MeasuredOps(
        ratios=ratios,
        total=total,
        unmatched=dict(sorted(unmatched.items(), key=lambda item: -item[1])),
        simulated=list(prices.simulated),
        alone=prices.alone,
        notes=prices.notes,
    )


def _host(row: OpRow, times: float, busy: float) -> OpRatio | None:
    """A copy between device and host, by its rate on the link."""
    if row.op.kind is not Activity.host or row.rate is None or row.rate.unit != HOST_LINK:
        return None
    if row.rate.work < LARGE_COPY or not row.flight:
        return None
    return OpRatio(
        kind=CostKind.host,
        program=row.program,
        name=begun_by(row),
        value=row.rate.work / row.flight,
        weight=row.rate.work * times,
        call_seconds=row.flight,
        seconds=busy,
        work=_work(row),
    )


def _ratio(
    row: OpRow, priced: _Priced | None, times: float, busy: float, together: "_Together"
) -> OpRatio | None:
    """An op of another kind; None of one that is too short, or of which the chip's time is not known."""
    opcode = row.op.opcode
    if priced is None or priced.kind is CostKind.host or opcode.endswith("-start"):
        return None
    waits = opcode.endswith("-done")
    if waits != (priced.lane != "core"):
        return None  # a fusion that begins a collective holds compute, too
    seconds = row.flight if waits else row.median
    if priced.kind in COLLECTIVES:
        seconds = together.flight(row) if waits else together.seconds(row) or seconds
    if seconds < LEAST or priced.seconds < LEAST_SIMULATED:
        return None
    return OpRatio(
        kind=priced.kind,
        program=row.program,
        name=row.op.raw.name,
        value=seconds / priced.seconds,
        weight=priced.seconds * times,
        call_seconds=seconds,
        seconds=busy,
        work=_work(row),
    )


def _work(row: OpRow) -> Work:
    line = row.op.line
    if line is None:
        return row.op.opcode, (("", (int(row.op.flops), int(row.op.bytes))),)
    arrays = line.arrays()
    return row.op.opcode, tuple((array.dtype, tuple(array.dims)) for array in arrays)


@dataclass
class _Together:
    """Runs of collectives over the devices of a profile."""

    table: ProfileTable

    def __post_init__(self) -> None:
        self._by: dict[str, list[list[DeviceOp]]] = defaultdict(list)
        self._flights: dict[str, list[float]] = defaultdict(list)
        for profile in self.table.profile.devices:
            own: dict[str, list[DeviceOp]] = defaultdict(list)
            for op in profile.trace.ops:
                own[op.text].append(op)
            for text, ops in own.items():
                self._by[text].append(ops)
            for begun, done in _apart(profile):
                self._flights[done.text].append(done.end - begun.start)

    def seconds(self, row: OpRow) -> float | None:
        """Median over the runs of the least time of any device, since the last to come waits for no other; None where the devices' runs can't be set beside each other."""
        of = self._by.get(row.op.raw.text, [])
        if len(of) < 2 or len({len(ops) for ops in of}) != 1:
            return None
        least = [min(op.end - op.start for op in ops) for ops in zip(*of, strict=True)]
        return statistics.median(least)

    def flight(self, row: OpRow) -> float:
        """Median time from start to end of an asynchronous one while no other was under way; 0 where there was always one."""
        return statistics.median(self._flights.get(row.op.raw.text, [0.0]))


def _apart(profile: Profile) -> list[tuple[DeviceOp, DeviceOp]]:
    """Asynchronous collectives that were waited for, and beside which no other collective took a part of the links."""
    pairs = [pair for pair in profile.pairs if _is_collective(profile, pair[1])]
    busy = [
        *((begun.start, done.end) for begun, done in pairs),
        *(
            (op.start, op.end)
            for op in profile.trace.ops
            if not op.opcode.endswith(("-start", "-done")) and _is_collective(profile, op)
        ),
    ]
    busy.sort()
    ends = list(accumulate((end for _, end in busy), max))
    apart = []
    for begun, done in pairs:
        at = bisect.bisect_left(busy, (begun.start, done.end))
        before = ends[at - 1] if at else -math.inf
        after = busy[at + 1][0] if at + 1 < len(busy) else math.inf
        if before <= begun.start and done.end <= after and id(done) in profile.flights:
            apart.append((begun, done))
    return apart


def _is_collective(profile: Profile, op: DeviceOp) -> bool:
    return profile.describe(op).kind is Activity.collective


# Factors


def trimmed_mean(values: Iterable[tuple[float, float]], low: float, high: float) -> float:
    """Mean of (value, weight) pairs between two shares of all weight."""
    ordered = sorted(values)
    whole, before, total, kept = sum(weight for _, weight in ordered), 0.0, 0.0, 0.0
    for value, weight in ordered:
        inside = min(before + weight, high * whole) - max(before, low * whole)
        if inside > 0:
            total, kept = total + inside * value, kept + inside
        before += weight
    return total / kept


def quantile(values: Iterable[tuple[float, float]], share: float) -> float:
    """Quantile of (value, weight) pairs: the value at which that share of all weight is reached."""
    ordered = sorted(values)
    reached = list(accumulate(weight for _, weight in ordered))
    goal = share * reached[-1]
    return next(
        value for (value, _), so_far in zip(ordered, reached, strict=True) if so_far >= goal
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Factors of kinds of op, and what was left out."""

    factors: Mapping[CostKind, Factor]
    left_out: Sequence[str]


def fit(measured: Iterable[MeasuredOps], host_bytes_per_second: float) -> Fit:
    """Factors by kind of op over all profiles.

    Args:
        measured: Ops of each profile.
        host_bytes_per_second: Of one device by the catalogue, one way, which bounds the measured rate.
    """
    by: dict[CostKind, list[OpRatio]] = defaultdict(list)
    for ops in measured:
        for ratio in ops.ratios:
            by[ratio.kind].append(ratio)
    factors, left_out = {}, []
    for kind in CostKind:
        if kind not in by:
            continue
        factor = factor_of(by[kind])
        slower = factor.value
        if kind is CostKind.host:
            slower = host_bytes_per_second / factor.value
        least, most = BOUNDS
        needed = 1 if kind in LINKS else LEAST_WORKS
        if factor.works < needed:
            left_out.append(
                f"{kind.value}: {factor.value:.2f} by {plural(factor.ops, 'op')} of {plural(factor.works, 'shape')}, and fewer than {needed} shapes stand for no others{_cost(by[kind])}"
            )
        elif least <= slower <= most:
            factors[kind] = factor
        else:
            text = si(factor.value, "B/s") if kind is CostKind.host else f"{factor.value:.2f}"
            left_out.append(
                f"{kind.value}: {text} by {plural(factor.ops, 'op')}, {slower:.2f} times the simulator's seconds and outside of {least:g} to {most:g}: the simulator does not know such ops, and a factor would not carry over"
            )
    return Fit(factors=factors, left_out=left_out)


def _cost(ops: Sequence[OpRatio]) -> str:
    """How a forecast takes the time of a kernel itself."""
    if ops[0].kind is not CostKind.kernel:
        return ""
    largest = max(ops, key=lambda op: op.seconds)
    return f"; a forecast takes the time of a call of it: --cost {largest.name}={duration(largest.call_seconds).replace(' ', '')}"


def factor_of(ratios: Sequence[OpRatio]) -> Factor:
    """Factor of ops of one kind."""
    weighted = [(ratio.value, ratio.weight) for ratio in ratios]
    return Factor(
        value=trimmed_mean(weighted, LOW, HIGH),
        low=quantile(weighted, LOW),
        high=quantile(weighted, HIGH),
        ops=len({(ratio.program, ratio.name) for ratio in ratios}),
        works=len({ratio.work for ratio in ratios}),
        seconds=sum(ratio.seconds for ratio in ratios),
    )


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The profiles and programs that a calibration is to be made of."""

    profiles: Sequence[Path]
    """Files of profiles, or directories with some."""
    name: str
    against: Sequence[Path] = ()
    """Scheduled HLO of programs whose modules the profiles lack."""
    chip: str = ""
    """The devices' chip by its name in the catalogue, for files that do not name it."""
    on: str | Slice = ""
    """The slice that they were recorded on; by default as many of the chip's devices as the programs name."""


def record_of(request: CalibrationRequest) -> CalibrationRecord:
    """Corrections of the simulator from profiles of one generation of TPUs; nothing is written.

    Raises:
        NotFoundError: there is no such profile or dump.
        DataError: a file is damaged, or no op of the profiles has a price to compare with its time.
        OptionError: the chip is not known, is no TPU, or differs between the profiles; or a dump is of another program.
    """
    check_name(request.name)
    if not request.profiles:
        raise OptionError("there is no profile to calibrate by; give an xplane.pb or a folder")
    twice = [
        path for path, times in Counter(map(Path.resolve, request.profiles)).items() if times > 1
    ]
    if twice:
        raise OptionError(f"{twice[0]} is given twice, and would count twice; give it once")
    on_given = request.on or None
    if isinstance(on_given, str):
        on_given = slice(on_given)
    dumps = _dumps(request.against)
    tables = _tables(request.profiles, request.chip or (on_given.chip.name if on_given else ""))
    for path, module in dumps.values():
        _check_dump(module, path, tables)
    chip = _chip_of(request.profiles, tables)
    modules = {name: module for name, (_, module) in dumps.items()}
    sources, measured = [], []
    for path, table in zip(request.profiles, tables, strict=True):
        on = on_given or _slice(table, modules, chip)
        _check_devices(on, path, table)
        of_dumps = {
            row.name: modules[name_of(row.name)]
            for row in table.programs
            if name_of(row.name) in modules
            and not ops_beyond(modules[name_of(row.name)], row.name, [table])
        }
        ops = measured_ops(table, on, {**programs_of(table), **of_dumps})
        measured.append(ops)
        sources.append(_source(path, table, ops))
    fitted = fit(measured, rates_of(on).host)
    if not fitted.factors:
        raise DataError(_nothing(request, measured, fitted.left_out))
    calibration = Calibration(
        name=request.name,
        chip=chip.name,
        factors=fitted.factors,
        made=date.today().isoformat(),
        num_profiles=len(sources),
    )
    return CalibrationRecord(
        calibration=calibration,
        sources=sources,
        compiler=_compiler(request.profiles),
        systolic=__version__,
        left_out=[*fitted.left_out, *(note for ops in measured for note in ops.notes)],
    )


def _dumps(paths: Sequence[Path]) -> Mapping[str, tuple[Path, Module]]:
    dumps: dict[str, tuple[Path, Module]] = {}
    for path in paths:
        if not path.is_file():
            raise NotFoundError(
                f"{path} is no file; give the scheduled HLO that --xla_dump_to wrote"
            )
        module = parse(counted_elsewhere(path.read_text(errors="replace")))
        dumps[module.name] = path, module
    return dumps


def _tables(paths: Sequence[Path], chip: str) -> list[ProfileTable]:
    """The ops of profiles; ``chip`` is for those that do not name theirs."""
    tables, refused = [], []
    for path in paths:
        try:
            tables.append(ProfileTable(open_profile(path, chip)))
        except OptionError as error:  # it names another
            refused.append(error)
            tables.append(ProfileTable(open_profile(path)))
    for path, table in zip(paths, tables, strict=True):
        if by := table.profile.trace.simulated_by:
            raise DataError(
                f"{path} is a schedule that {by} wrote, no measurement; give a profile of the chip"
            )
    if len(refused) == len(paths):
        raise refused[0]
    return tables  # of two generations, where one was refused


def _check_dump(module: Module, path: Path, tables: Sequence[ProfileTable]) -> None:
    """Refuses a dump of a program that the profiles did not run, or of another build of it."""
    ran = list(dict.fromkeys(row.name for table in tables for row in table.programs))
    versions = [name for name in ran if name_of(name) == module.name]
    if not versions:
        raise OptionError(
            f"{path} is {module.name}, and the profiles ran {', '.join(ran[:4])}; give the dump of one of these"
        )
    others = min((ops_beyond(module, name, tables) for name in versions), key=len)
    if others:
        raise OptionError(
            f"{path} is another build of {module.name}: {plural(len(others), 'op')} in the profiles have no such result in it, "
            f"{others[0]} first; give the dump of the program that ran"
        )


def _chip_of(paths: Sequence[Path], tables: Sequence[ProfileTable]) -> Chip:
    """The one generation of all profiles."""
    chips: dict[str, tuple[Path, Chip]] = {}
    for path, table in zip(paths, tables, strict=True):
        chip, backend = table.profile.ceilings.chip, table.profile.trace.backend
        if backend is not Backend.tpu:
            raise OptionError(
                f"{path} is of a {backend.value.upper()}, and only TPUs are simulated; give a TPU's profile"
            )
        if chip is None:
            what = table.profile.trace.kind or "nothing"
            raise OptionError(
                f"{path} does not name its chip (it says {what}), and factors are of one generation; add --chip tpu7x"
            )
        chips.setdefault(chip.name, (path, chip))
    if len(chips) > 1:
        (first_path, first), (second_path, second) = list(chips.values())[:2]
        raise OptionError(
            f"{first_path} is of {first.name} and {second_path} of {second.name}; make a calibration of each"
        )
    return next(iter(chips.values()))[1]


def _slice(table: ProfileTable, dumps: Mapping[str, Module], chip: Chip) -> Slice:
    """The slice that a profile was recorded on, by the devices that its programs name."""
    modules = [*table.profile.trace.modules.values(), *dumps.values()]
    number = max([devices_of(table), *(module.num_partitions for module in modules)])
    try:
        return slice_with(number, chip.name, chip.device_kind or chip.name)
    except NotFoundError as error:
        raise NotFoundError(f"{error}; or name the slice: --on {chip.name}-8") from error


def _check_devices(on: Slice, path: Path, table: ProfileTable) -> None:
    """Refuses a slice of another size than the collectives of a profile are made for."""
    named = devices_named(table)
    if named not in (0, on.num_devices):
        raise OptionError(
            f"{on.name} has {plural(on.num_devices, 'device')}, and the collectives of {path} are of {named}; leave out --on"
        )


def _source(path: Path, table: ProfileTable, ops: MeasuredOps) -> ProfileSource:
    ways = []
    if ops.simulated:
        ways.append("simulated programs")
    if ops.alone:
        ways.append("their lines, matmuls by the FLOPs and bytes that the profile counts")
    return ProfileSource(
        file=str(path.absolute()),
        devices=len(table.profile.devices),
        programs={row.name: row.runs for row in table.programs},
        priced_by=" and ".join(ways),
        matched_seconds=ops.matched,
        total_seconds=ops.total,
        not_matched=ops.unmatched,
    )


def _compiler(paths: Sequence[Path]) -> str:
    """Version of libtpu by the runs that the profiles lie in; empty where they lie in none, since profiles do not say it."""
    versions = []
    for path in paths:
        run = run_of(path)
        try:
            packages = json.loads((run / ENVIRONMENT).read_text())["packages"] if run else {}
        except (OSError, ValueError, KeyError):
            packages = {}
        if COMPILER in packages:
            versions.append(f"{COMPILER} {packages[COMPILER]}")
    return ", ".join(dict.fromkeys(versions))


def _nothing(
    request: CalibrationRequest, measured: Sequence[MeasuredOps], left_out: Sequence[str]
) -> str:
    which = ", ".join(map(str, request.profiles))
    if left_out:
        return f"no kind of op of {which} gives a factor: {'; '.join(left_out)}"
    kinds = dict.fromkeys(kind for ops in measured for kind in ops.unmatched)
    return f"no op of {which} is a microsecond long and has a price ({', '.join(kinds) or 'it has none'}); give the programs' scheduled HLO: --against DUMP.txt"
