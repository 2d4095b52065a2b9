"""Neighbours of a compiled candidate: what a local search tries next, each with all that must change with it.

A change of one setting alone often does not fit or does not divide: fewer passes need more loss chunks, another mesh
another number of passes. A neighbour therefore differs in up to two of mesh, passes and rematerialisation, with any
number of loss chunks, or in one of the settings that the analytic model can't tell apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from systolic.job import Layout
from systolic.job.layout import Group
from systolic.planning.candidate import Candidate
from systolic.planning.change import ChangedPart
from systolic.planning.facts import Facts
from systolic.planning.space import (
    Freedom,
    accumulations,
    batches,
    chunks_of,
    logit_share,
    meshes,
    policies,
    precisions_of,
    sequence_of,
)
from systolic.planning.variants import changes

MOST_CHANGES = 2
"""Most of mesh, passes and rematerialisation that a neighbour changes."""

Kind = frozenset[Group | ChangedPart]
"""Parts of a candidate that a neighbour changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A candidate near another."""

    candidate: Candidate
    kind: Kind
    estimated: bool
    """Whether the analytic model knows the effect of what it changes."""


def neighbours(facts: Facts, base: Candidate, freedom: Freedom, tight: bool) -> list[Neighbour]:
    """Neighbours of a candidate, each once, without the candidate itself.

    Args:
        facts: Facts of the job.
        base: A candidate with a definite layout.
        freedom: What may change besides the layout.
        tight: Whether its memory is nearly full.
    """
    found: dict[Candidate, Neighbour] = {}
    for one in (*_estimated(facts, base, freedom), *_others(facts, base, freedom, tight)):
        if one.candidate != base:
            found.setdefault(one.candidate, one)
    return list(found.values())


def _others(facts: Facts, base: Candidate, freedom: Freedom, tight: bool) -> Iterator[Neighbour]:
    job = facts.job
    for change in changes(job, base, tight):
        known = change.touches <= {Group.passes, Group.loss}
        yield Neighbour(candidate=change.on(base), kind=change.touches, estimated=known)
    for precision in precisions_of(job, base.on, freedom) if freedom.precision else ():
        part: Kind = frozenset((ChangedPart.precision,))
        yield Neighbour(candidate=replace(base, precision=precision), kind=part, estimated=True)


def _estimated(facts: Facts, base: Candidate, freedom: Freedom) -> Iterator[Neighbour]:
    """Other meshes, passes and policies, with the loss chunks that their logits need."""
    job, on, now = facts.job, base.on, base.layout
    sequence = sequence_of(job)
    vocab = facts.outline(now).vocab if sequence else 0
    near = {base.batch // 2, base.batch, 2 * base.batch} & {*batches(job, on, freedom)}
    for batch in sorted(near | {base.batch}):
        for mesh in dict.fromkeys((_mesh_of(now), *meshes(job, on, freedom, sequence))):
            mesh = mesh.take(now, Group.attention, Group.placement, Group.residual, Group.remat)
            moved = mesh.take(now, Group.passes, Group.loss) != now
            for accumulate in accumulations(batch, mesh):
                passes = replace(mesh, accumulate=accumulate, microbatches=now.microbatches)
                changed = moved + (accumulate != now.accumulate)
                if changed > MOST_CHANGES:
                    continue
                share = logit_share(passes, on, batch, sequence, vocab)
                for policy in _policies(facts, passes, base, changed):
                    for chunks in _chunks(policy, now, share, sequence, job.layout):
                        layout = replace(policy, loss_chunks=chunks)
                        yield Neighbour(
                            candidate=replace(base, layout=layout, batch=batch),
                            kind=_kind(now, layout, batch != base.batch),
                            estimated=True,
                        )


def _mesh_of(layout: Layout) -> Layout:
    return replace(Layout().take(layout, Group.mesh), residual=layout.residual)


def _policies(facts: Facts, layout: Layout, base: Candidate, changed: int) -> Iterator[Layout]:
    yield layout
    if changed < MOST_CHANGES:
        yield from (one for one in policies(facts.job, layout, base.on) if one != layout)


def _chunks(
    layout: Layout, now: Layout, share: float, sequence: int | None, own: Layout
) -> list[int]:
    """Loss chunks to try: the present ones, those that the logits need, and the job's own."""
    if sequence is None:
        return [now.loss_chunks]
    found = [*chunks_of(layout, share, sequence), now.loss_chunks, own.loss_chunks]
    return [n for n in dict.fromkeys(found) if sequence % (n * layout.context) == 0]


def _kind(now: Layout, then: Layout, rebatched: bool) -> Kind:
    groups = (Group.mesh, Group.passes, Group.remat, Group.loss)
    found: set[Group | ChangedPart] = {one for one in groups if now.differs(then, one)}
    # What the logits need is no decision of its own.
    kept = found - {Group.loss} or found
    return frozenset((*kept, *([ChangedPart.batch] if rebatched else [])))
