"""Fusions that begin, carry on or end a collective beside the compute that hides it."""

import enum
import math
from collections.abc import Container, Sequence

from systolic.hlo import Computation, Instruction, Module
from systolic.hlo.groups import COLLECTIVES
from systolic.hlo.module import aliased_operand
from systolic.hlo.shape import SEMAPHORE
from systolic.sim.calibration import constant
from systolic.sim.timeline import PricedBy, Resource, Span

CARRIED: float = constant("asynchronous.carried")
SHARE_PER_DOUBLING: float = constant("asynchronous.share_per_doubling")


class Role(enum.Enum):
    """Roles of a fusion in a collective."""

    none = enum.auto()
    """Compute, perhaps with a collective under way."""
    begin = enum.auto()
    end = enum.auto()
    whole = enum.auto()
    """The collective and its compute, the core waiting."""


def role_of(module: Module, fusion: Instruction) -> Role:
    """Role of a fusion in the collective that it holds."""
    held = module.callee(fusion, "calls")
    targets = {i.target for i in held if i.opcode == "custom-call"}
    if "AsyncCollectiveDone" in targets:
        return Role.end
    if not any(i.opcode in COLLECTIVES for i in held):
        return Role.none
    if "AsyncCollectiveStart" in targets:
        return Role.begin
    # Compute beside a collective that is under way repeats the collective's op. It takes in and
    # hands on the semaphores that the start made and the done waits for, also where the start is
    # outside of the loop that this is in.
    spaces = {shape.space for parameter in held.parameters for shape in parameter.shape.arrays()}
    return Role.none if SEMAPHORE in spaces else Role.whole


def kind_of(held: Computation, collective: Instruction) -> str:
    """Kind of a collective on the links: an all-reduce of which a fusion keeps a slice is a reduce-scatter.

    libtpu prints its reduce-scatters so; the emitter of such a fusion is ``AllReduceScatterFusion``.
    """
    kind = collective.opcode.removesuffix("-start")
    if kind != "all-reduce":
        return kind
    results = {collective.name}
    for op in held:
        if op.opcode in ("get-tuple-element", "bitcast") and op.operands[0] in results:
            results.add(op.name)
    users = [user for user in held if results & set(user.operands) and user.name not in results]
    sliced = users and all(user.opcode == "dynamic-slice" for user in users)
    return "reduce-scatter" if sliced else kind


def asked_as_reduce_scatter(module: Module, held: Computation, collective: Instruction) -> bool:
    """Whether an all-reduce of which each device keeps a slice stands where the program has a reduce-scatter.

    The compiler runs one so where its fusion of both does not fit: over many chips, and where a slice of the fastest dim
    would be narrower than 512 bytes.
    """
    if collective.opcode.removesuffix("-start") != "all-reduce":
        return False
    results = {collective.name}
    users = []
    for op in held:
        if not results & set(op.operands):
            continue
        if op.opcode in ("get-tuple-element", "bitcast", "copy") or op.opcode.endswith("-done"):
            results.add(op.name)
        else:
            users.append(op)
    return bool(users) and all(_slices(module, user) for user in users)


def _slices(module: Module, user: Instruction) -> bool:
    if user.opcode == "fusion":
        return module.callee(user, "calls").root.opcode == "dynamic-slice"
    return user.opcode == "dynamic-slice"


def collective_in(module: Module, held: Computation) -> tuple[Instruction, Computation] | None:
    """The collective that an asynchronous computation runs, with where it is; SparseCores' lie in a call."""
    for instruction in held:
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return instruction, held
        if instruction.opcode == "call":
            inner = collective_in(module, module.callee(instruction, "to_apply"))
            if inner is not None:
                return inner
    return None


def on_one_sparse_core(collective: Instruction) -> bool:
    """Whether the compiler offloads it to a single SparseCore."""
    if "use_single_sparse_core" not in collective.rest:
        return False
    offloads = collective.config.get("collective_offload_config", {})
    return any(
        isinstance(of, dict) and of.get("use_single_sparse_core") for of in offloads.values()
    )


def edge_seconds(seconds: float, steps: int) -> float:
    """Least seconds of the fusion that begins a gather, and of the one that ends it: one step of the ring each.

    Compute carries the steps between. Chips spend in these fusions what does not shrink when compute grows: Qwen3 8B
    on 2 x 4 v6e chips 67 ms a step with 8,192 tokens a chip, of gathers that take the links 150 ms in four steps
    (vlasenkoalexey/tpu_performance_autoresearch_wiki, "custom fusion").

    Args:
        seconds: The gather alone.
        steps: Of its ring, one after the other.
    """
    return min(seconds / steps, seconds * (1 - CARRIED) / 2)


def started(computation: Computation, name: str, pending: Container[str]) -> str | None:
    """Name of the pending ``-start`` whose state an operand carries; None where it carries none."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        if at in pending:
            return at
        if (instruction := computation.index.get(at)) is not None:
            todo.extend(_handed_on(computation, instruction, pending))
    return None


def _handed_on(
    computation: Computation, instruction: Instruction, pending: Container[str]
) -> Sequence[str]:
    """Names of what the value of an instruction is handed on from."""
    if instruction.opcode in ("tuple", "bitcast", "copy", "async-update"):
        return instruction.operands
    if instruction.opcode != "get-tuple-element":
        return ()
    part, source = instruction.tuple_index, computation.index.get(instruction.operands[0])
    if source is not None and source.opcode == "while":
        # What a loop hands out at a place, it takes in at that place.
        source = computation.index.get(source.operands[0])
    if source is None:
        return ()
    if source.opcode == "tuple":
        return source.operands[part : part + 1]
    if source.opcode == "fusion" and source.name not in pending:
        # A fusion between start and done hands the state on, an operand to a result.
        passed = aliased_operand(source, part)
        return () if passed is None else source.operands[passed : passed + 1]
    return (source.name,)


def wait_for_slices(seconds: float, num_slices: int) -> float:
    """Seconds that a step of ``seconds`` waits for the slowest of the slices that it exchanges with."""
    return SHARE_PER_DOUBLING * math.log2(num_slices) * seconds


def slowest_slice(start: float, seconds: float) -> Span:
    """The wait for the slowest slice, at the end of a step."""
    return Span(
        name="slowest-slice",
        opcode="wait slices",
        start=start,
        seconds=seconds,
        resource=Resource.dcn,
        priced_by=PricedBy.allowance,
    )
