"""Trip counts of loops, and branches that are taken, also where a program asks which device it is: the slowest device decides the step.

A loop's counters are the parts of its tuple that its condition depends on. They are run through body and
condition (:mod:`systolic.hlo.scalars`): step by step, and in one stride over all steps in which nothing that
is compared, limited or wrapped around decides otherwise. So the type, order, start, step and direction of
counters and bounds don't matter, nor whether they come through other loops. Where data decides, the range
that the program leaves is known: at most 50 for ``(i < 50) & (error > 1e-3)``. What the compiler notes counts where the
counters leave it open: XLA's own count is wrong where an unsigned counter goes down or one wraps around.

Which branch of a conditional is taken is known likewise: one turn in 100 for ``i % 100 == 0``.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from systolic.hlo.module import Computation, Instruction, Module
from systolic.hlo.scalars import MOST_VALUES, Scalars, Scope, Turn, is_followed
from systolic.hlo.values import NO, UNKNOWN, YES, Elements, Known, Value, hull, kind_of

MOST_CASES = 100
"""Cases after which a range is no longer split."""
MOST_EACH = 64
"""Numbers of a range that are taken one by one."""
_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?')
MOST_STEPS = 20_000
"""Steps that are run one by one before a loop's trip count is given up."""
ENDLESS = 2**31 - 1
"""Most trips from which a bound is none: programs write the largest s32 for "no limit"."""
MOST_STRIDES = 1024
"""Runs of equal steps, such as those between two wraps of a counter; single steps beside them count too."""
MOST_TURNS = 10_000
"""Trips of an outer loop up to which the loops and branches in it are counted for each of them."""
MOST_SAME = 512
"""Turns after which loops and branches that none of them decided are taken as decided by data."""
MOST_WALKS = 20_000
"""Runs of computations that are looked into for loops."""
Shares = Mapping[tuple[int, ...], float]
"""Sets of branches of which data decides, to the share of runs that leaves these open; of one branch where it is known."""
State = dict[int, Value]
"""Values of a loop's counters by their place in its tuple."""
_CALLS = frozenset(("call", "conditional", "async-start", "call-start", "fusion"))
MOST_DEVICES = 512
"""Devices up to which each is looked at."""


def cases_of(
    scope: Scope, names: Sequence[str], compared: Mapping[str, set[int]], *, each: bool
) -> list[tuple[Known, ...]]:
    """Values of some scalars together, in each case of what they are computed from.

    With ``jax_enable_x64`` an integer is two halves, and ``jnp.clip(n, 10, 64)`` chooses each half by comparisons of both: alone
    a half may be anything. So what is compared with a constant is split at it, and each case is computed for itself.

    Args:
        scope: The run that computes them.
        names: The scalars.
        compared: Numbers that some of them are compared with later.
        each: Whether short ranges are taken number by number.
    """
    if scope.on.case_values <= 0:
        return []
    kept = scope.on.turns, scope.on.split
    cases = _Cases(scope, names, each)
    for name, at in compared.items():
        run, source, shifted = scope.source(name)
        if run is scope and not shifted:
            cases.compared[source] = at
    try:
        values = list(cases.values({}))
    finally:
        scope.on.turns, scope.on.split = kept
    for source in cases.sources:
        scope.on.decides(*scope.scalar(source))
    return values


