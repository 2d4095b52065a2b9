"""Readers of a result, and how much of it they read: that separates another platform's artefacts from work."""

from dataclasses import dataclass, field

from systolic.hlo import Computation, Instruction, Module
from systolic.sim.traffic import bytes_read

_LAYOUT_ONLY = frozenset(("parameter", "copy", "transpose", "bitcast", "reshape"))
_PASSED = ("bitcast", "reshape", "get-tuple-element")
_PRODUCTS = ("dot", "convolution")
_LEAST_BYTES = 65536
"""Size below which the way of reading an array does not matter."""

Reading = tuple[Instruction, Instruction]
"""A reader, and the instruction whose result it reads."""


@dataclass
class OperandReads:
    """Readers of results in a module's computations."""

    module: Module
    known: dict[str, dict[str, list[Instruction]]] = field(default_factory=dict)

    def feeds_products_only(self, computation: Computation, instruction: Instruction) -> bool:
        """Whether an op only reorders an array that only matmuls read."""
        if instruction.opcode == "fusion":
            inner = self.module.callee(instruction, "calls")
            if any(held.opcode not in _LAYOUT_ONLY for held in inner):
                return False
        elif instruction.opcode not in ("copy", "transpose"):
            return False
        readings = self._readings(computation, instruction)
        return bool(readings) and all(self._is_product(reader) for reader, _ in readings)

    def in_parts(self, computation: Computation, made: Instruction, parts: int) -> bool:
        """Whether every reader of a result takes at most one of ``parts`` of each array in it."""
        readings = [
            (reader, source)
            for reader, source in self._readings(computation, made)
            if source.shape.bytes > _LEAST_BYTES
        ]
        return (
            parts > 1
            and bool(readings)
            and all(
                self._bytes(reader, source) <= source.shape.bytes / parts
                for reader, source in readings
            )
        )

    def _bytes(self, reader: Instruction, source: Instruction) -> float:
        size = float(source.shape.bytes)
        if reader.opcode == "dynamic-slice":
            return float(reader.shape.bytes)
        if reader.opcode != "fusion":
            return size
        inner = self.module.callee(reader, "calls")
        read = [
            bytes_read(self.module, inner, parameter, size)
            for name, parameter in zip(reader.operands, inner.parameters, strict=False)
            if name == source.name
        ]
        return max(read, default=size)

    def _is_product(self, instruction: Instruction) -> bool:
        if instruction.opcode in _PRODUCTS:
            return True
        if instruction.opcode == "custom-call":
            return instruction.target.startswith(("__cublas", "__cudnn"))
        if instruction.opcode != "fusion":
            return False
        held = self.module.callee(instruction, "calls")
        return any(inner.opcode in _PRODUCTS for inner in held)

    def _readings(self, computation: Computation, made: Instruction) -> list[Reading]:
        """Readings of a result, through ops that only rename it or take it out of a tuple."""
        users = self._users(computation)
        found: list[Reading] = []
        todo = [made]
        while todo:
            at = todo.pop()
            for user in users.get(at.name, ()):
                if user.opcode in _PASSED:
                    todo.append(user)
                else:
                    found.append((user, at))
        return found

    def _users(self, computation: Computation) -> dict[str, list[Instruction]]:
        if computation.name not in self.known:
            users: dict[str, list[Instruction]] = {}
            for instruction in computation:
                for name in instruction.operands:
                    users.setdefault(name, []).append(instruction)
            self.known[computation.name] = users
        return self.known[computation.name]
