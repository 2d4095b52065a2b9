"""Trip counts of loops, from the condition, the first value and the step."""

import re

from systolic.hlo.module import Computation, Instruction, Module

_THROUGH = ("copy", "convert", "bitcast", "reshape", "copy-done", "copy-start", "broadcast")
_INT = re.compile(r"-?\d+")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"?(\d+)"?')


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Iterations of a ``while`` of ``caller``; None when they are not known before the run."""
    if known := _KNOWN.search(loop.rest):
        return int(known[1])
    condition, body = module.callee(loop, "condition"), module.callee(loop, "body")
    compared = _compared(module, condition, condition.root)
    if compared is None:
        return None
    direction, left, right = compared
    first = caller.index.get(loop.operands[0])
    counter, limit = left, right
    if left[0] == "constant" and right[0] == "element":
        counter, limit = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if counter[0] != "element":
        return None
    bound = limit[1] if limit[0] == "constant" else _start(caller, first, limit[1])
    start = _start(caller, first, counter[1])
    step = _step(module, body, counter[1])
    if bound is None or start is None or not step:
        return None
    return _turns(direction, start, bound, step)


def _turns(direction: str, start: int, bound: int, step: int) -> int | None:
    """Turns of a counter from ``start`` by ``step`` while it is ``direction`` of ``bound``; None: no end."""
    upwards = step > 0
    span = bound - start
    if direction == "NE":
        return span // step if span % step == 0 and span // step >= 0 else None
    if direction in ("LE", "GE"):
        span += 1 if direction == "LE" else -1
    if direction not in ("LT", "LE", "GT", "GE"):
        return None
    goes_on = span > 0 if direction in ("LT", "LE") else span < 0
    if not goes_on:
        return 0
    if upwards != (direction in ("LT", "LE")):
        return None
    return -(-abs(span) // abs(step))


Side = tuple[str, int]
"""("constant", value) or ("element", index in the loop's tuple)."""


def _compared(
    module: Module, computation: Computation, root: Instruction
) -> tuple[str, Side, Side] | None:
    if root.opcode == "compare":
        sides = [_side(computation, name) for name in root.operands[:2]]
        if sides[0] is None or sides[1] is None:
            return None
        return root.attribute("direction") or "LT", sides[0], sides[1]
    if root.opcode == "fusion":
        inner = module.callee(root, "calls")
        found = _compared(module, inner, inner.root)
        if found is None:
            return None
        direction, *sides = found
        mapped = [_outer(computation, root, side) for side in sides]
        if mapped[0] is None or mapped[1] is None:
            return None
        return direction, mapped[0], mapped[1]
    if root.opcode in _THROUGH:
        return _compared(module, computation, computation[root.operands[0]])
    return None


def _outer(computation: Computation, fusion: Instruction, side: Side) -> Side | None:
    kind, value = side
    return side if kind == "constant" else _side(computation, fusion.operands[value])


def _side(computation: Computation, name: str) -> Side | None:
    """Constant or tuple element that a compared value is; inside a fusion the number of an ``element`` is a parameter's."""
    instruction = computation.index.get(name)
    while instruction is not None and instruction.opcode in _THROUGH:
        instruction = computation.index.get(instruction.operands[0])
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        found = _INT.search(instruction.operands[0])
        return ("constant", int(found[0])) if found else None
    if instruction.opcode == "get-tuple-element":
        return ("element", instruction.tuple_index)
    if instruction.opcode == "parameter":
        return ("element", int(instruction.operands[0]))
    return None


def _start(caller: Computation, first: Instruction | None, index: int) -> int | None:
    """The constant that a loop's tuple starts with at ``index``."""
    if first is None or first.opcode != "tuple" or index >= len(first.operands):
        return None
    side = _side(caller, first.operands[index])
    return side[1] if side is not None and side[0] == "constant" else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """Step that the body adds to element ``index``; None where it is not a plain addition."""
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    new = body.index.get(root.operands[index])
    while new is not None and new.opcode in _THROUGH:
        new = body.index.get(new.operands[0])
    if new is None:
        return None
    if new.opcode == "fusion":
        inner = module.callee(new, "calls")
        return _added(inner, inner.root)
    return _added(body, new)


def _added(computation: Computation, instruction: Instruction) -> int | None:
    if instruction.opcode not in ("add", "subtract"):
        return None
    for name in instruction.operands:
        side = _side(computation, name)
        if side is not None and side[0] == "constant":
            return side[1] if instruction.opcode == "add" else -side[1]
    return None
