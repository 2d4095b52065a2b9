"""Search space: every layout of a slice that divides the model, the batch and the devices."""

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from systolic.chips import Slice
from systolic.core.errors import LayoutError, SystolicError
from systolic.core.units import plural
from systolic.job import Axis, Job, Layout, Precision, Remat
from systolic.planning.analytic import LOGIT_BYTES
from systolic.planning.candidate import Candidate

LARGEST_TENSOR = 64
"""Most ways to split a matrix; more have not been useful on any published slice."""
LARGEST_PIPELINE = 16
LONG = 16384
"""Tokens from which a sequence is split; shorter ones only where there are fewer rows than devices."""
LARGEST_ACCUMULATE = 64
MOST_LOGITS = 0.1
"""Share of the memory from which logits are also tried in chunks."""
FEW_LOGITS = 0.03
"""Share from which more loss chunks free too little to be tried."""
LOSS_CHUNKS = tuple(2**power for power in range(7))
LARGEST_LOGITS = 1.0
"""Share from which logits are tried in chunks only; the compiler keeps fewer bytes a logit than estimated."""
NAMED: Sequence[tuple[str, ...]] = (
    ("query", "key", "value", "attention", "out"),
    ("query", "key", "value", "attention", "mlp"),
)
"""Sets of activations to keep: all but the MLP's, and all that are not summed into the stream."""
OFFLOADED: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("layer_input",), ()),
    (("layer_input", "query", "key", "value"), ("attention",)),
    (("layer_input", "query", "key", "value"), ()),
    (("layer_input", "query", "key", "value", "out"), ()),
)
"""Pairs of (moved to the host, kept on the device) for the offload policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Freedom:
    """Settings of the job besides its layout that the search may change."""

    batch: bool = False
    """The global batch."""
    precision: bool = False
    """int8, and fp8 where the chip has it."""
    axes: frozenset[Axis] | None = None
    """Mesh axes to use; None for all that the model has."""


class RefusalRule(enum.Enum):
    """Reasons that a layout is no answer, most interesting first; the values are those of a plan's JSON."""

    compiler = "compiler"
    """Compiled, and does not fit or did not compile."""
    goal = "goal"
    """Breaks the deadline or the budget."""
    memory_bound = "memory bound"
    """Weights, optimizer state and layer inputs alone exceed the memory."""
    estimate = "estimate"
    """Estimated slower than the layouts of its slice that are kept."""
    more_memory = "more memory"
    """Keeps at least as much memory as one that did not fit."""
    larger = "larger"
    """A slice with more chips than one that fits, or as many and dearer, where the goal is the smallest."""
    divisibility = "divisibility"
    """No mesh divides the model and the batch."""
    unknown_chip = "unknown chip"
    """The catalogue lacks a rate."""
    not_compiled = "not compiled"
    """Not reached when the search ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Part of the space that was not searched, with the rule.

    One ``candidate``, or a number of ``layouts`` of a slice; all of the slice's where both are None.
    """

    on: Slice
    candidate: Candidate | None = None
    layouts: int | None = None
    rule: RefusalRule
    reason: str
    miss: float | None = None
    """Ratio of the nearest one's figure to the rule's limit; None for rules without a figure."""

    @property
    def count(self) -> int:
        """Number of layouts; 0 for the whole slice."""
        return 1 if self.candidate is not None else self.layouts or 0

    @property
    def layout(self) -> str:
        """``1,204 layouts``, ``all layouts``, or the candidate's text."""
        if self.candidate is not None:
            return self.candidate.text
        return "all layouts" if self.layouts is None else plural(self.layouts, "layout")


