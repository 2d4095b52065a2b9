"""The HLO line that a profile has of an op: shapes, memory spaces and groups, as far as the line tells."""

import re
from dataclasses import dataclass
from functools import lru_cache

from systolic.core.errors import DataError
from systolic.hlo import Shape, parse_groups, parse_shape
from systolic.hlo.shape import split

_HEAD = re.compile(r"%?(?P<name>\S+) = ")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GROUPS = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\}|\{\})")
_ALIASED = re.compile(r"\{(\d*)\}: \((\d+),")
_PAIRS = re.compile(r"source_target_pairs=\{\{(.*?)\}\}")
_OPERAND = re.compile(r"%([\w.-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpLine:
    """One instruction: its result, the shapes of its operands, and the text after them."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Shape, ...]
    inputs: tuple[str, ...]
    """Names of the operands."""
    rest: str

    @property
    def target(self) -> str:
        """Target of a custom call; empty for other ops."""
        match = _TARGET.search(self.rest)
        return match[1] if match else ""

    @property
    def group(self) -> tuple[int, ...]:
        """The first group of devices that a collective joins; empty where the line has none."""
        if pairs := _PAIRS.search(self.rest):
            return tuple(int(number) for number in pairs[1].partition("}")[0].split(","))
        return next(iter(self.groups), ())

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups of devices of a collective; none where the line has none."""
        match = _GROUPS.search(self.rest)
        if match is None or match[1] == "{}":
            return ()
        try:
            return parse_groups(match[1], 1).groups
        except (DataError, ValueError):
            return ()

    @property
    def updated(self) -> tuple[Shape, ...]:
        """Operands that a custom call updates in place."""
        _, _, text = self.rest.partition("output_to_operand_aliasing={")
        numbers = [int(number) for _, number in _ALIASED.findall(text.partition("custom_call")[0])]
        return tuple(self.operands[n] for n in numbers if n < len(self.operands))

    def arrays(self) -> tuple[Shape, ...]:
        """Arrays of result and operands."""
        return tuple(a for shape in (self.shape, *self.operands) for a in shape.arrays())


@lru_cache(maxsize=65536)
def read_line(text: str) -> OpLine | None:
    """The instruction in a line; None where it is none, or was cut."""
    head = _HEAD.match(text)
    if head is None:
        return None
    start = head.end()
    end = _closing(text, start) + 1 if text[start : start + 1] == "(" else text.find(" ", start)
    opcode = _OPCODE.match(text, end) if end > start else None
    if opcode is None:
        return None
    close = _closing(text, opcode.end() - 1)
    if close < 0:
        return None
    inner = text[opcode.end() : close]
    operands = [part for part in split(inner) if part]
    try:
        shapes = [
            parse_shape(operand.rpartition(" %")[0] or operand)
            for operand in operands
            if "[" in operand
        ]
        shape = parse_shape(text[start:end])
    except DataError:
        return None
    return OpLine(
        name=head["name"],
        opcode=opcode["opcode"],
        shape=shape,
        operands=tuple(shapes),
        inputs=tuple(name for part in operands for name in _OPERAND.findall(part)[-1:]),
        rest=text[close + 1 :],
    )


def replica_groups(text: str) -> str:
    """``replica_groups=…`` as a line writes it; empty where it has none."""
    match = _GROUPS.search(text)
    return match[0] if match is not None else ""


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at ``start``; -1 where the text was cut."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if not depth:
                return at
    return -1
