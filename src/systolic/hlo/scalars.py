"""Values of scalars before a run: integers, floats and predicates as ranges, tuples of them as lists.

The compiler computes loop counters, bounds and conditions with the same opcodes as all else: constants,
sums, comparisons, under copies, conversions and fusions. With ``jax_enable_x64`` a counter of 64 bits is a
pair of u32 with carries, and a float two of f32. Arrays count as a scalar while all their elements are the same, and
small ones element by element (:mod:`systolic.hlo.values`). What depends on an argument has the range that the program
leaves it: ``jnp.clip(n, 0, 64)`` is from 0 to 64.
"""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from systolic.hlo.module import Computation, Instruction, Module
from systolic.hlo.shape import Shape, parse_shape
from systolic.hlo.values import (
    MAYBE,
    MOST_ELEMENTS,
    MOVES,
    NO,
    UNKNOWN,
    YES,
    Elements,
    Kind,
    Known,
    Number,
    Value,
    constant,
    hull,
    is_line,
    kind_named,
    kind_of,
    moved,
    one_value,
    rounded,
    small,
    spread,
)

_DIRECTION = re.compile(r"\bdirection=(\w+)")
DEEP = 100
"""Instructions followed by recursion, and those behind them in rows."""
MOST_ROWS = 1024
"""Elements of the longest table whose elements are computed one by one."""
DEEPEST = 200
"""Computations and tuples followed from a value to its origin before it counts as unknown."""
MOST_VALUES = 3_000_000
"""Values that are found in a module before all others count as unknown: some ten seconds."""
FIXED = 0
"""Cells of one number: what was computed of it is not linear in it."""
_IDEMPOTENT = frozenset(("and", "or", "minimum", "maximum"))
"""Opcodes that give the number of equal ones."""
_COUNTED = frozenset(("add", "multiply", "xor"))
PASSING = frozenset(
    """copy copy-start copy-done bitcast reshape transpose broadcast opt-barrier domain
    add-dependency""".split()  # noqa: SIM905 names read better in lines
)
"""Opcodes whose result is their first operand."""
_ELEMENTWISE = frozenset(
    """add subtract multiply divide remainder negate abs sign minimum maximum clamp compare select and or xor not
    shift-left shift-right-logical shift-right-arithmetic convert bitcast-convert is-finite""".split()  # noqa: SIM905
)
_IN_ROWS = PASSING | _ELEMENTWISE
"""Opcodes that follow each other in long rows."""
_FOLLOWED = (
    PASSING
    | _ELEMENTWISE
    | MOVES
    | frozenset(
        """constant parameter get-tuple-element tuple fusion call while conditional partition-id
        replica-id reduce all-reduce""".split()  # noqa: SIM905
    )
)
_HALVES = frozenset(("X64Combine", "X64SplitLow", "X64SplitHigh"))
_SHIFTS = frozenset(("shift-left", "shift-right-logical", "shift-right-arithmetic"))


class TupleParts(Protocol):
    """Values of a tuple that are read one by one."""

    def part(self, index: int) -> Value:
        """The value of one part."""
        ...


class Turn(NamedTuple):
    """A number whose place among others decided something: it decides the same until it leaves its cell."""

    at: Number
    cell: int | None
    """Width of a cell in bits, from ``lowest``; None: the cells are below, at and above zero."""
    lowest: int = 0

    def room(self, before: "Turn") -> Number:
        """Further steps as large as the last one that stay in the cell; -1 where the last one did not."""
        if self.at == before.at:
            return math.inf
        step = self.at - before.at
        if not isinstance(step, int) or not isinstance(self.at, int):
            return -1
        if self.cell is None:
            if self.at == 0 or (self.at > 0) != (before.at > 0) or before.at == 0:
                return -1
            return math.inf if (self.at > 0) == (step > 0) else (abs(self.at) - 1) // abs(step)
        place = (self.at - self.lowest) >> self.cell
        if place != (int(before.at) - self.lowest) >> self.cell:
            return -1
        bottom = self.lowest + (place << self.cell)
        left = bottom + (1 << self.cell) - 1 - self.at if step > 0 else self.at - bottom
        return left // abs(step)