def candidates(job: Job, on: Slice, freedom: Freedom) -> Iterator[Candidate]:
    """Every candidate of one slice, in any order.

    The job's own layout is included when it divides.
    """
    own = _own(job, on)
    if own is not None:
        yield own
    sequence = sequence_of(job)
    known = job.model.outline(job.layout)
    vocab = known.vocab if known is not None else 0
    precisions = precisions_of(job, on, freedom)
    for batch in batches(job, on, freedom):
        for mesh in meshes(job, on, freedom, sequence):
            for accumulate in accumulations(batch, mesh):
                plain = replace(mesh, accumulate=accumulate)
                for chunked in _chunked(plain, on, batch, sequence, vocab):
                    for layout in policies(job, chunked, on):
                        for precision in precisions:
                            yield Candidate(on=on, layout=layout, batch=batch, precision=precision)


def check(job: Job, candidate: Candidate) -> str | None:
    """Reason that a candidate's layout does not divide; None when it does."""
    try:
        candidate.job(job).for_slice(candidate.on)
    except SystolicError as error:
        return str(error)
    return None


def _own(job: Job, on: Slice) -> Candidate | None:
    try:
        layout = job.layout.on(on.num_devices, on.num_slices)
        layout.check_slices(on.num_slices)
        batch = job.batch.resolve(layout)
        job.model.check(layout)
    except LayoutError:
        return None
    return Candidate(
        on=on, layout=layout, batch=batch, precision=job.precision.resolve(on.platform)
    )


def meshes(job: Job, on: Slice, freedom: Freedom, sequence: int | None) -> Iterator[Layout]:
    """Definite layouts that differ in their axes only."""
    axes = job.model.axes() if freedom.axes is None else job.model.axes() & freedom.axes
    base = replace(
        job.layout,
        **{axis.value: 1 for axis in Axis},
        accumulate=1,
        slices=Axis.data,
        residual=Layout().residual,
    )
    sizes = {
        Axis.tensor: _divisors(on.num_devices, LARGEST_TENSOR),
        # Within a slice, gathering weights was faster than filling a pipeline on every layout seen.
        Axis.pipeline: _divisors(on.num_devices, LARGEST_PIPELINE) if on.num_slices > 1 else [1],
        Axis.context: _divisors(on.num_devices, on.num_devices)
        if sequence and (sequence >= LONG or global_batch(job, on) < on.num_devices)
        else [1],
        Axis.expert: _divisors(on.num_devices, on.num_devices),
    }
    split = [axis for axis in sizes if axis in axes]
    for ways in itertools.product(*(sizes[axis] for axis in split)):
        # Pipelines with context or expert axes wait in three ways and have no published use.
        chosen = dict(zip(split, ways, strict=True))
        if sum(size > 1 for size in ways) > 2:
            continue
        left, rest = divmod(on.num_devices, math.prod(ways))
        if rest:
            continue
        for fsdp in _divisors(left, left) if Axis.fsdp in axes else [1]:
            data = left // fsdp
            if data > 1 and Axis.data not in axes:
                continue
            layout = replace(
                base, data=data, fsdp=fsdp, **{axis.value: n for axis, n in chosen.items()}
            )
            if _divides(job, layout, sequence):
                yield from _across_slices(layout, on)


def _divides(job: Job, layout: Layout, sequence: int | None) -> bool:
    if sequence is not None and sequence % (layout.context * layout.loss_chunks):
        return False
    try:
        job.model.check(layout)
    except LayoutError:
        return False
    return True


def _across_slices(layout: Layout, on: Slice) -> Iterator[Layout]:
    if on.num_slices == 1:
        yield layout
        return
    for axis in (Axis.data, Axis.fsdp, Axis.pipeline):
        if layout.size(axis) % on.num_slices == 0:
            yield replace(layout, slices=axis)


def policies(job: Job, layout: Layout, on: Slice) -> Iterator[Layout]:
    """The layout with each rematerialisation policy of the model."""
    plain = replace(layout, remat_names=Layout().remat_names, saved_names=())
    for remat in Remat:
        if remat not in job.model.policies():
            continue
        if remat is Remat.offload and on.platform != "tpu":
            continue  # a roofline does not price host transfers
        if remat is Remat.save_names:
            for names in NAMED:
                yield replace(plain, remat=remat, remat_names=names)
        elif remat is Remat.offload:
            for moved, kept in OFFLOADED:
                yield replace(plain, remat=remat, remat_names=moved, saved_names=kept)
        else:
            yield replace(plain, remat=remat)


