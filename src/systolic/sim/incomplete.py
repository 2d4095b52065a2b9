"""Parts of a program whose time it leaves open, and what its user gives instead.

A loop or a branch on data, a kernel or a custom call of unknown work and a callback to the host leave a step's
seconds open. Each is named as the user may name it: ``while.5`` or ``train.py:42`` for a loop,
an instruction, a custom call's target, or the name of a kernel or a callback for the others.
"""

import enum
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from systolic.core.errors import OptionError, nearest
from systolic.core.units import duration
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.loops import ENDLESS, NO_END, LoopCounts, LoopTrips, Shares, counts_of
from systolic.hlo.module import named
from systolic.sim.calibration import Calibration, constant

if TYPE_CHECKING:
    from systolic.sim.timeline import Span

PALLAS = "tpu_custom_call"
"""Target of Pallas kernels."""
FREE_TARGETS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"}
    | {"AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding", "SPMDFullToShardShape"}
    | {"SPMDShardToFullShape", "annotate_device_placement"}
)
MOVED_TARGETS = frozenset(
    {"X64Combine", "X64SplitHigh", "X64SplitLow", "GatherScatterIndicesBitpacked"}
    | {"PrepareAsyncCallStart", "PrepareAsyncCallDone", "SliceId", "ZeroCrop"}
)
"""Custom calls of the compiler that only move their bytes, or compute a number of the device."""
TOP_K = "TopK"
"""Target of ``jax.lax.top_k``, which a rule prices."""
PARTIAL_REDUCE = "PartialReduce"
"""Target of ``jax.lax.approx_max_k``: one pass over its input, which its bytes price."""
_KNOWN = FREE_TARGETS | MOVED_TARGETS | {TOP_K, PARTIAL_REDUCE}
PRINT = "debug_print"
"""JAX's name of ``jax.debug.print``."""
PRINT_SECONDS: float = constant("incomplete.print_seconds")
PRINT_MOST_SECONDS: float = constant("incomplete.print_most_seconds")
PRINTED = f"jax.debug.print is taken as {duration(PRINT_SECONDS)} of the host a call, up to {duration(PRINT_MOST_SECONDS)}, by no measurement of this device; give its time with --cost {PRINT}=1ms, or leave it out"
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_COST = re.compile(r"([0-9.eE+-]+?)\s*(s|ms|us|µs|μs|ns)")
Trips = Mapping[str, float | str] | Iterable[str]
"""Trips of loops by name, or texts such as ``while.5=100``."""
Costs = Mapping[str, float | str] | Iterable[str]
"""Numbers by name, or texts such as ``NAME=1.2ms``; costs in seconds."""
BYTES = "no rule prices it, counted by its bytes"
DATA = "its loops and branches on data count once"
HOST_WORK = "counted by its bytes on the link, without what the host does"


class GapKind(enum.Enum):
    """Kinds of parts of a program."""

    loop = "loop"
    branch = "branch"
    kernel = "kernel"
    call = "custom call"
    callback = "callback"


