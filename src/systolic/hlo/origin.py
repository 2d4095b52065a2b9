"""Which instruction with a name in the model an instruction stands for.

The compiler's own ops (copies, fusions that it put together) often carry no metadata; then what they
hold or copy says where in the model they belong.
"""

from systolic.hlo.module import Computation, Instruction, Module

_FOLLOWED = frozenset(
    (
        "copy",
        "copy-start",
        "copy-done",
        "bitcast",
        "slice-start",
        "slice-done",
        "get-tuple-element",
        "pad",
        "fusion",
    )
)
_STEPS = 6
"""Operands followed before it is given up."""


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
        if inner.opcode == "fusion" and (found := _held(module, module.callee(inner, "calls"))):
            return found
    return None
