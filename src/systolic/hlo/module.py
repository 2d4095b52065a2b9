"""A module: computations of instructions in the order they run, with the place in the model that an instruction without metadata belongs to, and results that lie in their operands' memory."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from systolic.core.errors import DataError
from systolic.hlo.shape import Shape, parse_shape

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)"?')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"]*)"')
_LINE = re.compile(r"source_line=(\d+)")
_INT = re.compile(r"-?\d+")

MOST_CYCLES = 1 << 40
"""Larger estimates are sentinels: a compile at low effort prints them in place of cycles."""
_FOLLOWED = frozenset(
    {"copy", "copy-start", "copy-done", "bitcast", "slice-start", "slice-done"}
    | {"get-tuple-element", "pad", "fusion"}
)
_STEPS = 6
"""Operands followed before it is given up."""
_SHARED = re.compile(r'"indices":\["(\d+)","(\d+)"\]')
_PAIR = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+)")


@dataclass(slots=True, eq=False)
class Instruction:
    """One line of a computation. Attributes are read from the text when asked for."""

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation; a constant's literal for constants."""
    rest: str
    """All that follows the operands: attributes, metadata, backend_config."""
    root: bool

    @property
    def shape(self) -> Shape:
        """Shape of the result."""
        return parse_shape(self.shape_text)

    def attribute(self, name: str) -> str | None:
        """The raw text of an attribute: ``calls`` gives ``%fused_computation.1``; None if absent."""
        key = f"{name}="
        start = self.rest.find(key)
        while start > 0 and self.rest[start - 1] not in " ,{":
            start = self.rest.find(key, start + 1)
        return None if start < 0 else _value(self.rest, start + len(key))

    def called(self, name: str) -> str | None:
        """The computation that an attribute names, without ``%``."""
        value = self.attribute(name)
        return None if value is None else value.lstrip("%")

    @property
    def called_computations(self) -> list[str]:
        """All computations it calls: bodies, conditions, branches, fusions."""
        names = []
        for key in (
            "calls",
            "to_apply",
            "body",
            "condition",
            "true_computation",
            "false_computation",
        ):
            if (name := self.called(key)) is not None:
                names.append(name)
        if (branches := self.attribute("branch_computations")) is not None:
            names += [name.strip().lstrip("%") for name in branches.strip("{}").split(",")]
        return names

    @property
    def config(self) -> Mapping[str, Any]:
        """``backend_config`` as JSON; empty when there is none."""
        text = self.attribute("backend_config")
        if text is None:
            return {}
        value = json.loads(text)
        return json.loads(value) if isinstance(value, str) else value

    @property
    def cycles(self) -> int | None:
        """The compiler's ``estimated_cycles`` (TensorCore cycles); None where it has no estimate."""
        match = _CYCLES.search(self.rest)
        if match is None:
            return None
        cycles = int(match[1])
        return cycles if 0 < cycles < MOST_CYCLES else None

    @property
    def op_name(self) -> str:
        """The path of JAX names that made it, ``jit(train)/jvp()/while/body/…``; empty if unknown."""
        match = _OP_NAME.search(self.rest)
        return _ESCAPED.sub(r"\1", match[1]) if match else ""

    @property
    def target(self) -> str:
        """A custom call's target, else empty."""
        if self.opcode != "custom-call":
            return ""
        return (self.attribute("custom_call_target") or "").strip('"')

    @property
    def tuple_index(self) -> int:
        """``index`` of a get-tuple-element."""
        match = _INT.search(self.attribute("index") or "")
        return int(match[0]) if match else 0


@dataclass(slots=True, eq=False)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    entry: bool = False
    index: dict[str, Instruction] = field(default_factory=dict)
    """Name to instruction."""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __getitem__(self, name: str) -> Instruction:
        return self.index[name]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        for instruction in reversed(self.instructions):
            if instruction.root:
                return instruction
        return self.instructions[-1]

    @property
    def parameters(self) -> list[Instruction]:
        """Parameters by number."""
        inputs = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(inputs, key=lambda i: int(i.operands[0]) if i.operands else 0)

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Shapes of the operands that are instructions here."""
        return [self.index[name].shape for name in instruction.operands if name in self.index]


@dataclass(slots=True, eq=False)
class SourceLine:
    """A line of source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(eq=False)