@dataclass
class Scalars:
    """Evaluates scalars of a module."""

    module: Module
    turns: list[Turn] = field(default_factory=list)
    """Decisions since the list was emptied."""
    device: int | None = None
    """The device that runs it; None: any of them."""
    left: int = MOST_VALUES
    case_values: int = MOST_VALUES // 10
    """Values that cases may find (:mod:`systolic.hlo.loops`)."""
    split: "tuple[Scope, dict[str, set[int]]] | None" = None
    """Record of comparisons that a range leaves open: the run, and its values with what they are compared with."""

    def decides(self, *numbers: Number) -> None:
        """Records numbers of which only the very same ones give the same result."""
        self.turns += [Turn(number, FIXED) for number in numbers]

    def wrapped(self, low: Number, high: Number, kind: Kind) -> Known:
        """A range of whole numbers in an integer type, which wraps around."""
        if not (math.isfinite(low) and math.isfinite(high)):
            return UNKNOWN
        low, high, lowest = int(low), int(high), kind.lowest
        self.turns += [Turn(low, kind.bits, lowest), Turn(high, kind.bits, lowest)]
        place = (low - lowest) >> kind.bits
        if place != (high - lowest) >> kind.bits:
            return UNKNOWN
        return Known(low - (place << kind.bits), high - (place << kind.bits))

    def apart(self, left: Known, right: Known) -> None:
        """Records how two ranges lie to each other."""
        pairs = [(left.low, right.high), (left.high, right.low)]
        if not (left.exact and right.exact):
            pairs += [(left.low, right.low), (left.high, right.high)]
        for first, second in pairs:
            if not (math.isfinite(first) and math.isfinite(second)):
                continue
            if isinstance(first, float) or isinstance(second, float):
                self.decides(first, second)
            else:
                self.turns.append(Turn(first - second, None))