def _chunked(
    layout: Layout, on: Slice, batch: int, sequence: int | None, vocab: int
) -> Iterator[Layout]:
    """The layout, and with loss chunks too (or only) where logits would fill much of the memory."""
    share = logit_share(layout, on, batch, sequence, vocab)
    if layout.loss_chunks > 1 or share <= MOST_LOGITS:
        yield layout
        return
    if share <= LARGEST_LOGITS:
        yield layout
    several = [n for n in chunks_of(layout, share, sequence) if n > 1]
    enough = [n for n in several if share / n <= MOST_LOGITS]
    for chunks in enough[:1] or several[-1:]:
        yield replace(layout, loss_chunks=chunks)


def logit_share(layout: Layout, on: Slice, batch: int, sequence: int | None, vocab: int) -> float:
    """Share of a device's memory that the logits of one pass take without loss chunks."""
    examples = batch / (layout.batch_ways * layout.accumulate * layout.pipeline)
    tokens = examples * (sequence or 0) / layout.context
    return LOGIT_BYTES * tokens * vocab / layout.tensor / on.program_bytes


def chunks_of(layout: Layout, share: float, sequence: int | None) -> list[int]:
    """Numbers of loss chunks worth a compile: from logits that may fit to logits that hardly count.

    Args:
        layout: The layout; its context axis limits the chunks.
        share: Share of the memory that the logits take in one chunk.
        sequence: Tokens of a row; None where there are none.
    """
    if sequence is None:
        return [1]
    divides = [n for n in LOSS_CHUNKS if sequence % (n * layout.context) == 0]
    small = [n for n in divides if share / n <= FEW_LOGITS]
    last = small[0] if small else divides[-1] if divides else 1
    return [n for n in divides if share / n <= LARGEST_LOGITS and n <= last]


def accumulations(batch: int, layout: Layout) -> list[int]:
    """Numbers of passes that give each device a whole number of examples."""
    per_way, rest = divmod(batch, layout.batch_ways)
    if rest or not per_way:
        return []
    if layout.pipeline > 1:  # a pipeline's microbatches are its passes
        return [1]
    return _divisors(per_way, min(per_way, LARGEST_ACCUMULATE))


def batches(job: Job, on: Slice, freedom: Freedom) -> list[int]:
    """Global batches that the search may choose from."""
    own = global_batch(job, on)
    if not freedom.batch:
        return [own]
    powers = [2**n for n in range(21)]
    return sorted({own, *(n for n in powers if on.num_devices // 4 <= n <= 32 * on.num_devices)})


def global_batch(job: Job, on: Slice) -> int:
    """The job's examples per optimizer step; a batch per device is multiplied by the slice's devices."""
    if job.batch.total is not None:
        return job.batch.total
    return max(1, int((job.batch.per_device or 1) * on.num_devices * job.layout.accumulate))


def precisions_of(job: Job, on: Slice, freedom: Freedom) -> list[Precision]:
    """Precisions that the search may choose from, the job's own first."""
    own = job.precision.resolve(on.platform)
    if not freedom.precision or own not in (Precision.bf16, Precision.f32):
        return [own]
    return list(dict.fromkeys((own, Precision.bf16, *narrower(job, on))))


def narrower(job: Job, on: Slice) -> list[Precision]:
    """int8 and fp8, where the model and the chip support them."""
    known = job.model.matmul_formats() & frozenset(on.chip.native)
    return [precision for precision in (Precision.int8, Precision.fp8) if precision.value in known]


def sequence_of(job: Job) -> int | None:
    """Tokens of a row; None where the data has none."""
    field = job.data.fields().get("tokens")
    return field.shape[0] if field is not None else None


def _divisors(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit) + 1) if number % n == 0]
