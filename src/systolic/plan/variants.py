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


def variants(job: Job, candidate: Candidate) -> Iterator[Candidate]:
    """Neighbours of a candidate, the likeliest gains first."""
    tokens = job.data.fields().get("tokens")
    layout = candidate.layout
    if tokens is not None and Axis.context in job.model.axes():
        sequence = tokens.shape[0]
        for block in BLOCKS:
            if block != layout.attention_block and sequence % block == 0:
                yield replace(candidate, layout=replace(layout, attention_block=block))
    if candidate.flags is DEFAULT:
        for one in sets_for(candidate.on):
            yield replace(candidate, flags=one)
    known = job.model.outline(layout)
    if tokens is not None and known is not None and known.vocab >= WIDE_VOCAB:
        for tiles in TILES:
            if tiles != layout.loss_tiles and tokens.shape[0] % (tiles * layout.context) == 0:
                yield replace(candidate, layout=replace(layout, loss_tiles=tiles))


def together(base: Candidate, helped: Sequence[Candidate]) -> Iterator[Candidate]:
    """One candidate with everything that helped a base by itself, the best last of a kind first kept."""
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
