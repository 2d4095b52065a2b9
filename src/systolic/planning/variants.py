"""Settings tried on the best layouts only: attention blocks, loss chunks, flags, placement on the torus."""

import itertools
import math
from dataclasses import replace

from systolic.job import Axis, Job, Placement, Remat, Residual
from systolic.job.layout import Group
from systolic.planning.candidate import DEFAULT, Candidate, Change, layout_change, sets_for

BLOCKS = (1024, 2048)
TILES = (4, 8)
WIDE_VOCAB = 65536
"""Vocabulary size from which loss chunks are tried."""


def changes(job: Job, candidate: Candidate, tight: bool = True) -> list[Change]:
    """Changes to try on a candidate, the likeliest gains first.

    With ``tight`` memory is short: more loss chunks and passes save memory and cost time.
    """
    tokens = job.data.fields().get("tokens")
    layout = candidate.layout
    known = job.model.outline(layout)
    flags = [
        Change(flags=flag_set)
        for flag_set in sets_for(
            candidate.on, layout.remat is Remat.offload, candidate.flags, candidate.base
        )
    ]
    blocks: list[Change] = []
    if candidate.on.platform == "tpu" and tokens is not None and Axis.context in job.model.axes():
        sequence = tokens.shape[0]
        sizes = [b for b in BLOCKS if b != layout.attention_block and sequence % b == 0]
        blocks = [layout_change(attention_block=b) for b in sizes]
    wanted = [layout_change(placement=Placement.blocks)] if _breaks_lines(candidate) else []
    wanted += [layout_change(residual=split) for split in _splits(job, candidate, tight)]
    if not tight and (fewer := _fewer_passes(candidate)):
        wanted.append(layout_change(accumulate=fewer))
    for index in range(max(len(flags), len(blocks))):
        wanted += [*flags[index : index + 1], *blocks[index : index + 1]]
    if tokens is not None and known is not None and known.vocab >= WIDE_VOCAB:
        for chunks in _chunks(layout.loss_chunks, tight):
            if tokens.shape[0] % (chunks * layout.context) == 0:
                wanted.append(layout_change(loss_chunks=chunks))
    return wanted


def _chunks(now: int, tight: bool) -> list[int]:
    """Other numbers of loss chunks: fewer, which recompute fewer logits, and more where memory is short."""
    if now == 1:
        return list(TILES) if tight else []
    fewer = list(dict.fromkeys((max(now // 2, 1), max(now // 4, 1))))
    return [*fewer, 2 * now] if tight else fewer


def _fewer_passes(candidate: Candidate) -> int:
    """The next smaller number of passes that gives each device whole examples; 0 where there is none."""
    layout = candidate.layout
    if layout.accumulate == 1 or candidate.batch % layout.batch_ways:
        return 0
    rows = candidate.batch // layout.batch_ways
    return next(n for n in range(layout.accumulate - 1, 0, -1) if rows % n == 0)


def _splits(job: Job, candidate: Candidate, tight: bool) -> list[Residual]:
    """Other splits of the residual stream over the tensor axis; whole only where memory is not short."""
    layout = candidate.layout
    if layout.tensor == 1 or job.model.outline(layout) is None:
        return []
    ways = [Residual.sequence, Residual.embed] + ([] if tight else [Residual.whole])
    return [way for way in ways if way is not layout.residual]


def _breaks_lines(candidate: Candidate) -> bool:
    """Whether JAX's order of axes makes the innermost axis a part of a ring, where a block is possible."""
    on, layout = candidate.on, candidate.layout
    if on.platform != "tpu" or layout.placement is not Placement.lines:
        return False
    crossing = layout.slices if on.num_slices > 1 else None
    inner = [
        layout.size(axis) // (on.num_slices if axis is crossing else 1) for axis in reversed(Axis)
    ]
    ways = next((size for size in inner if size > 1), 1) // (on.chip.devices_per_chip or 1)
    whole = {math.prod(some) for n in (1, 2, 3) for some in itertools.combinations(on.topology, n)}
    return ways >= 4 and ways not in whole


def like(leader: Candidate, candidate: Candidate) -> Candidate:
    """The candidate with the leader's attention blocks, loss chunks, placement, residual split, and flags that its chip takes."""
    flags = leader.flags
    if flags is not DEFAULT and candidate.on.chip.name not in flags.generations:
        flags = candidate.flags
    layout = candidate.layout.take(
        leader.layout, Group.placement, Group.residual, Group.attention, Group.loss
    )
    return replace(candidate, layout=layout, flags=flags)