@dataclass
class Scope:
    """One run of a computation: values of its instructions, found when asked for."""

    on: Scalars
    computation: Computation
    argument: Callable[[int], "Value | TupleParts"]
    """The value of a parameter by its number."""
    loop: "Callable[[Scope, Instruction], Value]"
    """The value of a ``while``."""
    depth: int = 0
    values: dict[str, "Value"] = field(default_factory=dict)
    outer: "tuple[Scope, Sequence[str]] | None" = None
    """The run that calls it, and its operands there."""

    def get(self, name: str) -> Value:
        """Value of an instruction; :data:`UNKNOWN` for what is computed from data."""
        known = self.values.get(name)
        if known is not None:
            return known
        if self.depth < DEEP:
            self.values[name] = self._computed(name)
        else:
            # A division of 64 bits is a thousand ops in a row: no recursion along all of them.
            todo = [name]
            while todo:
                wanted = [
                    operand for operand in self._unknown(todo[-1]) if operand not in self.values
                ]
                if wanted:
                    todo += reversed(wanted)
                elif (last := todo.pop()) not in self.values:
                    self.values[last] = self._computed(last)
        return self.values[name]

    def _unknown(self, name: str) -> Sequence[str]:
        """Operands whose values that of an elementwise op needs."""
        instruction = self.computation.index.get(name)
        if name in self.values or instruction is None or instruction.opcode not in _IN_ROWS:
            return ()
        return instruction.operands if is_followed(instruction) else ()

    def _computed(self, name: str) -> Value:
        instruction = self.computation.index.get(name)
        self.on.left -= 1
        if instruction is None or self.depth > DEEPEST or self.on.left < 0:
            return UNKNOWN
        if not is_followed(instruction):
            return UNKNOWN
        self.depth += 1
        value = self._value(instruction)
        self.depth -= 1
        if isinstance(value, Elements):
            shape = parse_shape(instruction.shape_text)
            return (
                value if is_line(shape) and len(value.elements) == shape.elements else value.range
            )
        if isinstance(value, list) and not instruction.shape_text.startswith("("):
            shape = parse_shape(instruction.shape_text)
            if instruction.opcode == "bitcast" and len(value) > shape.elements > 0:
                return one_value(value[: shape.elements])  # the first elements, in place
            value = value if small(shape) and len(value) == shape.elements else UNKNOWN
        return value

    def scalar(self, name: str) -> Known:
        """Scalar value by :meth:`get`; tuples are unknown."""
        value = self.get(name)
        return value if isinstance(value, Known) else UNKNOWN

    def inside(self, name: str, operands: Sequence[str]) -> "Scope":
        """One run of a computation on operands of this one."""
        return Scope(
            self.on,
            self.on.module.computations[name],
            lambda number: self.get(operands[number]) if number < len(operands) else UNKNOWN,
            self.loop,
            self.depth + 1,
            outer=(self, operands),
        )

    def _value(self, instruction: Instruction) -> Value:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            return constant(operands[0] if operands else "", instruction.shape_text)
        if opcode == "parameter":
            argument = self.argument(int(operands[0]))
            return argument if isinstance(argument, (Known, list)) else UNKNOWN
        if opcode == "get-tuple-element":
            return self._part(instruction)
        if opcode == "tuple":
            return [self.get(name) for name in operands]
        if opcode in PASSING and not (opcode == "bitcast" and self._reads_otherwise(instruction)):
            return self.get(operands[0])
        if opcode in ("fusion", "call"):
            called = instruction.called("calls" if opcode == "fusion" else "to_apply")
            inner = self.inside(called or "", operands)
            return inner.get(inner.computation.root.name)
        if opcode == "while":
            return self.loop(self, instruction)
        if opcode == "conditional":
            return self._branches(instruction)
        if opcode == "custom-call":
            return self._halves(instruction)
        if opcode == "partition-id" and self.on.device is not None:
            return Known(self.on.device, self.on.device)
        if opcode in ("partition-id", "replica-id"):
            return Known(0, max(self.on.module.num_partitions - 1, 0))
        if opcode in ("reduce", "all-reduce"):
            return self._reduced(instruction)
        values = [self.get(name) for name in operands]
        if opcode in MOVES:
            return moved(instruction, values, self._shapes(instruction), self.on.decides)
        if self.on.split is not None and opcode in ("compare", "sign", "abs"):
            self._write_down(instruction, values)
        kind = self._kind_in(instruction)
        scalars = [value for value in values if isinstance(value, Known)]
        sizes = (len(value.elements) for value in values if isinstance(value, Elements))
        size = max(sizes, default=1)
        if len(scalars) == len(values) and not 1 < size <= MOST_ROWS:
            return computed(self.on, instruction, scalars, kind)
        size = max(size, *(len(value) for value in values if isinstance(value, list)), 1)
        self.on.left -= size
        rows = zip(*(spread(value, size) for value in values), strict=True)
        return one_value([computed(self.on, instruction, row, kind) for row in rows])

    def _write_down(self, compared: Instruction, values: Sequence[Value]) -> None:
        """Writes down what a value is compared with, of one that has a range."""
        assert self.on.split is not None
        run, points = self.on.split
        sides = [*zip(compared.operands, values, strict=True)]
        sides = [*sides, ("", Known(0, 0))][:2]
        for (name, value), (_, other) in (sides, sides[::-1]):
            exact = isinstance(other, Known) and other.exact and isinstance(other.low, int)
            if not name or not exact or (isinstance(value, Known) and value.exact):
                continue
            scope, source, shift = self.source(name)
            kind = kind_of(scope.computation[source]) if scope is run else None
            shape = parse_shape(scope.computation[source].shape_text)
            # The elements of an array are not all in the same case.
            if kind is None or kind.is_float or isinstance(other, list) or shape.elements > 1:
                continue
            number, size = int(other.low), 1 << kind.bits
            held = points.setdefault(source, set())
            held.add((number - kind.lowest) % size + kind.lowest)
            if shift:
                # The other sign begins elsewhere: at 0, or at half of all numbers.
                held.add(0 if kind.signed else size >> 1)

    def source(self, name: str) -> "tuple[Scope, str, bool]":
        """The value that another is a copy of, and whether it is read as of the other sign."""
        scope, shift = self, False
        while True:
            instruction = scope.computation[name]
            operands = instruction.operands
            if instruction.opcode == "parameter" and scope.outer is not None:
                outer, arguments = scope.outer
                number = int(operands[0])
                if number >= len(arguments) or arguments[number] not in outer.computation.index:
                    return scope, name, shift
                scope, name = outer, arguments[number]
                continue
            inner = scope.computation.index.get(operands[0]) if operands else None
            if inner is None or inner.shape_text.startswith("("):
                return scope, name, shift
            if instruction.opcode in ("convert", "bitcast-convert", "bitcast"):
                old, new = kind_of(inner), kind_of(instruction)
                if old is None or new is None or (old.bits, old.is_float) != (new.bits, False):
                    return scope, name, shift
                shift = shift or old.signed != new.signed
            elif instruction.opcode not in PASSING:
                return scope, name, shift
            name = inner.name

    def _part(self, instruction: Instruction) -> Value:
        """Part of a tuple; only the part is read where the tuple is an argument."""
        source, index = (
            self.computation.index.get(instruction.operands[0]),
            instruction.tuple_index,
        )
        whole: Value | TupleParts
        if source is not None and source.opcode == "parameter":
            whole = self.argument(int(source.operands[0]))
        elif source is not None and source.opcode == "tuple":
            return self.get(source.operands[index])
        else:
            whole = self.get(instruction.operands[0])
        if isinstance(whole, list):
            return whole[index] if index < len(whole) else UNKNOWN
        return UNKNOWN if isinstance(whole, Known) else whole.part(index)

    def taken(self, conditional: Instruction) -> list[int]:
        """Branches that this run may take: one where the selector is known."""
        selector = self.scalar(conditional.operands[0])
        self.on.decides(*selector)
        return chosen(selector, self._kind_in(conditional), len(conditional.called_computations))

    def _branches(self, instruction: Instruction) -> Value:
        names = instruction.called_computations
        values = []
        for number in self.taken(instruction):
            inner = self.inside(names[number], instruction.operands[number + 1 : number + 2])
            values.append(inner.get(inner.computation.root.name))
        joined = values[0]
        for other in values[1:]:
            joined = hull(joined, other)
        return joined

    def _halves(self, instruction: Instruction) -> Value:
        """64 bits of two times 32, and back."""
        kind, operands = (
            kind_of(instruction),
            [self.scalar(name) for name in instruction.operands],
        )
        if kind is None or kind.is_float or not all(operand.exact for operand in operands):
            return UNKNOWN
        numbers = [int(operand.low) for operand in operands]
        self.on.decides(*numbers)
        match instruction.target, numbers:
            case "X64Combine", [low, high]:
                number = (low & 0xFFFFFFFF) + (high << 32)
            case "X64SplitLow", [both]:
                number = both & 0xFFFFFFFF
            case "X64SplitHigh", [both]:
                number = both >> 32
            case _:
                return UNKNOWN
        return self.on.wrapped(number, number, kind)

    def _reduced(self, reduction: Instruction) -> Value:
        """A reduction of all of an array's elements and its initial value, or of any number that are the same."""
        held = self.on.module.computations.get(reduction.called("to_apply") or "")
        opcode = "" if held is None else combiner(held)
        kind = kind_of(reduction)
        if kind is None or opcode not in _IDEMPOTENT | _COUNTED:
            return UNKNOWN
        value = self.get(reduction.operands[0])
        if reduction.opcode == "all-reduce":
            # Of each element by itself, over devices: where none is chosen, all have the same range.
            return value if opcode in _IDEMPOTENT and self.on.device is None else UNKNOWN
        shape, source = parse_shape(reduction.shape_text), self._shapes(reduction)[0]
        if not source.elements:
            return self.get(reduction.operands[1])
        if isinstance(value, Known) and not isinstance(value, Elements):
            each = source.elements // max(shape.elements, 1)
            elements = [value] if opcode in _IDEMPOTENT else [value] * each
            if len(elements) > MOST_ELEMENTS or (len(elements) > 1 and kind.is_float):
                return UNKNOWN
        elif shape.elements == 1 and not (kind.is_float and opcode in _COUNTED):
            elements = spread(value, source.elements)
        else:
            return UNKNOWN
        reduced = self.scalar(reduction.operands[1])
        for element in elements:
            reduced = elementwise(self.on, opcode, [reduced, element], kind, kind)
        return reduced

    def _shapes(self, instruction: Instruction) -> list[Shape]:
        """Shapes of all operands."""
        index = self.computation.index
        return [
            parse_shape(index[name].shape_text) if name in index else Shape()
            for name in instruction.operands
        ]

    def _reads_otherwise(self, instruction: Instruction) -> bool:
        """Whether a bitcast reads the same bits as of another type."""
        kind = kind_of(instruction)
        return kind is not None and self._kind_in(instruction) != kind

    def _kind_in(self, instruction: Instruction) -> Kind | None:
        """Type of the first operand."""
        source = self.computation.index.get(instruction.operands[0])
        return None if source is None else kind_of(source)