class Ends(enum.Enum):
    """Ends of the range that loops and branches on data leave open."""

    usual = "usual"
    """The least trips, but one at least, and the longest branch."""
    most = "most"
    """The most trips, where these are bounded, and the longest branch."""
    least = "least"
    """The least trips and the shortest branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incomplete:
    """A part of a step whose time the program does not say."""

    part: GapKind
    name: str
    """The HLO instruction."""
    label: str = ""
    """A custom call's target, or the name of a kernel or a callback."""
    op_name: str = ""
    source: str = ""
    """``file:line``."""
    trips: LoopTrips = NO_END
    """Trips of a loop."""
    counted: float = 1.0
    """Trips of a loop that are counted."""
    branches: tuple[float, float] = (0.0, 0.0)
    """Seconds of one run of a conditional by its shortest and its longest branches."""
    why: str = ""
    """How another part than a loop is counted."""
    fused: bool = False
    """Whether the instruction is a fusion that holds the kernel or the custom call."""
    runs: float = 1.0
    """Runs in a step."""
    seconds: float = 0.0
    """Seconds of the step that are counted for it."""

    @property
    def place(self) -> str:
        """Place in the source, else in the model."""
        return self.source or self.op_name

    @property
    def bounded(self) -> bool:
        """Whether the program bounds it."""
        return self.part is GapKind.branch or (
            self.part is GapKind.loop and self.trips.most is not None
        )

    @property
    def is_assumed(self) -> bool:
        """Whether more is counted for it than the program promises: it may take less."""
        return self.part is GapKind.branch or (
            self.part is GapKind.loop and self.counted > self.trips.least
        )

    @property
    def how(self) -> str:
        """How it is counted."""
        if self.part is GapKind.loop:
            most = "" if self.trips.most is None else f", at most {times(self.trips.most)}"
            none = " (an assumption: it may make none)" if self.is_assumed else ""
            return f"counted {times(self.counted)}{none}{most}"
        if self.part is GapKind.branch:
            short, long = map(duration, self.branches)
            return f"counted as its longest branch, {long} (the shortest takes {short})"
        return self.why

    def to_json(self) -> dict[str, object]:
        """Kind, place and count as plain values; ``op`` as the table of ops has it."""
        opcode = {
            GapKind.loop: "while",
            GapKind.branch: "conditional",
            GapKind.callback: "send",
        }.get(self.part, "fusion" if self.fused else "custom-call")
        fields: dict[str, object] = {
            "op": f"{opcode} {self.name}",
            "kind": self.part.value,
            "name": self.name,
            "label": self.label,
            "op_name": self.op_name,
            "source": self.source,
            "seconds": self.seconds,
            "how": self.how,
            "assumed": self.is_assumed,
        }
        if self.part is GapKind.loop:
            counts = {"counted_trips": self.counted, "least_trips": self.trips.least}
            fields |= {**counts, "most_trips": self.trips.most}
        if self.part is GapKind.branch:
            fields |= dict(zip(("shortest_seconds", "longest_seconds"), self.branches, strict=True))
        return fields


def times(count: float) -> str:
    """``once`` or ``9.5 times``."""
    return "once" if count == 1 else f"{count:,g} times"


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Trips, costs and corrections that the user gives for a program and its chips."""

    trips: Mapping[str, float] = field(default_factory=dict)
    """Loop to its trips in one run of the computation that holds it."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Kernel, custom call or callback to the seconds of one call."""
    calibration: Calibration | None = None
    """Corrections of the simulator's prices, from profiles."""
    strict: bool = True
    """Whether a program must have all of the names; of variants of a program each may have some."""

    def __bool__(self) -> bool:
        return bool(self.trips or self.costs)

    def to_json(self) -> dict[str, dict[str, float]]:
        """Trips, and costs in seconds."""
        return {"trips": dict(self.trips), "costs": dict(self.costs)}

    def lines(self, loops: Mapping[str, int]) -> list[str]:
        """A line for each number: what was given for what; ``loops`` is the number of loops that each name sets."""
        lines = [
            f"{name} makes {number:,g} trips"
            + (f" in each of {loops[name]} loops" if loops.get(name, 1) > 1 else "")
            for name, number in self.trips.items()
        ]
        return [*lines, *(f"{name} takes {duration(s)} a call" for name, s in self.costs.items())]


NOTHING = Given()


def given(trips: Trips = (), costs: Costs = ()) -> Given:
    """Reads trips and costs: mappings, or texts such as ``while.5=100`` and ``my_kernel=1.2ms``.

    Raises:
        OptionError: a text is not NAME=NUMBER, or a number is none or negative.
    """
    return Given(
        trips={
            name: _trips(name, text)
            for name, text in _pairs(trips, "trips", "NAME=NUMBER, such as while.5=100")
        },
        costs={
            name: _cost(name, text)
            for name, text in _pairs(costs, "cost", "NAME=TIME, such as my_kernel=1.2ms")
        },
    )


def _pairs(texts: Trips, option: str, example: str) -> Iterator[tuple[str, float | str]]:
    if isinstance(texts, Mapping):
        yield from texts.items()
        return
    for text in (texts,) if isinstance(texts, str) else texts:
        name, equals, number = str(text).rpartition("=")
        if not (equals and name.strip() and number.strip()):
            raise OptionError(f"--{option} is {text!r}; write {example}")
        yield name.strip(), number.strip()


