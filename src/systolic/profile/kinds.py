"""Kinds of op in a profile: what costs its time, by its line, its category and where it moves bytes."""

import enum
import re

from systolic.hlo.groups import COLLECTIVES
from systolic.profile.line import OpLine
from systolic.profile.traffic import OpTraffic
from systolic.sim.cost_kinds import FORMATTING

CONTAINERS = ("while", "conditional", "call")
COPIES = FORMATTING
GPU_COLLECTIVES = ("nccl", "rccl")
"""Beginnings of the names of kernels that move data between GPUs."""
TRANSFERS = ("memcpyh2d", "memcpyd2h", "host-transfer", "infeed", "outfeed")
_COPY = re.compile(r"(copy|transpose)")
_CALLBACK = re.compile(r"callback", re.I)
_ASYNC = ("copy-start", "copy-done", "async-start", "async-done")
_LIBRARIES = ("__cublas", "__cudnn", "__hip")
"""Custom calls of a GPU's libraries of matmuls."""
_MATRIX = ("convolution", "dot")
_COLLECTIVE_NAMES = (*COLLECTIVES, "async-collective")


class Activity(enum.Enum):
    """Kinds of op, as ``shares`` and tables name them."""

    matmul = "matmuls"
    kernel = "custom kernels"
    """Pallas and other custom calls, opaque to the compiler."""
    collective = "collectives"
    slices = "other slices"
    """Over the network between slices."""
    host = "host transfers"
    """Between the device's memory and the host's."""
    memory = "copies between memories"
    """Asynchronous copies of one device."""
    formatting = "data formatting"
    """Copies, transposes and reshapes: another layout of the same array."""
    callback = "callbacks"
    loop = "loops"
    """Holds other ops."""
    other = "other ops"
    """Elementwise, reductions, gathers, sorts."""


def kind_of(
    name: str, opcode: str, category: str, line: OpLine | None, target: str, traffic: OpTraffic
) -> Activity:
    """The kind of an op.

    Args:
        name: The instruction's, or a GPU's kernel's.
        opcode: Of the instruction; empty where it is not known.
        category: ``hlo_category`` of the profile.
        line: Its HLO line.
        target: Of a custom call.
        traffic: Where it moves bytes.
    """
    kind, folded = f"{opcode} {category}".lower(), name.lower()
    if opcode in CONTAINERS or category in CONTAINERS:
        return Activity.loop
    if _CALLBACK.search(f"{target} {name}"):
        return Activity.callback
    if any(collective in kind for collective in COLLECTIVES) or folded.startswith(GPU_COLLECTIVES):
        return Activity.collective
    if opcode in ("fusion", "async-start", "async-done") and folded.startswith(_COLLECTIVE_NAMES):
        return Activity.collective
    if opcode.startswith(("send", "recv")):
        to_host = "host" in kind or (line is not None and "is_host_transfer=true" in line.rest)
        return Activity.host if to_host else Activity.slices
    if traffic.host or any(transfer in f"{kind} {folded}" for transfer in TRANSFERS):
        return Activity.host
    if opcode == "custom-call":
        return Activity.matmul if target.startswith(_LIBRARIES) else Activity.kernel
    if opcode in _ASYNC:
        return Activity.memory
    return _of_core(name, opcode, category)


def _of_core(name: str, opcode: str, category: str) -> Activity:
    """The kind of an op that computes on the core, without what its work tells."""
    if opcode in COPIES or category == "data formatting":
        return Activity.formatting
    if any(word in f"{opcode} {category}" for word in _MATRIX):
        return Activity.matmul
    if opcode in ("fusion", "") and _COPY.match(name):
        return Activity.formatting
    return Activity.other