class _Cases:
    """Cases of some values, and how many ranges may still be split."""

    def __init__(self, scope: Scope, names: Sequence[str], each: bool) -> None:
        self.scope, self.names, self.each, self.left = scope, names, each, MOST_CASES
        self.sources: set[str] = set()
        self.compared: dict[str, set[int]] = {}
        index = scope.computation.index
        self.fixed = {
            name: value
            for name, value in scope.values.items()
            if name in index and index[name].opcode in ("while", "conditional")
        }

    def values(self, ranges: dict[str, Known]) -> Iterator[tuple[Known, ...]]:
        """The values with these ranges of others, split further where these leave a comparison open."""
        on, like = self.scope.on, self.scope
        on.turns = []
        run = Scope(on, like.computation, like.argument, lambda *_: UNKNOWN, like.depth)
        run.values = {**self.fixed, **ranges}
        before, on.split = on.left, (run, {})
        scalars = tuple(map(run.scalar, self.names))
        points, on.split = on.split[1], None
        on.case_values -= before - on.left
        if not all(value.exact for value in scalars) and on.case_values > 0:
            for source in dict.fromkeys((*points, *self.compared)):
                at = points.get(source, set()) | self.compared.get(source, set())
                cells = list(self.cells(source, run.scalar(source), at))
                if 1 < len(cells) <= self.left:
                    self.left -= len(cells) - 1
                    self.sources.add(source)
                    for cell in cells:
                        yield from self.values({**ranges, source: cell})
                    return
        yield scalars

    def cells(self, source: str, range_: Known, points: set[int]) -> Iterator[Known]:
        """Ranges of a source between its points."""
        kind = kind_of(self.scope.computation[source])
        if kind is None:
            return
        low = int(max(range_.low, kind.lowest))
        high = int(min(range_.high, kind.lowest + (1 << kind.bits) - 1))
        inside = sorted(point for point in points if low <= point <= high)
        if self.each and high - low < MOST_EACH:
            inside = list(range(low, high + 1))
        for point in inside:
            if low < point:
                yield Known(low, point - 1)
            yield Known(point, point)
            low = point + 1
        if low <= high:
            yield Known(low, high)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopTrips:
    """Iterations of a loop in one run of the computation that holds it."""

    least: int
    most: int | None
    """None where nothing that is known before the run ends it."""
    mean: float | None = None
    """Over the runs of its computation, where each run's is known; they differ in nested loops over triangles."""

    @property
    def known(self) -> bool:
        """Whether the number is known before the run."""
        return self.mean is not None


