"""Which ops changed between two schedules of one program: by another compiler, a flag, or an edit of the program.

Instruction numbers say nothing across compiles. Ops are matched by kind, place in the model, part of the step, source
line and shape; what is left by fewer of these; and fusions that share parts, by these.
"""

import enum
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from systolic.core.errors import DataError
from systolic.forecasting.costs import core, place_of, short
from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.groups import COLLECTIVES
from systolic.hlo.module import named
from systolic.sim.timeline import Span, Timeline, layer_of, phase_of

TIME_TOLERANCE = 0.005
"""Share of a row's own time below which it is the same."""
NAMES = 8
"""Names of instructions that a row keeps of each side."""
SHARED = 0.5
"""Share of the parts of an op that another must have, for the two to be one fused differently."""

_PRODUCTS = ("dot", "convolution", "ragged-dot")
_HEAVY = (*_PRODUCTS, *COLLECTIVES, "custom-call", "scatter", "gather", "sort", "fft")
"""Kinds that name the fusion which has one, the first that it has."""
_REDUCTIONS = ("reduce-window", "reduce")
_COPIES = frozenset(("copy", "slice", "dynamic-slice", "dynamic-update-slice", "bitcast-convert"))
_CHEAP = frozenset(
    {"parameter", "constant", "broadcast", "bitcast", "tuple", "get-tuple-element"}
    | {"convert", "reshape", "transpose", "iota", "copy", "slice", "compare", "and"}
)
"""Instructions that XLA repeats in every fusion that wants them, so that they tie none together."""
_ASYNCHRONOUS = re.compile(r"-(?:start|done|update)$")
_NUMBER = re.compile(r"[.\d]+(?:\.clone|\.remat\d*)*$")
_LAYOUT = re.compile(r"\{[^{}]*\}")
Part = tuple[str, str]
"""Place and primitive of an instruction inside an op."""
Schedule = tuple[Module, Timeline, float]
"""A program of a step, its schedule, and how often the step calls it."""
_ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "exponential"}
    | {"log", "rsqrt", "sqrt", "tanh", "logistic", "power", "select", "compare", "convert"}
    | {"and", "or", "not", "xor", "broadcast", "iota", "pad", "concatenate", "reshape"}
    | {"transpose", "clamp", "floor", "abs"}
)


class OpFate(enum.Enum):
    """Fate of an op between two schedules."""

    new = "new"
    gone = "gone"
    slower = "slower"
    faster = "faster"
    same = "same"
    fused = "fused differently"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChange:
    """Ops that are one before and after; seconds and runs of a step, of all of them together."""

    change: OpFate
    kind: str
    """``matmul``, ``elementwise``, ``all-gather``, ``wait for all-gather``, ``kernel splash_mha`` …"""
    layer: str
    phase: str
    """forward, backward, recomputed or update."""
    source: str
    shape: str
    before_seconds: float
    after_seconds: float
    before_runs: float
    after_runs: float
    before_ops: Sequence[str]
    """Names of the instructions; at most :data:`NAMES`."""
    after_ops: Sequence[str]

    @property
    def seconds(self) -> float:
        """After less before."""
        return self.after_seconds - self.before_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return msgspec.to_builtins(self)


@dataclass(eq=False, slots=True)
class OpGroup:
    """Ops of one schedule that are alike."""

    kind: str
    layer: str
    phase: str
    source: str
    shape: str
    seconds: float = 0.0
    runs: float = 0.0
    ops: list[str] = field(default_factory=list)
    parts: frozenset[Part] = frozenset()
    heavy: frozenset[Part] = frozenset()


def changes_of(before: Sequence[OpGroup], after: Sequence[OpGroup]) -> list[OpChange]:
    """Rows that hold every op and wait of the core of both schedules once, the largest change of time first."""
    ties = _Ties(before, after)
    for key in _KEYS:
        ties.by_key(key)
    ties.by_parts()
    for key in _LAST_KEYS:
        ties.by_key(key, in_order=True)
    rows = [_row(*members) for members in ties.components()]
    return sorted(rows, key=lambda row: (-abs(row.seconds), -row.after_seconds, row.layer))


