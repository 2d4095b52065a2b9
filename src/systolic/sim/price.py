"""Seconds of one op on a TensorCore, and the unit that bounds it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.hlo import Computation, Groups, Instruction, Module
from systolic.hlo.shape import HBM
from systolic.sim.calibration import constant
from systolic.sim.estimate import (
    compute_seconds,
    estimated_seconds,
    matrix_seconds,
    parts_of,
    seconds_by_cycles,
    slowdown_of,
)
from systolic.sim.grouped import grouped_cost
from systolic.sim.incomplete import (
    BYTES,
    FREE_TARGETS,
    HOST_WORK,
    MOVED_TARGETS,
    PALLAS,
    fused_calls,
)
from systolic.sim.kernels import KernelCost, kernel_cost
from systolic.sim.network import CollectiveCost
from systolic.sim.rates import Rates, cores, number_format
from systolic.sim.rules import Ruled, carries_index, ruled
from systolic.sim.timeline import PricedBy, Resource
from systolic.sim.work import Work, window_sizes, work_of

FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "bitcast-convert"}
    | {"partition-id", "replica-id", "after-all", "opt-barrier", "add-dependency"}
    | {"get-dimension-size", "domain", "token"}
)
BOOKKEEPING = ("ragged-dot-metadata",)
"""Beginnings of the names of the compiler's own kernels that compute a few indices."""
FEW_BYTES: int = constant("price.few_bytes")
"""Bytes up to which an op without an estimate is bookkeeping, and, of device memory, an op is one of vector memory."""
SMALL_SECONDS: float = constant("price.small_seconds")
_SAME_PLACE = frozenset(("bitcast", "copy", "convert", "reshape", "transpose", "fusion"))
_CALLED = frozenset(("custom-call", "infeed", "outfeed"))
_ADDRESSED = frozenset(
    {"gather", "scatter", "sort", "reduce-window", "select-and-scatter"}
    | {"fft", "rng-bit-generator", "custom-call"}
)
_STARTS = "ITERATION_SKIPPER_MODE_GROUP_STARTS"
_MODES = (_STARTS, "ITERATION_SKIPPER_MODE_ITERATION_INDICES")
VISITED: float = constant("price.masked_visited")