def combiner(computation: Computation) -> str:
    """Opcode by which a reduction's computation combines its two arguments; empty where it does anything else."""
    root = computation.root
    numbers = {
        computation[name].operands[0]
        for name in root.operands
        if name in computation.index and computation[name].opcode == "parameter"
    }
    return root.opcode if numbers == {"0", "1"} and len(root.operands) == 2 else ""


def is_followed(instruction: Instruction) -> bool:
    """Whether a value may be known: tuples, integers and predicates, and few floats."""
    if instruction.opcode not in _FOLLOWED and instruction.target not in _HALVES:
        return False
    if instruction.shape_text.startswith("("):
        return True
    shape = parse_shape(instruction.shape_text)
    kind = kind_named(shape.dtype)
    return kind is not None and (not kind.is_float or small(shape))


def chosen(selector: Known, kind: Kind | None, branches: int) -> list[int]:
    """Branches of a ``conditional`` that may be taken: a predicate's first is for true, others count from 0."""
    if not selector.exact:
        return list(range(branches))
    if kind is not None and kind.name == "pred":
        return [0 if selector.low else branches - 1]
    at = int(selector.low)
    return [at if 0 <= at < branches else branches - 1]


def computed(
    on: Scalars, instruction: Instruction, operands: Sequence[Known], kind_in: Kind | None
) -> Known:
    """Result of an elementwise op."""
    opcode, kind = instruction.opcode, kind_of(instruction)
    if kind is None or kind_in is None:
        return UNKNOWN
    if opcode == "compare":
        return compared(on, _direction(instruction.rest), *operands[:2])
    return elementwise(on, opcode, operands, kind, kind_in)