_KEYS: Sequence[Callable[[OpGroup], Hashable]] = (
    lambda group: (group.kind, group.layer, group.phase, group.source, group.shape),
    lambda group: (group.kind, group.layer, group.phase, group.shape),
    lambda group: (group.kind, group.source, group.phase, group.shape),
    lambda group: (group.kind, group.layer, group.phase, group.source),
)
"""The whole key; without the line, which an edit moves; without the place, which a renamed scope or another version of
JAX changes; without the shape, which padding changes."""
_LAST_KEYS: Sequence[Callable[[OpGroup], Hashable]] = (
    lambda group: (group.kind, group.source, group.shape),
    lambda group: (group.kind, group.phase, group.shape, group.runs),
    lambda group: (group.kind, group.phase, group.shape),
    lambda group: (group.kind, group.layer, group.phase),
)
"""Weaker keys: of as many on both sides the lines are in the same order, as after an edit that moves them and names scopes."""


class _Ties:
    """Which groups of both sides belong to one row."""

    def __init__(self, old: Sequence[OpGroup], new: Sequence[OpGroup]) -> None:
        self.sides = (list(old), list(new))
        self.above: dict[int, OpGroup] = {}
        self.tied: set[int] = set()
        """Groups with a partner on the other side, by identity."""

    def by_key(self, key: Callable[[OpGroup], Hashable], *, in_order: bool = False) -> None:
        """Ties groups without a partner that have the same key: all of them, or one by one in the order of their lines."""
        sides: list[defaultdict[Hashable, list[OpGroup]]] = []
        for groups in self.sides:
            keyed = defaultdict[Hashable, list[OpGroup]](list)
            for group in groups:
                if id(group) not in self.tied:
                    keyed[key(group)].append(group)
            sides.append(keyed)
        for value, ours in sides[0].items():
            theirs = sides[1].get(value, [])
            if in_order and len(ours) == len(theirs):
                for group, other in zip(
                    sorted(ours, key=_line), sorted(theirs, key=_line), strict=True
                ):
                    self.tie(group, other)
            elif theirs:
                for other in (*ours[1:], *theirs):
                    self.tie(ours[0], other)

    def by_parts(self) -> None:
        """Ties groups without a partner to those of the other side that have most of their parts."""
        for mine, others in (self.sides, self.sides[::-1]):
            having = defaultdict[Part, list[OpGroup]](list)
            for other in others:
                for part in other.parts:
                    having[part].append(other)
            for group in [group for group in mine if id(group) not in self.tied]:
                wanted = group.heavy or group.parts
                shared = Counter(other for part in wanted for other in having[part])
                best = max(shared, key=lambda other: (shared[other], other.seconds), default=None)
                if best is not None and shared[best] >= SHARED * len(wanted):
                    self.tie(group, best)

    def tie(self, group: OpGroup, other: OpGroup) -> None:
        self.tied |= {id(group), id(other)}
        first, second = self.top(group), self.top(other)
        if first is not second:
            self.above[id(second)] = first

    def top(self, group: OpGroup) -> OpGroup:
        while id(group) in self.above:
            group = self.above[id(group)]
        return group

    def components(self) -> Iterable[tuple[list[OpGroup], list[OpGroup]]]:
        """Groups before and after of each row."""
        rows: dict[int, tuple[list[OpGroup], list[OpGroup]]] = {}
        for side, groups in enumerate(self.sides):
            for group in groups:
                rows.setdefault(id(self.top(group)), ([], []))[side].append(group)
        return rows.values()


def _line(group: OpGroup) -> tuple[str, int, float]:
    file, _, line = group.source.rpartition(":")
    return file, int(line) if line.isdigit() else 0, group.seconds