@dataclass(frozen=True, slots=True)
class OpPrice:
    """Price of one op."""

    seconds: float
    resource: Resource
    by: PricedBy
    flops: float = 0.0
    bytes: float = 0.0
    note: str = ""
    """Assumption behind the price."""
    vector_flops: float = 0.0
    """FLOPs of matmuls on the vector units, besides ``flops``."""
    padding_flops: float = 0.0
    """FLOPs of a convolution's taps on the padding, besides ``flops``."""
    low: float | None = None
    """Least seconds, of a rule; None elsewhere."""
    high: float | None = None
    """Most seconds, likewise."""
    number_format: str = "bf16"
    """Format of the matmul's operands in the matrix units."""
    missing: str = ""
    """Work that the price leaves out of an op that may take longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePrices:
    """A device of a slice, by what its ops, its copies and its collectives cost. Rates in bytes/s, one way."""

    peaks: Mapping[str, float]
    """FLOP/s by number format; ``bf16`` is there."""
    hbm: float
    host: float
    """The link to the host."""
    link: float
    """One link to another device of the slice."""
    turn_seconds: float
    """One turn of a loop beside its ops."""
    price: Callable[[Module, Computation, Instruction, bool], OpPrice | None]
    """Price of an op, as :func:`price` has it; the last argument says whether it is offloaded to a SparseCore."""
    collective: Callable[[str, Groups, float, float], CollectiveCost]
    """Cost of a collective, as :meth:`systolic.sim.network.Network.collective` has it."""
    on_sparse_core: Callable[[CollectiveCost], CollectiveCost]
    """Cost of a collective that one SparseCore runs."""
    between: Callable[[Instruction], float]
    """Rate of each device that takes part in a ``send`` or ``recv`` between slices."""


def price(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    sparse: bool = False,
) -> OpPrice | None:
    """Prices an op, on a SparseCore where ``sparse``; None where it takes no time."""
    opcode = instruction.opcode
    if opcode in FREE or instruction.target in FREE_TARGETS:
        return None
    held = fused_calls(module, instruction)
    if opcode == "fusion" and not held and not instruction.rest.count("estimated_cycles"):
        root = module.callee(instruction, "calls").root
        if root.target in FREE_TARGETS:
            return None
    work = work_of(module, computation, instruction)
    paid = _price(module, computation, instruction, work, (rates, sparse))
    if held:
        return _with_calls(module, computation, instruction, (work, paid, held), rates)
    if not (work.flops or work.vector_flops or work.padding_flops):
        return paid
    return replace(
        paid,
        vector_flops=work.vector_flops,
        padding_flops=work.padding_flops,
        number_format=number_format(work.dtype),
    )


def _price(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    work: Work,
    on: tuple[Rates, bool],
) -> OpPrice:
    opcode, (rates, sparse) = instruction.opcode, on
    matrix = matrix_seconds(work, rates)
    memory = work.bytes / rates.hbm
    if instruction.target == PALLAS:
        return _kernel(module, computation, instruction, work, rates)
    masked = masked_seconds(instruction, rates)
    if masked is not None:
        flops = work.flops * (masked_share(instruction) or 1.0)
        note = f"product {instruction.name}: groups of equal size"
        return OpPrice(masked, Resource.mxu, PricedBy.cycles, flops, work.bytes, note)
    cycles = instruction.cycles
    in_order = streams(module, instruction)
    rule = None if in_order else ruled(module, computation, instruction, work, rates, sparse)
    if cycles is not None and not in_order:
        seconds = cycles / rates.clock_hz
        if (
            rule is not None
        ):  # the compiler's cycles of such an op can leave out its addresses and bytes
            seconds = max(seconds, rule.low)
        return OpPrice(
            seconds, _bound(seconds, matrix, memory), PricedBy.cycles, work.flops, work.bytes
        )
    touched = instruction.shape.padded_bytes + sum(
        shape.padded_bytes for shape in computation.operand_shapes(instruction)
    )
    if rule is not None and (touched > FEW_BYTES or rule.seconds > SMALL_SECONDS):
        return _by_rule(computation, instruction, rule, work)
    if touched <= FEW_BYTES and (opcode != "custom-call" or instruction.target in MOVED_TARGETS):
        return _small(module, computation, instruction, work, rates)
    if opcode in _CALLED:
        by = PricedBy.bytes if instruction.target in MOVED_TARGETS else PricedBy.nothing
        missing = "" if opcode == "custom-call" else HOST_WORK
        return OpPrice(memory, Resource.hbm, by, 0.0, work.bytes, missing=missing)
    parts = parts_of(module, computation, instruction, work, rates, sparse)
    slow = slowdown_of(rates.chip.name)
    if cycles is None:
        seconds, by = (
            estimated_seconds(parts, slow),
            PricedBy.estimate if work.flops else PricedBy.bytes,
        )
    else:
        seconds = seconds_by_cycles(cycles / rates.clock_hz, parts, slow)
        by = PricedBy.cycles if work.flops else PricedBy.bytes
    return OpPrice(seconds, _bound(seconds, matrix, memory), by, work.flops, work.bytes)


def _small(
    module: Module, computation: Computation, instruction: Instruction, work: Work, rates: Rates
) -> OpPrice:
    """Price of an op on few bytes: the latencies of device memory, where they were measured."""
    slow = slowdown_of(rates.chip.name)
    if slow.vector_memory is None:
        return OpPrice(SMALL_SECONDS, Resource.vpu, PricedBy.small, 0.0, work.bytes)
    parts = parts_of(module, computation, instruction, work, rates)
    seconds = max(estimated_seconds(parts, slow), 1 / rates.clock_hz)
    return OpPrice(seconds, Resource.hbm, PricedBy.bytes, 0.0, work.bytes)


def _by_rule(
    computation: Computation, instruction: Instruction, rule: Ruled, work: Work
) -> OpPrice:
    note = ""
    if instruction.opcode == "sort" and carries_index(computation, instruction):
        note = f"{instruction.name} moves an index beside its keys, so that equal ones keep their order: a sort costs what an argsort does; jax.lax.sort(…, is_stable=False) leaves it out"
    resource = Resource.hbm if rule.on_memory else Resource.vpu
    return OpPrice(
        rule.seconds,
        resource,
        rule.by,
        bytes=work.bytes,
        note=note,
        low=rule.low,
        high=rule.high,
    )


def _kernel(
    module: Module,
    computation: Computation,
    call: Instruction,
    work: Work,
    rates: Rates,
) -> OpPrice:
    """Price of a Pallas call; of one that nothing describes that of its bytes."""
    cost = grouped_cost(computation, call, rates) or kernel_cost(module, computation, call, rates)
    memory = work.bytes / rates.hbm
    if cost is not None:
        return OpPrice(
            cost.seconds,
            Resource.mxu,
            PricedBy.kernel,
            cost.flops,
            work.bytes,
            cost.note,
            number_format=cost.number_format,
            missing=cost.missing,
        )
    if call.name.startswith(BOOKKEEPING):
        return OpPrice(max(memory, SMALL_SECONDS), Resource.vpu, PricedBy.small, 0.0, work.bytes)
    return OpPrice(memory, Resource.hbm, PricedBy.nothing, 0.0, work.bytes)


def _with_calls(
    module: Module,
    computation: Computation,
    fusion: Instruction,
    known: tuple[Work, OpPrice, Sequence[tuple[Computation, Instruction]]],
    rates: Rates,
) -> OpPrice:
    """Price of a fusion that holds kernels or custom calls: theirs, and that of the ops around them.

    Args:
        module: The program.
        computation: The one that holds the fusion.
        fusion: The fusion.
        known: Its work, its price without what it holds, and its kernels and calls.
        rates: Of the device.
    """
    work, paid, held = known
    costs = [
        _fused_kernel(module, (computation, fusion), (inner, call), rates) for inner, call in held
    ]
    kernels = [cost for cost in costs if cost is not None]
    missing = BYTES if len(kernels) < len(held) else next((k.missing for k in kernels), "")
    flops = sum(kernel.flops for kernel in kernels)
    paid = replace(
        paid,
        flops=work.flops + flops,
        vector_flops=work.vector_flops,
        padding_flops=work.padding_flops,
        number_format=number_format(work.dtype) if work.flops else "bf16",
    )
    if not kernels:
        return replace(paid, by=PricedBy.nothing, missing=missing)
    parts = parts_of(module, computation, fusion, work, rates)
    slow = slowdown_of(rates.chip.name)
    seconds = sum(kernel.seconds for kernel in kernels) + compute_seconds(parts, slow)
    return replace(
        paid,
        seconds=max(seconds, slow.memory * parts.memory),
        resource=Resource.mxu,
        by=PricedBy.kernel,
        low=None,
        high=None,
        note="; ".join(kernel.note for kernel in kernels if kernel.note),
        number_format=kernels[0].number_format if flops > work.flops else paid.number_format,
        missing=missing,
    )


def _fused_kernel(
    module: Module,
    outside: tuple[Computation, Instruction],
    inside: tuple[Computation, Instruction],
    rates: Rates,
) -> KernelCost | None:
    """Cost of a kernel in a fusion; None for another call, and for a kernel that nothing describes."""
    (computation, fusion), (inner, call) = outside, inside
    if call.target != PALLAS:
        return None
    parameters = module.callee(fusion, "calls").parameters
    operand_of = dict(
        zip([parameter.name for parameter in parameters], fusion.operands, strict=False)
    )

    def near(name: str) -> bool:
        """Whether an operand lies in vector memory, or is made on the way to the kernel."""
        at = inner.index.get(name)
        while at is not None and at.opcode in _SAME_PLACE and at.operands:
            at = inner.index.get(at.operands[0])
        if at is None or at.opcode != "parameter" or at.name not in operand_of:
            return at is not None and not at.shape.bytes_in(HBM)
        source = computation.index.get(operand_of[at.name], at)
        return not source.shape.bytes_in(HBM)

    in_vmem = [*map(near, call.operands), not fusion.shape.bytes_in(HBM)]
    return grouped_cost(inner, call, rates) or kernel_cost(module, inner, call, rates, in_vmem)


def streams(module: Module, instruction: Instruction) -> bool:
    """Whether an op passes over its data in order; gathers, scatters and sorts do not."""
    if instruction.opcode == "reduce-window":
        return covers(instruction)
    if instruction.opcode != "fusion":
        return instruction.opcode not in _ADDRESSED
    held = module.callee(instruction, "calls")
    return all(streams(module, inner) for inner in held)


def covers(window: Instruction) -> bool:
    """Whether each result of a reduce-window is of a whole row: a reduction that is broadcast again.

    The compiler writes a sum that all elements of the row subtract in this way.
    """
    sizes = window_sizes(window)
    dims = window.shape.dims
    return len(sizes) == len(dims) and all(
        size == 1 or size >= 2 * dim - 1 for size, dim in zip(sizes, dims, strict=True)
    )


def _bound(seconds: float, matrix: float, memory: float) -> Resource:
    """The unit that is busy for most of it; the vector units when neither other one is for a third."""
    if max(matrix, memory) < seconds / 3:
        return Resource.vpu
    return Resource.mxu if matrix >= memory else Resource.hbm


def masked_share(instruction: Instruction) -> float | None:
    """Share of the steps that are left; None where a mask leaves no step out.

    Groups are taken to be equal, and to begin inside a tile of rows.
    """
    skipped = _skipped(instruction)
    if skipped is None:
        return None
    mode, groups, tiles = skipped
    return (tiles + groups - 1) / (tiles * groups) if mode == _STARTS else 1.0


def masked_seconds(instruction: Instruction, rates: Rates) -> float | None:
    """Seconds by the compiler's cycles for all steps; None for any other op."""
    share, cycles = masked_share(instruction), instruction.cycles
    if share is None or cycles is None:
        return None
    seconds = cycles / rates.clock_hz
    if share < 1.0:
        return VISITED * share * seconds
    bounds = _bounds(instruction)
    split = instruction.config.get("megacore_config", {}).get("megacore_split_dim")
    # The cycles are those of both cores; a dim of one step leaves one of them idle.
    alone = split is not None and abs(int(split)) < len(bounds) and bounds[int(split)] == 1
    return seconds * (cores(rates) if alone else 1)


def _skipped(instruction: Instruction) -> tuple[str, int, int] | None:
    """The mode, and steps over groups and over tiles of rows."""
    mask: Mapping[str, Any] = instruction.config.get("mask_aggregator_config", {})
    mode, dims = mask.get("iteration_skipper_mode"), mask.get("mask_dim_to_iteration_index", [])
    bounds = _bounds(instruction)
    if mode not in _MODES or len(dims) != 2 or max(int(dim) for dim in dims) >= len(bounds):
        return None
    groups, tiles = (bounds[int(dim)] for dim in dims)
    return mode, groups, tiles


def _bounds(instruction: Instruction) -> list[int]:
    """Steps along each dim of an op's loop."""
    window = instruction.config.get("window_config", {})
    return [int(size) for size in window.get("iteration_bounds", [])]