@lru_cache(maxsize=4096)
def _direction(rest: str) -> str:
    """Direction of a comparison."""
    match = _DIRECTION.search(rest)
    return match[1] if match else "EQ"


def elementwise(
    on: Scalars, opcode: str, operands: Sequence[Known], kind: Kind | None, kind_in: Kind | None
) -> Known:
    """Result of any other than a comparison."""
    if kind is None or kind_in is None:
        return UNKNOWN
    if opcode == "select":
        which, yes, no = operands
        if which.exact:
            return yes if which.low else no
        on.apart(yes, no)
        return Known(min(yes.low, no.low), max(yes.high, no.high))
    if opcode == "is-finite":
        # What is not finite is unknown.
        return YES if all(map(math.isfinite, operands[0])) else MAYBE
    if opcode in ("convert", "bitcast-convert", "bitcast"):
        return _converted(on, operands[0], kind_in, kind, bits=opcode != "convert")
    if kind.is_float:
        return _of_floats(on, opcode, operands, kind)
    if kind.name == "pred":
        return _of_predicates(opcode, operands)
    if opcode in ("minimum", "maximum", "clamp"):
        # ``minimum``, ``maximum`` or ``clamp`` (least, number, most).
        def pick(choose: Callable[[Number, Number], Number], a: Known, b: Known) -> Known:
            on.apart(a, b)
            return Known(choose(a.low, b.low), choose(a.high, b.high))

        if opcode == "clamp":
            least, number, most = operands
            return pick(min, pick(max, number, least), most)
        return pick(min if opcode == "minimum" else max, *operands)
    return _of_integers(on, opcode, operands, kind)


