"""Settings that change little but speed, tried on the best layouts only: attention blocks, loss tiles, flags."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from systolic.job import Axis, Job
from systolic.plan.candidate import Candidate
from systolic.plan.flags import DEFAULT, sets_for

BLOCKS = (1024, 2048)
TILES = (4, 8)
WIDE_VOCAB = 65536
"""A vocabulary whose logits are worth cutting."""


def variants(job: Job, candidate: Candidate, tight: bool = True) -> Iterator[Candidate]:
    """Neighbours of a candidate, the likeliest gains first.

    ``tight`` says that memory is short: loss tiles save it and cost time.
    """
    tokens = job.data.fields().get("tokens")
    layout = candidate.layout
    flags = sets_for(candidate.on) if candidate.flags is DEFAULT else []
    blocks = []
    if tokens is not None and Axis.context in job.model.axes():
        sequence = tokens.shape[0]
        blocks = [b for b in BLOCKS if b != layout.attention_block and sequence % b == 0]
    for index in range(max(len(flags), len(blocks))):
        if index < len(flags):
            yield replace(candidate, flags=flags[index])
        if index < len(blocks):
            yield replace(candidate, layout=replace(layout, attention_block=blocks[index]))
    known = job.model.outline(layout)
    if tight and tokens is not None and known is not None and known.vocab >= WIDE_VOCAB:
        for tiles in TILES:
            if tiles != layout.loss_tiles and tokens.shape[0] % (tiles * layout.context) == 0:
                yield replace(candidate, layout=replace(layout, loss_tiles=tiles))


def together(base: Candidate, helped: Sequence[Candidate]) -> Iterator[Candidate]:
    """One candidate with everything that helped a base by itself; of a kind, the first in ``helped``."""
    layout, flags = base.layout, base.flags
    for one in helped:
        if layout.attention_block == base.layout.attention_block:
            layout = replace(layout, attention_block=one.layout.attention_block)
        if layout.loss_tiles == base.layout.loss_tiles:
            layout = replace(layout, loss_tiles=one.layout.loss_tiles)
        if flags is base.flags:
            flags = one.flags
    if len(helped) > 1:
        yield replace(base, layout=layout, flags=flags)


def like(leader: Candidate, one: Candidate) -> Candidate:
    """A candidate with the flags, attention blocks and loss tiles of another."""
    layout = replace(
        one.layout,
        attention_block=leader.layout.attention_block,
        loss_tiles=leader.layout.loss_tiles,
    )
    return replace(one, layout=layout, flags=leader.flags)
