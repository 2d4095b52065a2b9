"""The schedule in order on one core, with transfers and collectives beside it.

The TensorCore, or the compute stream of a GPU, runs one op after another. A ``-start`` puts its transfer on a lane (a torus axis, the stream of a
GPU's collectives, the DMA engines, the host link, the data-centre network), where transfers follow each other; its
``-done`` waits for it. What the core waits is exposed. Loops are simulated once and repeated: a
transfer may be under way beside a whole loop, and one that begins in a turn ends in it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from systolic.chips import Chip, Slice
from systolic.core.units import Origin, duration
from systolic.hlo import Computation, Instruction, Module, crosses
from systolic.hlo.groups import COLLECTIVES, groups_of
from systolic.hlo.shape import HBM, HOST, Shape
from systolic.sim.asynchronous import (
    Role,
    asked_as_reduce_scatter,
    collective_in,
    edge_seconds,
    kind_of,
    on_one_sparse_core,
    role_of,
    slowest_slice,
    started,
    wait_for_slices,
)
from systolic.sim.calibration import constant
from systolic.sim.cost_kinds import PriceCorrection, check_chip, cost_kind
from systolic.sim.gpu_ops import gpu_device
from systolic.sim.incomplete import (
    BYTES,
    HOST_WORK,
    NOTHING,
    PALLAS,
    PRINT_MOST_SECONDS,
    PRINT_SECONDS,
    PRINTED,
    Ends,
    GapKind,
    Gaps,
    Given,
    answers,
    fused_calls,
    is_callback,
    is_print,
    measured,
)
from systolic.sim.network import DIES, REDUCE_SCATTER, Network, Place, crossings, default_places
from systolic.sim.price import SMALL_SECONDS, DevicePrices, price
from systolic.sim.rates import clock_note, rates_of
from systolic.sim.timeline import (
    ASSUMED_SPREAD,
    PricedBy,
    Resource,
    Span,
    Timeline,
    layer_of,
    leaves_of,
    merged,
    span_of,
)

DMA_SHARE: float = constant("simulate.dma_share")
LANES = ("core", "dma")
"""Lanes whose spans read and write device memory."""
DMA_SECONDS: float = constant("simulate.dma_seconds")
TURN_SECONDS: float = constant("simulate.turn_seconds")
MUCH = 0.02
"""Share of the step above which a note reports estimated ops."""
SPARSE = "sparse"
"""The lane of what is offloaded to SparseCores."""


def memory_seconds(timeline: Timeline, device: DevicePrices) -> float:
    """Seconds of device memory in a step: of each span its bytes at the rate of copies, and no more than the span takes.

    Transfers into the chip's vector memory run beside ops that read device memory too.
    The schedule has them on two lanes. Together they take no less than their bytes at the rate that copies reach, which binds a
    step that does little else than read weights: a token of a server.
    """
    rate = device.hbm * DMA_SHARE
    return sum(
        times * min(span.seconds, span.bytes / rate)
        for span, times in timeline.leaves()
        if span.lane in LANES and span.resource not in (Resource.ici, Resource.dcn, Resource.host)
    )


def shared(start: float, seconds: float) -> Span:
    """The wait for the memory, at the end of a step."""
    return Span(
        name="memory",
        opcode="wait memory",
        start=start,
        seconds=seconds,
        resource=Resource.hbm,
        priced_by=PricedBy.rule,
    )


def simulate(
    module: Module,
    on: Slice,
    places: Sequence[Place] | None = None,
    flags: Sequence[str] = (),
    given: Given = NOTHING,
) -> Timeline:
    """The step that ``module`` schedules, on one device of ``on``.

    Args:
        module: Scheduled HLO of one core.
        places: (x, y, z, core, slice) of the devices in the order of the mesh; JAX's default order
            otherwise.
        flags: Of the compiler, which the module does not name.
        given: Trips and costs that the module leaves open, and corrections from profiles.

    Raises:
        OptionError: the module has nothing of a name that is given, or contradicts a number of trips; or the corrections
            are of another generation.
    """
    correction = None
    if given.calibration is not None:
        check_chip(given.calibration, on)
        correction = PriceCorrection(given.calibration)
    places = list(places) if places else default_places(on)
    if on.num_slices > 1 and module.num_partitions * on.num_slices == on.num_devices:
        # Such a module numbers the devices of its own slice; what crosses slices is sent and received.
        places = [place for place in places if place[4] == places[0][4]]
    gaps = Gaps(module, given)
    run = _Simulation(
        module=module,
        device=_device(on, places, flags, correction),
        correction=correction,
        num_devices=len(places),
        num_slices=on.num_slices,
        gaps=gaps,
    )
    timeline = _simulated(run, on)
    missed = measured(gaps.missed.values(), timeline.spans)
    timeline = replace(
        timeline,
        incomplete=missed,
        given=tuple(gaps.lines()),
        notes=(*timeline.notes, *clock_note(on.chip, flags)),
    )

    def at(ends: Ends) -> Timeline:
        return _simulated(replace(run, gaps=gaps.at(ends), notes={}, known={}), on)

    if any(part.is_assumed for part in missed):
        timeline = replace(timeline, least=at(Ends.least))
    if missed and all(part.bounded for part in missed):
        timeline = replace(timeline, most=at(Ends.most))
    return timeline


def _device(
    on: Slice, places: Sequence[Place], flags: Sequence[str], correction: PriceCorrection | None
) -> DevicePrices:
    if on.platform == "gpu":
        return gpu_device(on, [place[0] for place in places])
    rates = rates_of(on, flags=flags)
    network = Network(on, rates, places)
    return DevicePrices(
        peaks=rates.peaks,
        hbm=rates.hbm,
        host=rates.host if correction is None else correction.host(rates.host),
        link=rates.link,
        turn_seconds=TURN_SECONDS,
        price=lambda module, held, op, sparse: price(module, held, op, rates, sparse),
        collective=network.collective,
        on_sparse_core=network.on_sparse_core,
        between=network.between,
    )


def _simulated(run: "_Simulation", on: Slice) -> Timeline:
    """The step of the entry, and what the whole of it waits for."""
    step = run.computation(run.module.entry)
    spans, seconds = step.spans, step.seconds
    if on.num_slices > 1 and any(lane.startswith("dcn") for lane in step.used):
        waited = wait_for_slices(seconds, on.num_slices)
        spans = (*spans, slowest_slice(seconds, waited))
        seconds += waited
        run.notes[
            f"{waited / seconds:.1%} of the step is an allowance for waiting for the slowest of {on.num_slices} slices, fitted to published steps"
        ] = None
    timeline = Timeline(
        origin=Origin.simulated,
        seconds=seconds,
        spans=spans,
        notes=merged(run.notes),
        turn_seconds=run.device.turn_seconds,
        calibration=None if run.correction is None else run.correction.calibration,
    )
    if (over := memory_seconds(timeline, run.device) - seconds) > 0:
        run.notes[
            "transfers beside ops that read memory too: the step takes as long as their bytes"
        ] = None
        timeline = replace(
            timeline,
            seconds=seconds + over,
            spans=(*spans, shared(seconds, over)),
            notes=merged(run.notes),
        )
        seconds += over
    timeline = replace(
        timeline,
        notes=(
            *timeline.notes,
            *run.gaps.notes(),
            *_rule_notes(timeline),
            *_assumed_note(timeline),
            *_one_way(timeline, run.one_way),
            *_host_note(step, seconds, on.chip, run.device.host),
            *(() if run.correction is None else run.correction.notes(rates_of(on).host)),
        ),
    )
    estimated = sum(s.seconds * n for s, n in timeline.leaves() if s.priced_by is PricedBy.estimate)
    if estimated > MUCH * seconds:
        note = f"ops without the compiler's cycles take {estimated / seconds:.0%} of the time, at rates fitted to other programs"
        return replace(timeline, notes=(*timeline.notes, note))
    return timeline


def _rule_notes(timeline: Timeline) -> list[str]:
    """Note on the ops that rules estimate, with the range of each kind; none where they take little."""
    kinds: dict[str, list[float]] = {}
    for span, times in timeline.leaves():
        if span.lane == "core" and span.low is not None and span.high is not None:
            of = kinds.setdefault(span.price_source, [0.0, 0.0, 0.0])
            for at, seconds in enumerate((span.seconds, span.low, span.high)):
                of[at] += seconds * times
    if sum(of[0] for of in kinds.values()) <= MUCH * timeline.seconds:
        return []
    listed = "; ".join(
        f"{kind} {duration(seconds)} ({duration(low)} to {duration(high)})"
        for kind, (seconds, low, high) in sorted(
            kinds.items(), key=lambda kind_times: -kind_times[1][0]
        )
        if seconds > MUCH * timeline.seconds / len(kinds)
    )
    return [f"estimated by rule, since the compiler has no cycles for them: {listed}"]


def _assumed_note(timeline: Timeline) -> list[str]:
    """Note on ops and turns of which each takes an assumed time; none where they take little."""
    if not timeline.assumed:
        return []
    return [
        f"{timeline.assumed / timeline.seconds:.0%} of the time is assumed, by no measurement: {SMALL_SECONDS * 1e6:g} us an op on few bytes and {timeline.turn_seconds * 1e6:g} us a turn of a loop, such as one of gathers that run slice by slice; the range has {ASSUMED_SPREAD:g} times as much and as little"
    ]


def _one_way(timeline: Timeline, names: set[str]) -> list[str]:
    """Note on reduce-scatters that the core waits for: why one takes more than half an all-reduce."""
    waited = sum(
        span.seconds * times
        for span, times in timeline.leaves()
        if span.lane == "core" and span.name in names
    )
    if waited <= MUCH * timeline.seconds:
        return []
    return [
        f"{waited / timeline.seconds:.0%} of the step is reduce-scatters: the compiler runs them as fusions with one ring, one way, at {REDUCE_SCATTER:.0%} of what the links carry or less (measured on v5p-8 and v6e-8), so that one takes more than half an all-reduce"
    ]


def _host_note(step: "_Ran", seconds: float, chip: Chip, host: float) -> list[str]:
    """Note on copies of the host that count at more than twice the rate that chips copied at by themselves; none where they are few."""
    if (measured := chip.measured_hbm_to_host_bytes_per_second) is None:
        return []
    busiest = max((step.used.get(f"host {way}", 0.0) for way in ("in", "out")), default=0.0)
    longer = busiest * (host / measured - 1)
    if host <= 2 * measured or longer <= MUCH * seconds:
        return []
    return [
        f"copies to and from the host count at {host / 1e9:g} GB/s, as published steps hide them; by themselves chips copied at {measured / 1e9:g}, at which each way of these takes {duration(longer)} longer, hidden or not"
    ]


@dataclass
class _Transfer:
    span: Span
    finish: float
    lanes: Sequence[str]
    edge: float = 0.0
    """Seconds that its end takes of the core, whenever it comes."""


@dataclass(frozen=True)
class _Ran:
    """One run of a computation."""

    seconds: float
    spans: tuple[Span, ...]
    used: Mapping[str, float]
    """Seconds that each lane was in use."""


@dataclass
class _Simulation:
    module: Module
    device: DevicePrices
    correction: PriceCorrection | None
    num_devices: int
    num_slices: int
    gaps: Gaps
    notes: dict[str, None] = field(default_factory=dict)
    known: dict[tuple[str, bool], _Ran] = field(default_factory=dict)
    one_way: set[str] = field(default_factory=set)
    """Reduce-scatters that run one ring, one way."""

    @cached_property
    def aside(self) -> "_Simulation":
        """The same without corrections, which are of ops on the core: for what runs beside it."""
        return self if self.correction is None else replace(self, correction=None, known={})

    def computation(self, computation: Computation, sparse: bool = False) -> _Ran:
        """One run of it, on SparseCores where ``sparse``, simulated once."""
        key = computation.name, sparse
        if key not in self.known:
            self.known[key] = _Order(self, computation, sparse).run()
        return self.known[key]


def _price_of(offloaded: _Ran) -> dict[str, object]:
    """Source and ends of the seconds of what a SparseCore runs: those of its rules, if it has any."""
    ruled = [
        (span, times)
        for span, times in leaves_of(offloaded.spans, 1)
        if span.lane == "core" and span.high is not None
    ]
    if not ruled:
        return {"priced_by": PricedBy.bytes}
    longest, _ = max(ruled, key=lambda leaf: leaf[0].seconds * leaf[1])
    low = sum(times * (span.seconds - (span.low or 0.0)) for span, times in ruled)
    high = sum(times * ((span.high or 0.0) - span.seconds) for span, times in ruled)
    seconds = offloaded.seconds
    return {"priced_by": longest.priced_by, "low": seconds - low, "high": seconds + high}


class _Order:
    """One computation's instructions, in order."""

    def __init__(self, run: _Simulation, computation: Computation, sparse: bool) -> None:
        self.on, self.computation, self.sparse = run, computation, sparse
        self.now = 0.0
        self.spans: list[Span] = []
        self.busy: dict[str, float] = defaultdict(float)
        self.used: dict[str, float] = defaultdict(float)
        self.pending: dict[str, _Transfer] = {}

    def run(self) -> _Ran:
        for instruction in self.computation:
            self.step(instruction)
        # Transfers without a ``-done`` end with the computation.
        for transfer in self.pending.values():
            self.wait(transfer)
        spans = tuple(sorted(self.spans, key=lambda span: span.start))
        return _Ran(self.now, spans, self.used)

    def step(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self.loop(instruction)
        elif opcode == "conditional":
            self.branch(instruction)
        elif opcode == "call":
            self.call(instruction, instruction.called("to_apply") or "")
        elif opcode.endswith("-done"):
            self.done(instruction)
        elif opcode == "async-update":
            return
        elif opcode.endswith("-start"):
            self.begin(instruction)
        elif opcode in ("send", "recv"):
            self.cross(instruction)
        elif opcode in COLLECTIVES:
            self.collective(instruction, instruction, self.computation, beside=False)
        elif opcode == "fusion" and (role := role_of(self.on.module, instruction)) is not Role.none:
            held = self.on.module.computations[instruction.called("calls") or ""]
            inner = next((i for i in held if i.opcode in COLLECTIVES), None)
            if role is Role.end or inner is None:
                self.done(instruction)
            else:
                self.collective(instruction, inner, held, beside=role is Role.begin, carried=True)
        else:
            self.op(instruction)

    # On the core

    def op(self, instruction: Instruction) -> None:
        on = self.on
        if "callback" in instruction.target:
            self.callback(instruction)
            return
        paid = on.device.price(on.module, self.computation, instruction, self.sparse)
        if paid is None:
            return
        given_seconds = on.gaps.cost(self.computation, instruction)
        if given_seconds is None and on.correction is not None:
            paid = on.correction.of(paid, instruction, on.device)
        if given_seconds is not None:
            paid = replace(paid, seconds=given_seconds, by=PricedBy.given, note="", missing="")
        if paid.note:
            self.on.notes[paid.note] = None
        if paid.by is PricedBy.nothing or paid.missing:
            held = [call.target for _, call in fused_calls(on.module, instruction)]
            kind = GapKind.kernel if PALLAS in (instruction.target, *held) else GapKind.call
            kind = GapKind.callback if is_callback(instruction) else kind
            self.on.gaps.miss(self.computation, instruction, kind, paid.missing or BYTES)
        self.add(
            instruction,
            paid.seconds,
            paid.resource,
            flops=paid.flops,
            vector_flops=paid.vector_flops,
            padding_flops=paid.padding_flops,
            number_format=paid.number_format,
            bytes=paid.bytes,
            priced_by=paid.by,
            low=paid.low,
            high=paid.high,
        )

    def add(
        self, instruction: Instruction, seconds: float, resource: Resource, **more: object
    ) -> None:
        self.spans.append(self.span(instruction, seconds, resource, "core", **more))
        self.now += seconds

    def span(
        self,
        instruction: Instruction,
        seconds: float,
        resource: Resource,
        lane: str = "core",
        **more: object,
    ) -> Span:
        """A span that begins now."""
        span = span_of(self.on.module, self.computation, instruction, seconds, resource)
        return replace(span, start=self.now, lane=lane, **more)

    def loop(self, instruction: Instruction) -> None:
        count = self.on.gaps.trips(self.computation, instruction)
        if count:
            name = instruction.called("body") or ""
            body = self.called(name)
            self.nest(
                instruction,
                replace(body, seconds=body.seconds + self.on.device.turn_seconds),
                count,
            )

    def branch(self, instruction: Instruction) -> None:
        names, gaps = instruction.called_computations, self.on.gaps
        runs = {number: self.called(names[number]) for number in gaps.possible(instruction)}
        seconds = {number: run.seconds for number, run in runs.items()}
        for number, share in gaps.branches(self.computation, instruction, seconds).items():
            self.nest(instruction, runs[number], share)

    def call(self, instruction: Instruction, name: str) -> None:
        self.nest(instruction, self.called(name))

    def called(self, name: str) -> _Ran:
        """One run of a computation, on the cores that run this one."""
        return self.on.computation(self.on.module.computations[name], self.sparse)

    def nest(self, instruction: Instruction, inner: _Ran, times: float = 1) -> None:
        """Runs a computation so many times, beside the transfers that are under way."""
        seconds = inner.seconds * times
        for transfer in self.pending.values():
            left = transfer.finish - self.now
            if left <= 0:
                continue
            # What is inside takes its part of the links, and the transfer has the rest of them.
            taken = max((inner.used.get(lane, 0.0) for lane in transfer.lanes), default=0.0)
            taken = min(taken * times, seconds)
            free = seconds - taken
            transfer.finish += taken if left >= free else left * taken / free
            for lane in transfer.lanes:
                self.busy[lane] = max(self.busy[lane], transfer.finish)
        for lane, used in inner.used.items():
            self.used[lane] += used * times
        outer = self.span(instruction, seconds, Resource.idle)
        self.spans.append(replace(outer, repeat=times, inside=inner.spans))
        self.now += seconds

    # Beside it

    def put(self, instruction: Instruction, span: Span, lanes: Sequence[str]) -> _Transfer:
        """A transfer that begins when its lanes are free."""
        start = max([self.now, *(self.busy[lane] for lane in lanes)])
        transfer = _Transfer(replace(span, start=start), start + span.seconds, lanes)
        for lane in lanes:
            self.busy[lane] = transfer.finish
            self.used[lane] += span.seconds
        self.spans.append(transfer.span)
        self.pending[instruction.name] = transfer
        return transfer

    def wait(self, transfer: _Transfer) -> None:
        self.expose(transfer, max(transfer.finish - self.now, transfer.edge))

    def expose(self, transfer: _Transfer, seconds: float) -> None:
        """The core waits for a transfer."""
        if seconds > 0:
            of = transfer.span
            ends = {}
            if of.low is not None and of.high is not None:
                ends = {
                    "low": max(seconds + of.low - of.seconds, 0.0),
                    "high": seconds + of.high - of.seconds,
                }
            self.spans.append(
                replace(
                    of,
                    opcode=f"wait {of.opcode}",
                    start=self.now,
                    seconds=seconds,
                    lane="core",
                    flops=0.0,
                    bytes=0.0,
                    **ends,
                )
            )
            self.now += seconds

    def done(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            if (begun := started(self.computation, name, self.pending)) is not None:
                self.wait(self.pending.pop(begun))

    def begin(self, instruction: Instruction) -> None:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            # A GPU's collective that its schedule does not overlap runs among the kernels.
            beside = '"is_sync":true' not in instruction.rest
            self.collective(instruction, instruction, self.computation, beside=beside)
            return
        if kind in ("async", "call"):
            self.begin_async(instruction)
            return
        shapes = instruction.shape
        self.copy(instruction, shapes)

    def begin_async(self, instruction: Instruction) -> None:
        name = instruction.called("calls") or instruction.called("to_apply") or ""
        held = self.on.module.computations[name]
        if (collective := collective_in(self.on.module, held)) is not None:
            self.collective(instruction, *collective, beside=True)
            return
        sparse = 'async_execution_thread="sparsecore"' in instruction.rest
        inner = self.on.aside.computation(held, sparse)
        seconds = inner.seconds
        if sparse:
            span = self.span(instruction, seconds, Resource.vpu, SPARSE, **_price_of(inner))
            self.put(instruction, span, [SPARSE])
            return
        root = held.root
        moved = root.shape.padded_bytes
        if root.opcode == "dynamic-update-slice" and root.operands[1] in held.index:
            moved = held[root.operands[1]].shape.padded_bytes  # in place: only the update moves
        places = {s.space for s in root.shape.arrays()} | {
            s.space for operand in held.operand_shapes(root) for s in operand.arrays()
        }
        lane, resource, rate = self.way(places)
        if lane == "host" or not seconds:
            seconds = moved / rate + DMA_SECONDS
        elif places & {HBM}:
            # A slice that is fetched into vector memory is priced as an op by what it leaves in device memory: nothing.
            seconds = max(seconds, moved / rate)
        span = self.span(
            instruction,
            seconds,
            resource,
            lane,
            bytes=float(moved),
            priced_by=PricedBy.bytes,
        )
        self.move(instruction, span, into=root.shape)

    def copy(self, instruction: Instruction, shape: Shape) -> None:
        # (destination, source, context) for copies, ((sources), result, context) for slices.
        arrays = [s for s in shape.arrays() if s.dtype not in ("u32", "s32") or s.elements > 2]
        moved = min((s.padded_bytes for s in arrays), default=0)
        lane, resource, rate = self.way({s.space for s in arrays})
        # DMA engines run side by side: they share the rate, not the latency.
        latency = 0.0 if lane == "dma" else DMA_SECONDS
        span = self.span(
            instruction,
            moved / rate + latency,
            resource,
            lane,
            bytes=float(moved),
            priced_by=PricedBy.bytes,
        )
        transfer = self.move(instruction, span, into=arrays[0] if arrays else shape)
        transfer.finish += DMA_SECONDS - latency

    def move(self, instruction: Instruction, span: Span, into: Shape) -> _Transfer:
        """A copy after those of its lane; the link to the host has both directions."""
        out = any(shape.space == HOST for shape in into.arrays())
        way = f"host {'out' if out else 'in'}"
        return self.put(instruction, span, [way if span.lane == "host" else span.lane])

    def way(self, spaces: set[int]) -> tuple[str, Resource, float]:
        """Lane, resource and rate of a copy between memory spaces."""
        if HOST in spaces:
            return "host", Resource.host, self.on.device.host
        return "dma", Resource.hbm, self.on.device.hbm * DMA_SHARE

    def cross(self, instruction: Instruction) -> None:
        shape = instruction.shape
        moved = max((s.padded_bytes for s in shape.arrays()), default=0)
        host = "is_host_transfer=true" in instruction.rest
        if is_callback(instruction) and not answers(self.computation, instruction):
            self.callback(instruction)
        num_slices = self.on.num_slices
        between = num_slices > 1 and crosses(instruction)
        if between:
            times, note = crossings(instruction, num_slices)
            moved = moved * times
            if note:
                self.on.notes[note] = None
        lane = "dcn" if between else "host" if host else "x"
        rate = self.on.device.host if host else self.on.device.link
        if between:
            rate = self.on.device.between(instruction)
        resource = {"dcn": Resource.dcn, "host": Resource.host}.get(lane, Resource.ici)
        span = self.span(
            instruction,
            moved / rate,
            resource,
            lane,
            bytes=float(moved),
            priced_by=PricedBy.network,
        )
        self.put(instruction, span, [f"{lane} {instruction.opcode}"])

    def callback(self, instruction: Instruction) -> None:
        """The host's part of a callback, while the device waits."""
        gaps = self.on.gaps
        given_seconds = gaps.cost(self.computation, instruction)
        if given_seconds is not None:
            self.add(instruction, given_seconds, Resource.host, priced_by=PricedBy.given)
        elif is_print(instruction):
            self.on.notes[PRINTED] = None
            ends = {"low": 0.0, "high": PRINT_MOST_SECONDS}
            by = PricedBy.print
            self.add(instruction, PRINT_SECONDS, Resource.host, priced_by=by, **ends)
        else:
            gaps.miss(self.computation, instruction, GapKind.callback, HOST_WORK)

    def collective(
        self,
        instruction: Instruction,
        inner: Instruction,
        held: Computation,
        beside: bool,
        carried: bool = False,
    ) -> None:
        kind = kind_of(held, inner)
        if kind == "all-reduce" and asked_as_reduce_scatter(self.on.module, held, inner):
            self.on.notes[
                f"{inner.name} is a reduce-scatter in the program: the compiler made it an all-reduce of the whole array and a slice, at the price of both"
            ] = None
        operands = sum(s.bytes for s in held.operand_shapes(inner))
        result = inner.shape
        if inner.opcode.endswith("-start") and result.parts is not None:
            # (operands, results, context…): the results are the second part, or half the arrays.
            result = result.parts[1] if len(result.parts) > 1 else result
        groups = groups_of(inner, self.on.num_devices)
        cost = self.on.device.collective(kind, groups, float(result.bytes), float(operands))
        if kind == "all-gather" and on_one_sparse_core(inner):
            cost = self.on.device.on_sparse_core(cost)
        if kind == "reduce-scatter" and cost.share <= REDUCE_SCATTER:
            self.on.one_way.add(instruction.name)
        seconds, correction = cost.seconds, self.on.correction
        resource = Resource.dcn if "dcn" in cost.lanes else Resource.ici
        within = cost.lanes == (DIES,)
        if correction is not None:
            paid = PricedBy.network
            of = cost_kind("", kind, paid, resource, "ici", within_chip=within)
            seconds = correction.seconds(of, instruction.name, seconds, cost.least)
        lane = "dcn" if resource is Resource.dcn else "ici"
        span = self.span(
            instruction,
            seconds,
            resource,
            lane if beside else "core",
            bytes=cost.bytes,
            priced_by=PricedBy.network,
        )
        if not span.layer:
            span = replace(span, layer=layer_of(inner.op_name))
        span = replace(span, opcode=kind, within_chip=within)
        if beside:
            transfer = self.put(instruction, span, cost.lanes)
            if carried:
                transfer.edge = edge_seconds(seconds, cost.steps)
                self.expose(transfer, transfer.edge)
        else:
            # Links are shared: one that waits for none but itself takes turns with what is under way.
            left = max([0.0, *(self.busy[lane] - self.now for lane in cost.lanes)])
            taken = seconds + min(left, seconds)
            for transfer in self.pending.values():
                if set(cost.lanes) & set(transfer.lanes):
                    transfer.finish += min(max(transfer.finish - self.now, 0.0), seconds)
            self.spans.append(replace(span, start=self.now, seconds=taken))
            for lane in cost.lanes:
                self.busy[lane] = max(self.busy[lane], self.now) + seconds
                self.used[lane] += seconds
            self.now += taken