def compared(on: Scalars, direction: str, left: Known, right: Known) -> Known:
    """Outcome of a comparison of two ranges."""
    on.apart(left, right)
    match direction:
        case "LT":
            yes, no = left.high < right.low, left.low >= right.high
        case "LE":
            yes, no = left.high <= right.low, left.low > right.high
        case "GT":
            yes, no = left.low > right.high, left.high <= right.low
        case "GE":
            yes, no = left.low >= right.high, left.high < right.low
        case _:
            yes = left.exact and right.exact and left.low == right.low
            no = left.high < right.low or left.low > right.high
            if direction == "NE":
                yes, no = no, yes
    return YES if yes else NO if no else MAYBE


def _converted(on: Scalars, value: Known, old: Kind, new: Kind, *, bits: bool) -> Known:
    if bits and (old.is_float or new.is_float or old.bits != new.bits):
        return value if old == new else UNKNOWN
    if new.name == "pred":
        zero = Known(0, 0)
        return compared(on, "NE", value, zero)
    if not (old.is_float or new.is_float):
        return on.wrapped(value.low, value.high, new)
    if not value.exact or not math.isfinite(value.low):
        return UNKNOWN
    on.decides(value.low)
    if new.is_float:
        number = rounded(float(value.low), new)
        return Known(number, number)
    number = math.trunc(value.low)
    # Beyond the type's ends, backends differ.
    fits = new.lowest <= number < new.lowest + (1 << new.bits)
    return Known(number, number) if fits else UNKNOWN


def _of_floats(on: Scalars, opcode: str, operands: Sequence[Known], kind: Kind) -> Known:
    if not all(operand.exact for operand in operands):
        return UNKNOWN
    numbers = [float(operand.low) for operand in operands]
    on.decides(*numbers)
    match opcode, numbers:
        case ("add", [a, b]):
            number = a + b
        case ("subtract", [a, b]):
            number = a - b
        case ("multiply", [a, b]):
            number = a * b
        case ("divide", [a, b]) if b:
            number = a / b
        case ("negate", [a]):
            number = -a
        case ("minimum", [a, b]):
            number = min(a, b)
        case ("maximum", [a, b]):
            number = max(a, b)
        case _:
            return UNKNOWN
    number = rounded(number, kind)
    return Known(number, number) if math.isfinite(number) else UNKNOWN


def _of_predicates(opcode: str, operands: Sequence[Known]) -> Known:
    operands = [Known(max(operand.low, 0), min(operand.high, 1)) for operand in operands]
    match opcode, operands:
        case ("and" | "minimum" | "multiply", [a, b]):
            return Known(min(a.low, b.low), min(a.high, b.high))
        case ("or" | "maximum" | "add", [a, b]):
            return Known(max(a.low, b.low), max(a.high, b.high))
        case ("not", [a]):
            return Known(1 - a.high, 1 - a.low)
        case ("xor", [a, b]) if a.exact and b.exact:
            return YES if a.low != b.low else NO
        case _:
            return MAYBE