def _row(before: list[OpGroup], after: list[OpGroup]) -> OpChange:
    old, new = (sum(group.seconds for group in side) for side in (before, after))
    shown = max(after or before, key=lambda group: group.seconds)
    return OpChange(
        change=_change(before, after, old, new),
        kind=shown.kind,
        layer=shown.layer,
        phase=shown.phase,
        source=shown.source,
        shape=shown.shape,
        before_seconds=old,
        after_seconds=new,
        before_runs=sum(group.runs for group in before),
        after_runs=sum(group.runs for group in after),
        before_ops=_names(before),
        after_ops=_names(after),
    )


def _change(before: list[OpGroup], after: list[OpGroup], old: float, new: float) -> OpFate:
    if not before or not after:
        return OpFate.new if after else OpFate.gone
    if _fused(before) != _fused(after):
        return OpFate.fused
    if abs(new - old) <= TIME_TOLERANCE * max(old, new):
        return OpFate.same
    return OpFate.slower if new > old else OpFate.faster


def _fused(groups: list[OpGroup]) -> set[tuple[str, frozenset[str]]]:
    """Fusions of a row: their kinds, with the primitives inside."""
    return {(group.kind, frozenset(primitive for _, primitive in group.parts)) for group in groups}


def _names(groups: list[OpGroup]) -> list[str]:
    names = itertools.chain.from_iterable(
        group.ops for group in sorted(groups, key=lambda group: -group.seconds)
    )
    return list(itertools.islice(names, NAMES))


# ---- ops of one side


def groups_of(schedules: Iterable[Schedule]) -> list[OpGroup]:
    """The core's ops and waits of a step by the whole key."""
    groups: dict[Hashable, OpGroup] = {}
    for module, timeline, calls in schedules:
        index = {
            instruction.name: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation
        }
        reader = _OpReader(module)
        for span, times in core(timeline):
            group = reader.group(span, index.get(span.name))
            known = groups.setdefault(_KEYS[0](group), group)
            known.seconds += calls * span.seconds * times
            known.runs += calls * times
            if span.name not in known.ops:
                known.ops.append(span.name)
            known.parts |= group.parts
            known.heavy |= group.heavy
    return list(groups.values())