def _trips(name: str, text: float | str) -> float:
    try:
        number = float(str(text).replace("_", "")) if not isinstance(text, bool) else math.nan
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise OptionError(f"trips of {name} are {text!r}; give a number of at least 0, such as 100")
    return number


def _cost(name: str, text: float | str) -> float:
    match = _COST.fullmatch(str(text).strip())
    try:
        number = float(match[1]) * _SECONDS[match[2]] if match else float(text)
    except ValueError:
        number = math.nan
    if isinstance(text, bool) or not (math.isfinite(number) and number >= 0):
        raise OptionError(
            f"the cost of {name} is {text!r}; give the seconds of one call, such as 1.2ms, 350us or 0.002"
        )
    return number


@dataclass
class Gaps:
    """Knowledge of a program's loops, kernels and calls, and gaps found while pricing it."""

    module: Module
    given: Given = NOTHING
    ends: Ends = Ends.usual
    counts: LoopCounts = field(init=False)
    missed: dict[str, Incomplete] = field(default_factory=dict)
    named_loops: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Loops that each of the names that were given sets."""
    slowest: dict[str, str] = field(default_factory=dict)
    """Loops and branches that devices differ in, to how they are counted."""

    def __post_init__(self) -> None:
        self.counts = counts_of(self.module)
        if self.given and self.given.strict:
            self._check()

    @property
    def loops(self) -> Mapping[str, LoopTrips]:
        """Trips of every loop by its name."""
        return self.counts.loops

    def at(self, ends: Ends) -> "Gaps":
        """The same with other ends of what is open."""
        other = copy(self)
        other.ends, other.missed = ends, {}
        return other

    def lines(self) -> list[str]:
        """A line for each number that was given."""
        return self.given.lines({name: len(loops) for name, loops in self.named_loops.items()})

    def notes(self) -> list[str]:
        """A note on what the slowest device decides."""
        if not self.slowest:
            return []
        held = _few([*self.slowest.values()])
        return [f"devices differ, and the slowest decides the step: {held}"]

    def differs(self, computation: Computation, instruction: Instruction, how: str) -> None:
        """Notes a part that devices run differently."""
        place = self.describe(computation, instruction, GapKind.loop).place
        self.slowest[instruction.name] = f"{instruction.name}{place and f' ({place})'} {how}"

    def trips(self, computation: Computation, loop: Instruction) -> float:
        """Trips of a loop to price: the program's, the user's, else the least; notes it where they are open."""
        known = self.loops.get(loop.name, NO_END)
        if known.mean is not None:
            if loop.name in self.counts.apart:
                self.differs(computation, loop, f"makes up to {times(known.mean)}")
            return _whole(known.mean)
        for name in self.names(computation, loop):
            if name in self.given.trips:
                self.named_loops[name].add(loop.name)
                return _whole(self.given.trips[name])
        most = known.most if known.most is not None and known.most < ENDLESS else None
        counted = max(known.least, 1)
        gap = self.describe(computation, loop, GapKind.loop)
        bounds = LoopTrips(least=known.least, most=most)
        self.missed[loop.name] = replace(gap, trips=bounds, counted=counted)
        if self.ends is Ends.least:
            return known.least
        return most if self.ends is Ends.most and most is not None else counted

    def possible(self, conditional: Instruction) -> Sequence[int]:
        """Branches that run at all."""
        every = tuple(range(len(conditional.called_computations)))
        shares = self.counts.branches.get(conditional.name, {every: 1.0})
        return sorted({branch for some in shares for branch in some})

    def branches(
        self, computation: Computation, conditional: Instruction, seconds: Mapping[int, float]
    ) -> dict[int, float]:
        """Share of a conditional's runs that takes each branch: by its counters, else the longest; notes it where it is open.

        Args:
            computation: The one that holds it.
            conditional: The instruction.
            seconds: Of one run of each branch that may run.
        """
        every = tuple(seconds)
        held = self.counts.by_device.get(conditional.name)
        if held:
            self.differs(computation, conditional, "takes the branches of the slowest")
        shares = held or [self.counts.branches.get(conditional.name, {every: 1.0})]
        ends = [[_mean(row, seconds, choose) for choose in (min, max)] for row in shares]
        short, long = (max(column) for column in zip(*ends, strict=True))
        if short < long:
            gap = self.describe(computation, conditional, GapKind.branch)
            self.missed[conditional.name] = replace(gap, branches=(short, long))
        is_least = self.ends is Ends.least
        at = max(range(len(shares)), key=lambda place: ends[place][not is_least])
        taken: dict[int, float] = defaultdict(float)
        for some, share in shares[at].items():
            choose = min if is_least else max
            taken[choose(some, key=lambda branch: seconds[branch])] += share
        return dict(taken)

    def cost(self, computation: Computation, instruction: Instruction) -> float | None:
        """Seconds that the user gives for a call; None without any."""
        if not self.given.costs:
            return None
        names = self.names(computation, instruction)
        return next((self.given.costs[name] for name in names if name in self.given.costs), None)

    def miss(
        self, computation: Computation, instruction: Instruction, part: GapKind, why: str
    ) -> None:
        """Notes a part that is priced incompletely."""
        gap = self.describe(computation, instruction, part)
        if held := fused_calls(self.module, instruction):
            gap = replace(gap, label=label_of(held[0][1]), fused=True)
        self.missed.setdefault(instruction.name, replace(gap, why=why))

    def describe(
        self, computation: Computation, instruction: Instruction, part: GapKind
    ) -> Incomplete:
        """Description of an instruction and its place."""
        origin = named(self.module, computation, instruction)
        source = self.module.source(origin)
        return Incomplete(
            part=part,
            name=instruction.name,
            label=label_of(instruction),
            op_name=origin.op_name,
            source=str(source) if source else "",
        )

    def names(self, computation: Computation, instruction: Instruction) -> list[str]:
        """Names that the user may give it: the instruction's, its label, its line of source."""
        source = self.module.source(named(self.module, computation, instruction))
        names = [instruction.name, label_of(instruction)]
        if source is not None:
            names += [str(source), f"{source.file.rpartition('/')[2]}:{source.line}"]
        for inner, call in fused_calls(self.module, instruction):
            names += self.names(inner, call)
        return [name for name in names if name]

    def _check(self) -> None:
        """Refuses names that the program has not, and trips that it contradicts."""
        sites = [(c, i) for c in self.module.computations.values() for i in c]
        loops: dict[str, list[Instruction]] = defaultdict(list)
        calls: dict[str, list[Instruction]] = defaultdict(list)
        for computation, instruction in sites:
            if instruction.opcode == "while":
                for name in self.names(computation, instruction):
                    loops[name].append(instruction)
            elif (
                is_callback(instruction)
                or (instruction.opcode == "custom-call" and instruction.target not in FREE_TARGETS)
                or fused_calls(self.module, instruction)
            ):
                for name in self.names(computation, instruction):
                    calls[name].append(instruction)
        opened = [name for name, loop in self.loops.items() if not loop.known]
        rest = (
            f"loops of unknown length: {_few(opened)}" if opened else "no loop is of unknown length"
        )
        for name, number in self.given.trips.items():
            if name not in loops:
                raise OptionError(
                    f"--trips names {name}, which is no loop of this program{nearest(name, loops)}; {rest}"
                )
            self._agrees(name, number, loops[name])
            self._apart(name, [loop for loop in loops[name] if loop.name in opened])
        for name in self.given.costs:
            if name not in calls:
                have = sorted(
                    {label_of(i) or i.name for sites_of in calls.values() for i in sites_of}
                )
                some = f"it has {_few(have)}" if have else "it has none"
                raise OptionError(
                    f"--cost names {name}, which is no kernel, custom call or callback of this program{nearest(name, calls)}; {some}"
                )

    def _apart(self, name: str, sites: Sequence[Instruction]) -> None:
        """Refuses one number for loops of which one is inside another."""
        for outer in sites:
            held = _within(self.module, outer)
            inner = next((site.name for site in sites if site.name in held), None)
            if inner is not None:
                raise OptionError(
                    f"--trips gives one number for {name}, where loop {inner} is inside loop {outer.name}; give each its own, such as --trips {outer.name}=10 --trips {inner}=10"
                )

    def _agrees(self, name: str, number: float, sites: Sequence[Instruction]) -> None:
        loops = [self.loops[site.name] for site in sites if site.name in self.loops]
        if loops and all(loop.known and loop.mean != number for loop in loops):
            raise OptionError(
                f"--trips gives {number:g} for {name}, but the program says that it makes {loops[0].mean:,g}; leave it out"
            )
        most = [loop.most for loop in loops if loop.most is not None]
        if len(most) == len(loops) > 0 and number > max(most):
            raise OptionError(
                f"--trips gives {number:g} for {name}, but the program ends it after {max(most):,} trips; give at most that"
            )


