"""Settings that change little but speed, tried on the best layouts only: attention blocks, loss tiles, flags, places on the torus."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from systolic.job import Axis, Job, Placement, Remat, Residual
from systolic.plan.candidate import Candidate
from systolic.plan.flags import DEFAULT, FlagSet, joined, sets_for

BLOCKS = (1024, 2048)
TILES = (4, 8)
WIDE_VOCAB = 65536
"""A vocabulary whose logits are worth cutting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting of any candidate; flags come on top of those that it has."""

    flags: FlagSet = DEFAULT
    attention_block: int = 0
    loss_tiles: int = 0
    placement: Placement | None = None
    residual: Residual | None = None

    def on(self, candidate: Candidate) -> Candidate:
        """The candidate with it."""
        layout = candidate.layout
        if self.attention_block:
            layout = replace(layout, attention_block=self.attention_block)
        if self.loss_tiles:
            layout = replace(layout, loss_tiles=self.loss_tiles)
        if self.placement is not None:
            layout = replace(layout, placement=self.placement)
        if self.residual is not None:
            layout = replace(layout, residual=self.residual)
        return replace(candidate, layout=layout, flags=joined(candidate.flags, self.flags))


def changes(job: Job, candidate: Candidate, tight: bool = True) -> list[Change]:
    """What is worth trying on a candidate, the likeliest gains first.

    ``tight`` says that memory is short: loss tiles save it and cost time.
    """
    tokens = job.data.fields().get("tokens")
    layout = candidate.layout
    flags = [
        Change(flags=one)
        for one in sets_for(
            candidate.on, layout.remat is Remat.offload, candidate.flags, candidate.base
        )
    ]
    blocks: list[Change] = []
    if candidate.on.platform == "tpu" and tokens is not None and Axis.context in job.model.axes():
        sequence = tokens.shape[0]
        sizes = [b for b in BLOCKS if b != layout.attention_block and sequence % b == 0]
        blocks = [Change(attention_block=b) for b in sizes]
    found = [Change(placement=Placement.blocks)] if _breaks_lines(candidate) else []
    found += [Change(residual=one) for one in _splits(job, candidate, tight)]
    for index in range(max(len(flags), len(blocks))):
        found += [*flags[index : index + 1], *blocks[index : index + 1]]
    known = job.model.outline(layout)
    if tight and tokens is not None and known is not None and known.vocab >= WIDE_VOCAB:
        now = layout.loss_tiles
        for tiles in TILES if now == 1 else (2 * now, now // 2):
            if tiles > 1 and tokens.shape[0] % (tiles * layout.context) == 0:
                found.append(Change(loss_tiles=tiles))
    return found


def _splits(job: Job, candidate: Candidate, tight: bool) -> list[Residual]:
    """Other ways in which the tensor axis may hold the residual stream; whole only where memory is not short."""
    layout = candidate.layout
    if layout.tensor == 1 or job.model.outline(layout) is None:
        return []
    ways = [Residual.sequence, Residual.embed] + ([] if tight else [Residual.whole])
    return [one for one in ways if one is not layout.residual]


def _breaks_lines(candidate: Candidate) -> bool:
    """Whether the innermost axis would be a block where it is a part of a ring: JAX's order of axes leaves it one."""
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


def together(base: Candidate, helped: Sequence[Change]) -> Candidate:
    """A base with everything that helped it by itself; of a kind, the first in ``helped`` has its way."""
    for one in reversed(helped):
        base = one.on(base)
    return base


def like(leader: Candidate, one: Candidate) -> Candidate:
    """A candidate with the flags (where its chip takes them), attention blocks, loss tiles, placement and split of the residual stream of another."""
    flags = leader.flags
    if flags is not DEFAULT and one.on.chip.name not in flags.generations:
        flags = one.flags
    layout = replace(
        one.layout,
        placement=leader.layout.placement,
        residual=leader.layout.residual,
        attention_block=leader.layout.attention_block,
        loss_tiles=leader.layout.loss_tiles,
    )
    return replace(one, layout=layout, flags=flags)