def _of_integers(on: Scalars, opcode: str, operands: Sequence[Known], kind: Kind) -> Known:
    match opcode, list(operands):
        case ("add", [a, b]):
            return on.wrapped(a.low + b.low, a.high + b.high, kind)
        case ("subtract", [a, b]):
            return on.wrapped(a.low - b.high, a.high - b.low, kind)
        case ("negate", [a]):
            return on.wrapped(-a.high, -a.low, kind)
        case ("multiply", [a, b]) if all(map(math.isfinite, (*a, *b))):
            corners = [left * right for left in a for right in b]
            if not (a.exact and b.exact):
                on.decides(*a, *b)
            return on.wrapped(min(corners), max(corners), kind)
        case ("and", [a, b]) if not (a.exact and b.exact):
            on.decides(*a, *b)
            # A mask bounds what it is laid on.
            masks = [mask.high for mask in (a, b) if mask.low >= 0]
            return Known(0, min(masks)) if masks else UNKNOWN
        case ("sign", [a]):
            on.decides(*a)
            return Known((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0))
        case ("abs", [a]) if not a.exact:
            on.decides(*a)
            return a if a.low >= 0 else on.wrapped(max(0, -a.high), max(-a.low, a.high), kind)
        case ("shift-right-logical" | "shift-right-arithmetic", [a, b]) if (
            b.exact and 0 <= b.low < kind.bits and math.isfinite(a.high - a.low)
        ) and (a.low >= 0 if opcode.endswith("logical") else not _is_high(a, kind)):
            if not a.exact:
                on.decides(*a)
                return Known(int(a.low) >> int(b.low), int(a.high) >> int(b.low))
        case ("divide" | "remainder", [a, b]) if b.exact and b.low > 0 and not a.exact:
            by = int(b.low)
            on.decides(*a)
            if opcode == "remainder":
                return Known(0 if a.low >= 0 else 1 - by, 0 if a.high <= 0 else by - 1)
            if not (math.isfinite(a.low) and math.isfinite(a.high)):
                return UNKNOWN
            return Known(_truncated(int(a.low), by), _truncated(int(a.high), by))
    if not all(operand.exact for operand in operands):
        return UNKNOWN
    numbers = [int(operand.low) for operand in operands]
    on.decides(*numbers)
    number = _whole(opcode, numbers, kind)
    return UNKNOWN if number is None else on.wrapped(number, number, kind)


def _is_high(number: Known, kind: Kind) -> bool:
    """Whether an unsigned number may have its highest bit set."""
    return not kind.signed and number.high >= 1 << (kind.bits - 1)


def _whole(opcode: str, numbers: Sequence[int], kind: Kind) -> int | None:
    """Result of an op on whole numbers, before it wraps."""
    first, second = (*numbers, 0)[:2]
    bitwise = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    if opcode in bitwise:
        return bitwise[opcode](first, second)
    if opcode in _SHIFTS:
        if not 0 <= second < kind.bits:
            return None
        if opcode == "shift-left":
            return first << second
        if opcode.endswith("logical"):
            return first % (1 << kind.bits) >> second
        # The highest bit counts as a sign, of an unsigned number too.
        return (first - (first >> kind.bits - 1 << kind.bits) if first >= 0 else first) >> second
    match opcode:
        case "not":
            return ~first
        case "abs":
            return abs(first)
        case "sign":
            return (first > 0) - (first < 0)
        case "divide" if second:
            return _truncated(first, second)
        case "remainder" if second:
            return first - second * _truncated(first, second)
    return None


def _truncated(number: int, by: int) -> int:
    """A quotient towards zero."""
    quotient = abs(number) // abs(by)
    return quotient if (number < 0) == (by < 0) else -quotient