class _OpReader:
    """Ops of a module, as they are matched."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def group(self, span: Span, at: tuple[Computation, Instruction] | None) -> OpGroup:
        """A group without any time of the op of a span."""
        waits = span.opcode.startswith("wait")
        if at is None:
            kind = span.opcode
            return OpGroup(kind, place_of(span), "", short(span.source), "")
        computation, instruction = at
        inside = list(self.inside(instruction))
        kind, decisive = self.kind(instruction, inside)
        parts, heavy = self.parts(inside)
        return OpGroup(
            f"wait for {kind}" if waits else kind,
            place_of(span),
            phase_of(named(self.module, computation, instruction).op_name),
            short(span.source),
            shape_text(decisive),
            parts=frozenset() if waits else parts,
            heavy=frozenset() if waits else heavy,
        )

    def inside(self, instruction: Instruction) -> Iterable[Instruction]:
        """Instructions that an op runs: those of a fusion, fusions in it looked into, else itself."""
        called = instruction.called("calls")
        if called is None or called not in self.module.computations:
            yield instruction
            return
        for inner in self.module.computations[called]:
            yield from self.inside(inner)

    def kind(
        self, instruction: Instruction, inside: Sequence[Instruction]
    ) -> tuple[str, Instruction]:
        """Kind of an op, and the instruction whose result is its shape: results of a fusion come and go beside a product."""
        held = defaultdict[str, list[Instruction]](list)
        for op in inside:
            held[_ASYNCHRONOUS.sub("", op.opcode)].append(op)
        for opcode in _HEAVY:
            if opcode in held:
                largest = max(held[opcode], key=lambda op: op.shape.bytes)
                return _kind_of_heavy(opcode, largest), largest
        if any(opcode in held for opcode in _REDUCTIONS):
            return "reduction", instruction
        own = _ASYNCHRONOUS.sub("", instruction.opcode)
        if own in _COPIES or all(op.opcode in _CHEAP or op.opcode in _COPIES for op in inside):
            return "copy", instruction
        elementwise = own == "fusion" or (
            instruction.opcode in _ELEMENTWISE and not instruction.called_computations
        )
        return "elementwise" if elementwise else own, instruction

    def parts(self, inside: Sequence[Instruction]) -> tuple[frozenset[Part], frozenset[Part]]:
        """Ties of an op to others: place and primitive of its instructions, and of the heavy ones alone."""
        parts, heavy = set[Part](), set[Part]()
        for instruction in inside:
            opcode = _ASYNCHRONOUS.sub("", instruction.opcode)
            if opcode in _CHEAP or not instruction.op_name:
                continue
            place = layer_of(instruction.op_name) or short(
                str(self.module.source(instruction) or "")
            )
            part = (f"{phase_of(instruction.op_name)} {place}", _primitive(instruction))
            parts.add(part)
            if opcode in _HEAVY:
                heavy.add(part)
        return frozenset(parts), frozenset(heavy)


def _kind_of_heavy(opcode: str, instruction: Instruction) -> str:
    if opcode in _PRODUCTS:
        return "matmul"
    if opcode == "custom-call":
        name = (
            instruction.op_name.rpartition("/")[2] if "tpu_custom_call" in instruction.rest else ""
        )
        return f"kernel {_NUMBER.sub('', name) or instruction.target}"
    return opcode


def _primitive(instruction: Instruction) -> str:
    """JAX's primitive, which outlives a change of the compiler's opcodes."""
    return _NUMBER.sub("", instruction.op_name.rpartition("/")[2]) or instruction.opcode


def shape_text(instruction: Instruction) -> str:
    """``bf16[8,1024]`` of a result, without its layout; ``(f32[8], …)`` of several."""
    text = instruction.shape_text
    while (bare := _LAYOUT.sub("", text)) != text:
        text = bare
    return re.sub(r"/\*.*?\*/", "", text).replace(" ", "")


def totals(rows: Iterable[OpChange]) -> Mapping[OpFate, tuple[int, float]]:
    """Rows and seconds by change."""
    by_change: dict[OpFate, tuple[int, float]] = {}
    for row in rows:
        count, seconds = by_change.get(row.change, (0, 0.0))
        by_change[row.change] = count + 1, seconds + row.seconds
    return by_change


# ---- ops of one side as a forecast's JSON keeps them


class _GroupTable(msgspec.Struct):
    rows: list[tuple[str, str, str, str, str, float, float, list[str], list[int], list[int]]]
    """Fields of each group, for parts their indices in ``parts``."""
    parts: list[Part]


def table_of(groups: Sequence[OpGroup]) -> dict[str, Any]:
    """The groups as plain values: ``columns``, ``rows``, and ``parts``, of which rows have the indices."""
    parts = sorted({part for group in groups for part in group.parts})
    index = {part: at for at, part in enumerate(parts)}
    columns = [column.name for column in fields(OpGroup)]
    rows = [[getattr(group, name) for name in columns[:-3]] for group in groups]
    for row, group in zip(rows, groups, strict=True):
        indices = (sorted(index[part] for part in own) for own in (group.parts, group.heavy))
        row += [group.ops[:NAMES], *indices]
    return {"columns": columns, "rows": rows, "parts": list(map(list, parts))}


def groups_in(table: Any, name: str) -> list[OpGroup]:
    """The groups of :func:`table_of`'s answer in the JSON of a forecast of ``name``; none where it keeps none.

    Raises:
        DataError: they are damaged.
    """
    if not table:
        return []
    try:
        table = msgspec.convert(table, _GroupTable)
        return [
            OpGroup(*row[:-2], *(frozenset(table.parts[at] for at in own) for own in row[-2:]))
            for row in table.rows
        ]
    except (ValueError, IndexError) as error:
        raise DataError(
            f"the ops of the saved forecast of {name} are damaged ({error}); write it again with systolic forecast … --json"
        ) from error