def _within(module: Module, loop: Instruction) -> set[str]:
    """Instructions that a loop's body runs, at any depth."""
    names, seen, left = set[str](), set[str](), list(loop.called_computations)
    while left:
        name = left.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        for instruction in module.computations[name]:
            names.add(instruction.name)
            left += instruction.called_computations
    return names


def _mean(shares: Shares, seconds: Mapping[int, float], choose: Callable[..., float]) -> float:
    """Seconds of a conditional's run, where each set of branches takes one of its own."""
    return sum(share * choose(seconds[branch] for branch in some) for some, share in shares.items())


def _whole(number: float) -> float:
    """An integer where it has no fraction."""
    return int(number) if number == int(number) else number


def _few(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def label_of(instruction: Instruction) -> str:
    """Name of a kernel or a callback, a custom call's target; empty for other instructions."""
    last = instruction.op_name.rpartition("/")[2]
    if instruction.target == PALLAS:
        base = re.sub(r"\.\d+$|\.clone$", "", instruction.name)
        return base if last in ("", "pallas_call") else last
    if instruction.opcode == "custom-call":
        asks = "callback" in instruction.target and last
        return last if asks else instruction.target
    return last if is_callback(instruction) else ""


def fused_calls(module: Module, instruction: Instruction) -> list[tuple[Computation, Instruction]]:
    """Kernels and custom calls that a fusion holds at any depth, each with its computation; none for other instructions.

    Calls that take no time, only move their bytes, or have a rule of their own are left out.
    """
    if instruction.opcode != "fusion":
        return []
    inner_calls: list[tuple[Computation, Instruction]] = []
    held = module.callee(instruction, "calls")
    for inner in held:
        if inner.opcode == "fusion":
            inner_calls += fused_calls(module, inner)
        elif inner.opcode == "custom-call" and inner.target not in _KNOWN:
            inner_calls.append((held, inner))
    return inner_calls


def is_print(instruction: Instruction) -> bool:
    """Whether a callback is a ``jax.debug.print``, whose work on the host is known in kind: a line of text."""
    return label_of(instruction) == PRINT


def is_callback(instruction: Instruction) -> bool:
    """Whether it asks the host for something: a host callback's ``send``, what is fed in or out."""
    if instruction.opcode in ("infeed", "outfeed"):
        return True
    if instruction.opcode not in ("send", "recv"):
        return False
    return "is_host_transfer=true" in instruction.rest and "megascale" not in instruction.rest


def answers(computation: Computation, instruction: Instruction) -> bool:
    """Whether a ``recv`` of a callback brings the answer to what was sent before."""
    at: Instruction | None = instruction
    for _ in range(4):
        at = computation.index.get(at.operands[-1]) if at is not None and at.operands else None
        if at is not None and at.opcode == "send":
            return is_callback(at)
    return False


def measured(missed: Iterable[Incomplete], spans: "Sequence[Span]") -> tuple[Incomplete, ...]:
    """Adds the seconds and runs that a timeline's spans have for each; the largest first."""
    seconds: dict[str, float] = defaultdict(float)
    runs: dict[str, float] = {}

    def add(held: "Sequence[Span]", number: float) -> None:
        for span in held:
            seconds[span.name] += span.seconds * number
            runs[span.name] = number
            add(span.inside, number * span.repeat)

    add(spans, 1.0)
    parts = [replace(m, seconds=seconds[m.name], runs=runs.get(m.name, 0.0)) for m in missed]
    return tuple(sorted(parts, key=lambda part: -part.seconds))