class Module:
    """A scheduled program for one core, the same on all."""

    name: str
    header: str
    computations: dict[str, Computation]
    tables: dict[str, list[str]] = field(default_factory=dict)
    """FileNames, FunctionNames, FileLocations, StackFrames as printed, where the text has them."""

    @property
    def entry(self) -> Computation:
        """The computation that is run."""
        for computation in self.computations.values():
            if computation.entry:
                return computation
        return next(reversed(self.computations.values()))

    def callee(self, instruction: Instruction, attribute: str) -> Computation:
        """The computation that an attribute of an instruction names.

        Raises:
            DataError: the text has no such computation.
        """
        name = instruction.called(attribute)
        computation = self.computations.get(name or "")
        if computation is None:
            raise DataError(
                f"{instruction.name} calls {name or 'nothing'}, which the text does not have; dump the whole module"
            )
        return computation

    @property
    def is_scheduled(self) -> bool:
        """Whether instructions are in the order they run."""
        return "is_scheduled=true" in self.header

    @cached_property
    def num_partitions(self) -> int:
        """Devices that run it."""
        partitions = re.search(r"num_partitions=(\d+)", self.header)
        replicas = re.search(r"replica_count=(\d+)", self.header)
        return int(partitions[1] if partitions else 1) * int(replicas[1] if replicas else 1)

    @cached_property
    def donations(self) -> dict[int, int]:
        """Part of the result to the argument in whose memory it is left."""
        start = self.header.find("input_output_alias={")
        if start < 0:
            return {}
        text = _value(self.header, start + len("input_output_alias="))
        return {
            int(output or 0): int(argument)
            for output, argument in re.findall(r"\{(\d*)[\d,\s]*\}:\s*\((\d+)", text)
        }

    def source(self, instruction: Instruction) -> SourceLine | None:
        """The innermost line of source that made an instruction; None where the text has none."""
        if frame := _FRAME.search(instruction.rest):
            return self._frames.get(int(frame[1]))
        file = _FILE.search(instruction.rest)
        if file is None:
            return None
        line = _LINE.search(instruction.rest)
        return SourceLine(file[1], int(line[1]) if line else 0)

    @cached_property
    def _frames(self) -> dict[int, SourceLine]:
        files = {
            int(number): name.strip().strip('"')
            for number, _, name in (row.partition(" ") for row in self.tables.get("FileNames", ()))
        }
        places: dict[int, SourceLine] = {}
        for row in self.tables.get("FileLocations", ()):
            number, _, body = row.partition(" ")
            file = re.search(r"file_name_id=(\d+)", body)
            line = re.search(r"\bline=(\d+)", body)
            if file and line:
                places[int(number)] = SourceLine(files.get(int(file[1]), "?"), int(line[1]))
        frames = {}
        for row in self.tables.get("StackFrames", ()):
            number, _, body = row.partition(" ")
            place = re.search(r"file_location_id=(\d+)", body)
            if place and int(place[1]) in places:
                frames[int(number)] = places[int(place[1])]
        return frames


def _value(text: str, start: int) -> str:
    """The value that begins at ``start``: balanced braces, a quoted string, or up to a comma."""
    depth, quoted, index = 0, False, start
    while index < len(text):
        char = text[index]
        if quoted:
            if char == "\\":
                index += 1
            elif char == '"':
                quoted = False
        elif char == '"':
            quoted = True
        elif char in "{[(":
            depth += 1
        elif char in "}])":
            if depth == 0:
                break
            depth -= 1
        elif char == "," and depth == 0:
            break
        index += 1
    return text[start:index].strip()


def named(module: Module, computation: Computation, instruction: Instruction) -> Instruction:
    """The instruction itself if it has a name, else one it holds or copies; itself if none has."""
    at = instruction
    for _ in range(_STEPS):
        if at.op_name or at.opcode == "parameter":
            return at
        if at.opcode == "fusion" and (held := _held(module, module.callee(at, "calls"))):
            return held
        if at.opcode not in _FOLLOWED or not at.operands:
            break
        source = computation.index.get(at.operands[0])
        if source is None:
            break
        at = source
    return instruction


def _held(module: Module, fused: Computation) -> Instruction | None:
    """The named instruction nearest to a fusion's result, fusions in it looked into."""
    for inner in (fused.root, *reversed(fused.instructions)):
        if inner.op_name and inner.opcode not in ("parameter", "constant"):
            return inner
        if inner.opcode == "fusion" and (held := _held(module, module.callee(inner, "calls"))):
            return held
    return None


def aliases_of(instruction: Instruction) -> dict[int | None, int]:
    """Part of the result (None: the whole of it) to operand number; empty when nothing aliases.

    Reads ``output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}``; deeper parts count as the
    outermost one they are in.
    """
    text = instruction.attribute("output_to_operand_aliasing")
    if text is None:
        return {}
    aliases: dict[int | None, int] = {}
    for part, operand in _PAIR.findall(text):
        aliases.setdefault(int(part.split(",")[0]) if part.strip() else None, int(operand))
    return aliases


def aliased_operand(instruction: Instruction, part: int) -> int | None:
    """The operand in whose memory a part of the result lies; None when it has its own."""
    aliases = aliases_of(instruction)
    return aliases.get(part, aliases.get(None))


def shared_operand(instruction: Instruction, part: int) -> int | None:
    """The operand whose buffer a part of the result takes, whether it passes it on or overwrites it.

    Reads ``output_to_operand_aliasing`` and, after it, libtpu's
    ``"aliasing_operands":{"lists":[{"indices":["0","3"]}]}``: numbers of operands, those from the
    number of operands on being parts of the result.
    """
    if (passed := aliased_operand(instruction, part)) is not None:
        return passed
    start = instruction.rest.find('"aliasing_operands"')
    if start < 0:
        return None
    result = len(instruction.operands) + part
    for operand, other in _SHARED.findall(instruction.rest, start):
        if int(other) == result and int(operand) < len(instruction.operands):
            return int(operand)
    return None