NO_END = LoopTrips(least=0, most=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCounts:
    """Trips and branches that counters decide in a program."""

    loops: Mapping[str, LoopTrips]
    """Trips of every ``while`` that the entry reaches, by its name."""
    branches: Mapping[str, Shares]
    """Branches of every ``conditional`` that runs, by its name."""
    by_device: Mapping[str, Sequence[Shares]] = field(default_factory=dict)
    """Shares of the branches by conditional, where not all devices decide alike."""
    apart: frozenset[str] = frozenset()
    """Loops of which not all devices make as many trips: those of the slowest are given."""


def counted(module: Module, device: int | None = None) -> tuple[LoopCounts, int]:
    """Trips and branches of a program on any device or on one, and how many values were found for them.

    ``lax.fori_loop(0, lax.axis_index("x"), ...)`` makes another number of trips on each device. Each is known, and so is the largest.
    """
    walk = _LoopWalk(module)
    walk.scalars.device = device
    entry = Scope(walk.scalars, module.entry, lambda number: UNKNOWN, walk.value)
    totals = _Counted()
    walk.count(entry, 1, totals)
    runs = {name: sum(by_branch.values()) for name, by_branch in totals.branches.items()}
    counts = LoopCounts(
        loops={name: trips.value() for name, trips in totals.loops.items()},
        branches={
            name: {some: of / runs[name] for some, of in by_branch.items() if of}
            for name, by_branch in totals.branches.items()
            if runs[name]
        },
    )
    return counts, MOST_VALUES - walk.scalars.left


@dataclass
class _Sum:
    """Trips of one loop over the runs of its computation."""

    runs: float = 0.0
    trips: float = 0.0
    least: float = math.inf
    most: int | None = 0
    known: bool = True

    def add(self, other: "_Sum") -> None:
        """Adds further runs; none at all count only where there are no others."""
        if not other.runs and self.runs:
            return
        if other.runs and not self.runs:
            self.least, self.most, self.known = math.inf, 0, True
        self.runs += other.runs
        self.trips += other.trips
        self.least = min(self.least, other.least)
        ends = (self.most, other.most)
        self.most = None if ends[0] is None or ends[1] is None else max(ends[0], ends[1])
        self.known = self.known and other.known

    def value(self) -> LoopTrips:
        """The trips of one run."""
        mean = self.trips / self.runs if self.runs else self.least
        return LoopTrips(least=int(self.least), most=self.most, mean=mean if self.known else None)


@dataclass
class _Counted:
    """Trips of loops, and runs that leave each set of branches open."""

    loops: dict[str, _Sum] = field(default_factory=dict)
    branches: dict[str, dict[tuple[int, ...], float]] = field(default_factory=dict)

    def loop(self, name: str, trips: _Sum) -> None:
        """Adds runs of a loop."""
        self.loops.setdefault(name, _Sum()).add(trips)

    def branch(self, name: str, some: tuple[int, ...], runs: float) -> None:
        """Adds runs of a conditional."""
        held = self.branches.setdefault(name, {})
        held[some] = held.get(some, 0.0) + runs

    def add(self, other: "_Counted") -> None:
        """Adds all of another's."""
        for name, trips in other.loops.items():
            self.loop(name, trips)
        for name, held in other.branches.items():
            for some, runs in held.items():
                self.branch(name, some, runs)

    @property
    def open_loops(self) -> bool:
        """Whether data or a range decides some loop's trips."""
        return any(not trips.known for trips in self.loops.values())

    @property
    def open_branches(self) -> bool:
        """Whether data or a range decides some branch."""
        return any(
            len(some) > 1 and runs for held in self.branches.values() for some, runs in held.items()
        )

    def decides(self, rough: "_Counted") -> bool:
        """Whether it knows a loop's trips, or a branch in some runs, that ``rough`` leaves open."""
        return any(
            trips.known and name in rough.loops and not rough.loops[name].known
            for name, trips in self.loops.items()
        ) or any(
            held.keys() - rough.branches.get(name, {}).keys()
            for name, held in self.branches.items()
        )


@dataclass(frozen=True, slots=True)
class _SomeParts:
    """A loop's tuple of which some parts are known."""

    state: Mapping[int, Value]

    def part(self, index: int) -> Value:
        return self.state.get(index, UNKNOWN)


@dataclass(frozen=True, slots=True)
class _LoopRun:
    """One run of a loop: its trips, its counters at the end, and all that they were in its body."""

    least: int
    most: int | None
    last: State
    visited: State

    @property
    def known(self) -> bool:
        return self.least == self.most


@dataclass
class _LoopWalk:
    """Looks for loops in all computations that are run."""

    module: Module
    scalars: Scalars = field(init=False)
    steps: int = MOST_STEPS * 5
    walks: int = MOST_WALKS
    splits: bool = True
    """Whether ranges are split into cases; not where each turn is looked at for itself."""
    ran: dict[tuple[int, str], tuple[Scope, _LoopRun]] = field(default_factory=dict)
    counters: dict[str, frozenset[int]] = field(default_factory=dict)
    holders: dict[str, Sequence[Instruction]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scalars = Scalars(self.module)

    # Where loops are

    def sites(self, computation: Computation) -> Sequence[Instruction]:
        """Instructions of a computation that are loops or conditionals, or hold some."""
        if computation.name not in self.holders:
            self.holders[computation.name] = ()
            self.holders[computation.name] = [
                instruction for instruction in computation if self.holds(instruction)
            ]
        return self.holders[computation.name]

    def holds(self, instruction: Instruction) -> bool:
        """Whether an instruction is a loop or a conditional, or calls what holds one."""
        if instruction.opcode in ("while", "conditional"):
            return True
        if instruction.opcode not in _CALLS:
            return False
        held = (self.module.computations.get(name) for name in instruction.called_computations)
        return any(callee is not None and self.sites(callee) for callee in held)

    def count(self, scope: Scope, runs: float, counted: _Counted) -> None:
        """Counts the loops and branches of a computation that is run so often."""
        self.walks -= 1
        for site in self.sites(scope.computation):
            if site.opcode == "while":
                ran = self.run(scope, site)
                least, most = ran.least, ran.most
                said = _KNOWN.search(site.rest)
                if said and not ran.known and (most is None or least <= int(said[1]) <= most):
                    least = most = int(said[1])
                known = least == most
                counted.loop(site.name, _Sum(runs, runs * least, least, most, known))
                self.within(scope, site, (ran, least * runs if known else runs), counted)
            elif site.opcode == "conditional":
                names = site.called_computations
                taken = scope.taken(site)
                counted.branch(site.name, tuple(taken), runs)
                for number in taken:
                    if not self.sites(self.module.computations[names[number]]):
                        continue
                    inner = scope.inside(names[number], site.operands[number + 1 : number + 2])
                    self.count(inner, runs, counted)
            else:
                for name in site.called_computations:
                    self.count(scope.inside(name, site.operands), runs, counted)

    def within(
        self, scope: Scope, loop: Instruction, ran: tuple[_LoopRun, float], counted: _Counted
    ) -> None:
        """Counts what is in a loop's body: with the ranges of its counters, and turn by turn where that leaves some open."""
        body = self.module.callee(loop, "body")
        if not self.sites(body):
            return
        counters, runs = ran
        rough = _Counted()
        constant = self.constants(scope, loop, body)
        each_turn = counters.known and 0 < counters.least <= MOST_TURNS
        kept, self.splits = self.splits, self.splits and not each_turn
        self.count(self.body(scope, loop, {**constant, **counters.visited}), runs, rough)
        self.splits = kept
        if (rough.open_loops or rough.open_branches) and each_turn:
            turns, each = _Counted(), runs / counters.least
            for number, state in enumerate(self.states(scope, loop, counters.least)):
                if self.walks < 0 or (number == MOST_SAME and not turns.decides(rough)):
                    break
                self.count(self.body(scope, loop, {**constant, **state}), each, turns)
            else:
                rough = turns
        counted.add(rough)

    def constants(self, scope: Scope, loop: Instruction, body: Computation) -> State:
        """Parts of a loop's tuple that its body passes on."""
        root = body.root
        if root.opcode != "tuple":
            return {}
        return {
            index: self.first(scope, loop, index)
            for index, name in enumerate(root.operands)
            if _passed(body, name) == index
        }

    # Running one

    def value(self, scope: Scope, loop: Instruction) -> Value:
        """A loop's tuple at its end."""
        body = self.module.callee(loop, "body")
        parts = {**self.constants(scope, loop, body), **self.run(scope, loop).last}
        return [parts.get(index, UNKNOWN) for index in range(len(body.root.operands))]

    def body(self, scope: Scope, loop: Instruction, state: State) -> Scope:
        """A run of the body with those parts of its tuple."""
        parts, body = _SomeParts(state), self.module.callee(loop, "body")
        return Scope(self.scalars, body, lambda number: parts, self.value, scope.depth + 1)

    def step(self, scope: Scope, loop: Instruction, state: State) -> tuple[Known, State]:
        """Whether the loop goes on, and its counters after the body."""
        parts, condition = _SomeParts(state), self.module.callee(loop, "condition")
        test = Scope(self.scalars, condition, lambda number: parts, self.value, scope.depth + 1)
        goes_on = test.scalar(condition.root.name)
        ran = self.body(scope, loop, state)
        root = ran.computation.root
        if root.opcode == "tuple":
            return goes_on, {index: ran.get(root.operands[index]) for index in state}
        counters = ran.get(root.name)
        return goes_on, {i: counters[i] if isinstance(counters, list) else UNKNOWN for i in state}

    def first(self, scope: Scope, loop: Instruction, index: int) -> Value:
        """Initial value of a part of a loop's tuple."""
        source = scope.computation.index.get(loop.operands[0])
        if source is not None and source.opcode == "tuple":
            if index >= len(source.operands):
                return UNKNOWN
            return scope.get(source.operands[index])
        whole = scope.get(loop.operands[0])
        return whole[index] if isinstance(whole, list) and index < len(whole) else UNKNOWN

    def run(self, scope: Scope, loop: Instruction) -> _LoopRun:
        """Runs a loop's counters once for each scope."""
        key = (id(scope), loop.name)
        if key not in self.ran:
            places = self.counters_of(loop)
            state = {index: self.first(scope, loop, index) for index in places}
            kept, self.scalars.turns = self.scalars.turns, []
            loop_run = self._run(scope, loop, state)
            if not loop_run.known and self.splits:
                loop_run = self.by_cases(scope, loop, state, loop_run)
            # To a loop around this one it is no linear thing.
            self.scalars.turns = kept
            self.scalars.decides(*_numbers(state.values()))
            self.ran[key] = (scope, loop_run)
        return self.ran[key][1]

    def by_cases(self, scope: Scope, loop: Instruction, state: State, whole: _LoopRun) -> _LoopRun:
        """A run whose counters begin with ranges: one for each case of what these are computed from, where that tells more."""
        source = scope.computation.index.get(loop.operands[0])
        if source is None or source.opcode != "tuple" or self.steps < MOST_STEPS:
            return whole
        open_ = {
            place: source.operands[place]
            for place, value in state.items()
            if isinstance(value, Known) and not value.exact and place < len(source.operands)
        }
        points = self.compared(scope, loop, state, open_) if open_ else {}
        for each in (False, True):
            cases = cases_of(scope, list(open_.values()), points, each=each) if open_ else []
            if len(cases) < 2:
                continue
            runs = [
                self._run(scope, loop, {**state, **dict(zip(open_, values, strict=True))})
                for values in cases
            ]
            least = min(run.least for run in runs)
            most = max(math.inf if run.most is None else run.most for run in runs)
            if least < whole.least or most > (math.inf if whole.most is None else whole.most):
                continue
            whole = _LoopRun(
                least,
                int(most) if most < ENDLESS else None,
                _over(run.last for run in runs),
                _over(run.visited for run in runs),
            )
        return whole

    def compared(
        self, scope: Scope, loop: Instruction, state: State, open_: Mapping[int, str]
    ) -> dict[str, set[int]]:
        """Numbers that the condition compares counters with, by what these begin with."""
        parts, condition = _SomeParts(state), self.module.callee(loop, "condition")
        test = Scope(self.scalars, condition, lambda number: parts, self.value, scope.depth + 1)
        kept, points = self.scalars.turns, dict[str, set[int]]()
        self.scalars.split = (test, points)
        test.scalar(condition.root.name)
        self.scalars.turns, self.scalars.split = kept, None
        return {
            open_[condition[name].tuple_index]: at
            for name, at in points.items()
            if condition[name].opcode == "get-tuple-element"
            and condition[name].tuple_index in open_
        }

    def _run(self, scope: Scope, loop: Instruction, state: State) -> _LoopRun:
        visited, before = dict(state), list[tuple[State, list[Turn]]]()
        least, trips, strides, mark = None, 0, 0, state
        for number in range(MOST_STEPS):
            self.steps -= 1
            self.scalars.turns = []
            goes_on, after = self.step(scope, loop, state)
            if goes_on == NO:
                first = trips if least is None else least
                return _LoopRun(first, trips, state if first == trips else visited, visited)
            if goes_on != YES and least is None:
                least = trips
            if after in (state, mark):  # nothing that is known ends it
                return _LoopRun(trips if least is None else least, None, visited, visited)
            if number & (number - 1) == 0 and not strides:
                mark = after  # a later turn that comes back to it has no end (Brent)
            before = [*before[-2:], (state, self.scalars.turns)]
            room = _room(before)
            if room > 0:
                far = _strode(state, after, room)
                if far is not None:
                    visited = _joined(visited, after)
                    trips, after, before, strides = trips + room, far, [], strides + 1
                    if after == mark:
                        return _LoopRun(trips if least is None else least, None, visited, visited)
                    mark = after if strides & (strides - 1) == 0 else mark
            state, trips = after, trips + 1
            visited = _joined(visited, state)
            if strides > MOST_STRIDES or self.steps < 0:
                break
        return _LoopRun(trips if least is None else least, None, {}, {})

    def states(self, scope: Scope, loop: Instruction, turns: int) -> Iterator[State]:
        """Counters before each of the first turns, with those that the loops in the body begin with."""
        body = self.module.callee(loop, "body")
        needed = {name for site in self.sites(body) for name in site.operands}
        places = self._closed(body, self.counters_of(loop) | _reads(body, needed))
        state = {index: self.first(scope, loop, index) for index in places}
        for _ in range(turns):
            yield state
            self.steps -= 1
            self.scalars.turns = []
            _, state = self.step(scope, loop, state)

    def counters_of(self, loop: Instruction) -> frozenset[int]:
        """Places in a loop's tuple that its condition depends on, in this turn or a later one."""
        if loop.name not in self.counters:
            condition = self.module.callee(loop, "condition")
            places = _reads(condition, [condition.root.name])
            self.counters[loop.name] = self._closed(self.module.callee(loop, "body"), places)
        return self.counters[loop.name]

    def _closed(self, body: Computation, places: Iterable[int]) -> frozenset[int]:
        root, closed, left = body.root, set[int](), set(places)
        while left:
            place = left.pop()
            closed.add(place)
            if root.opcode == "tuple" and place < len(root.operands):
                left |= _reads(body, [root.operands[place]]) - closed
        return frozenset(closed)


def _reads(computation: Computation, names: Iterable[str]) -> frozenset[int]:
    """Places in the argument's tuple that values depend on, as far as these can be known."""
    places, seen, left = set[int](), set[str](), list(names)
    while left:
        instruction = computation.index.get(left.pop())
        if instruction is None or instruction.name in seen or not is_followed(instruction):
            continue
        seen.add(instruction.name)
        if instruction.opcode == "get-tuple-element":
            source = computation.index.get(instruction.operands[0])
            if source is not None and source.opcode == "parameter":
                places.add(instruction.tuple_index)
                continue
        if instruction.opcode not in ("constant", "parameter"):
            left += instruction.operands
    return frozenset(places)


def _passed(body: Computation, name: str) -> int | None:
    """The place of the argument's tuple that a result is; None where it is another value."""
    origin = body.index.get(name)
    while origin is not None and origin.opcode in ("copy", "bitcast"):
        origin = body.index.get(origin.operands[0])
    if origin is None or origin.opcode != "get-tuple-element":
        return None
    source = body.index.get(origin.operands[0])
    return origin.tuple_index if source is not None and source.opcode == "parameter" else None


def _numbers(values: Iterable[Value]) -> Iterator[int | float]:
    for value in values:
        yield from value if isinstance(value, Known) else _numbers(value)


def _room(before: Sequence[tuple[State, list[Turn]]]) -> int:
    """Further steps that decide all as the last three did, which were equally large."""
    if len(before) < 3:
        return 0
    states, turns = zip(*before, strict=True)
    if not (len(turns[0]) == len(turns[1]) == len(turns[2])):
        return 0
    room = math.inf
    for first, second, third in zip(*turns, strict=True):
        if second.cell != third.cell or not first.at == second.at == third.at:
            if second.at - first.at != third.at - second.at:
                return 0
            room = min(room, third.room(second))
    numbers = [list(_numbers(state.values())) for state in states]
    if not (len(numbers[0]) == len(numbers[1]) == len(numbers[2])):
        return 0  # an array whose elements were all the same begins to differ
    for first, second, third in zip(*numbers, strict=True):
        if not first == second == third and second - first != third - second:
            return 0
    return int(room) if 0 < room < math.inf else 0


def _strode(state: State, after: State, steps: int) -> State | None:
    """Counters so many equal steps after ``after``; None where one is a tuple that changes its parts."""
    counters: State = {}
    for place, new in after.items():
        far = _further(state[place], new, steps)
        if far is None:
            return None
        counters[place] = far
    return counters


def _further(old: Value, new: Value, steps: int) -> Value | None:
    if new == old:
        return new
    if isinstance(new, Elements) or isinstance(old, Elements):
        return None
    if isinstance(new, Known) and isinstance(old, Known):
        return Known(
            new.low if new.low == old.low else new.low + steps * (new.low - old.low),
            new.high if new.high == old.high else new.high + steps * (new.high - old.high),
        )
    if isinstance(new, Known) or isinstance(old, Known) or len(new) != len(old):
        return None
    parts = [
        _further(old_part, new_part, steps) for old_part, new_part in zip(old, new, strict=True)
    ]
    return (
        None
        if any(part is None for part in parts)
        else [part for part in parts if part is not None]
    )


def _over(states: Iterable[State]) -> State:
    """Values over all of some runs; of one that knows nothing, nothing."""
    first, *rest = states
    for other in rest:
        first = {
            place: hull(value, other[place]) for place, value in first.items() if place in other
        }
    return first


def _joined(visited: State, state: State) -> State:
    return {place: hull(visited[place], value) for place, value in state.items()}


def counts_of(module: Module) -> LoopCounts:
    """Trips and branches of a program: of a loop those on the device that makes the most, and of a branch each device's."""
    counts, values = counted(module)
    number = module.num_partitions
    if (
        not (
            any(not trips.known for trips in counts.loops.values())
            or any(len(some) > 1 for shares in counts.branches.values() for some in shares)
        )
        or not 1 < number <= MOST_DEVICES
        or values * number > MOST_VALUES
        or not any(
            instruction.opcode == "partition-id"
            for c in module.computations.values()
            for instruction in c
        )
    ):
        return counts
    by_device = [counted(module, device)[0] for device in range(number)]
    apart = {
        name
        for name in counts.loops
        if len({of_device.loops[name] for of_device in by_device if name in of_device.loops}) > 1
    }
    branches = {
        name: [of_device.branches[name] for of_device in by_device if name in of_device.branches]
        for name in counts.branches
    }
    return replace(
        counts,
        loops={
            name: _slowest(
                trips, [of_device.loops[name] for of_device in by_device if name in of_device.loops]
            )
            for name, trips in counts.loops.items()
        },
        branches={
            name: _any_of(branches[name]) or shares for name, shares in counts.branches.items()
        },
        by_device={
            name: unlike for name, shares in branches.items() if len(unlike := _unlike(shares)) > 1
        },
        apart=frozenset(apart),
    )


def _slowest(whole: LoopTrips, each: Sequence[LoopTrips]) -> LoopTrips:
    """Trips of the device that makes the most; ``whole`` is what holds for any device."""
    if whole.known or not each:
        return whole
    ends = [math.inf if trips.most is None else trips.most for trips in (whole, *each)]
    most = min(ends[0], max(ends[1:]))
    means = [trips.mean for trips in each if trips.mean is not None]
    return LoopTrips(
        least=max(trips.least for trips in each),
        most=None if most == math.inf else int(most),
        mean=max(means) if len(means) == len(each) else None,
    )


def _unlike(shares: Sequence[Shares]) -> list[Shares]:
    """Each only once."""
    unlike: list[Shares] = []
    for of_device in shares:
        if of_device not in unlike:
            unlike.append(of_device)
    return unlike


def _any_of(shares: Iterable[Shares]) -> Mapping[tuple[int, ...], float]:
    """Branches that some device may take; with their shares where these are the same on all."""
    unlike = _unlike(list(shares))
    if len(unlike) == 1:
        return unlike[0]
    every = {branch for of_device in unlike for some in of_device for branch in some}
    return {tuple(sorted(every)): 1.0} if every else {}
