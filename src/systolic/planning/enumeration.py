"""Survey before any compile: analyses every layout of every slice and refuses impossible ones with figures.

Neighbours of a compiled candidate: what a local search tries next, each with all that must change with it.

A change of one setting alone often does not fit or does not divide: fewer passes need more loss chunks, another mesh
another number of passes. A neighbour therefore differs in up to two of mesh, passes and rematerialisation, with any
number of loss chunks, or in one of the settings that the analytic model can't tell apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from systolic.chips import Slice
from systolic.core.errors import NotFoundError, SystolicError
from systolic.core.units import duration, gibibytes, plural
from systolic.job import Layout
from systolic.job.layout import Group
from systolic.planning.analytic import Facts, analyse, capacity
from systolic.planning.candidate import Candidate, ChangedPart
from systolic.planning.scoring import Judge, Ranked
from systolic.planning.space import (
    Freedom,
    RefusalRule,
    Refused,
    accumulations,
    batches,
    candidates,
    chunks_of,
    global_batch,
    logit_share,
    meshes,
    policies,
    precisions_of,
    sequence_of,
)
from systolic.planning.variants import changes

KEEP = 300
"""Fewest layouts of a slice that are kept, by their estimates."""
KEEP_ALL = 6000
"""Layouts of all slices that are kept where there are fewer than this over :data:`KEEP` slices."""


@dataclass
class Survey:
    """Survey of the search space: candidates to compile in ``queue``, the others in ``refused``."""

    judge: Judge
    freedom: Freedom
    base: Callable[[Slice], tuple[str, ...]] = lambda _: ()
    """Compiler flags of all candidates on a slice."""
    only: Sequence[Candidate] | None = None
    queue: list[Ranked] = field(default_factory=list)
    left: list[Ranked] = field(default_factory=list)
    """The next :data:`KEEP` of each slice, which the search does not look at."""
    refused: list[Refused] = field(default_factory=list)
    searched: int = 0

    def analyse_all(self, slices: Iterable[Slice], begin: Callable[[Slice], None]) -> None:
        """Analyses every layout of every slice; calls ``begin`` with each slice first."""
        slices = list(slices)
        most = max(KEEP, KEEP_ALL // max(len(slices), 1))
        for on in slices:
            begin(on)
            try:
                kept = list(self._possible(on))
            except (NotFoundError, SystolicError) as error:
                self._refuse(on, None, RefusalRule.unknown_chip, str(error))
                continue
            kept.sort(key=self.judge.estimated)
            self.queue += kept[:most]
            self.left += kept[most : most + KEEP]
            if len(kept) > most:
                last = duration(kept[most].analysis.seconds_estimate)
                self._refuse(
                    on,
                    len(kept) - most,
                    RefusalRule.estimate,
                    f"estimated at {last} a step or more, slower than {plural(most, 'other')} of the slice; an estimate and no bound",
                )

    def _possible(self, on: Slice) -> Iterator[Ranked]:
        have = capacity(on)
        over: Counter[RefusalRule] = Counter()
        least: dict[RefusalRule, tuple[float, str]] = {}
        """Rule to the ratio of its nearest miss to the limit, and the message."""
        seen = set()
        base = self.base(on)
        space = (replace(c, base=base) for c in candidates(self.judge.facts.job, on, self.freedom))
        if self.only is not None:
            space = (candidate for candidate in self.only if candidate.on == on)
        for candidate in space:
            if candidate in seen:
                continue
            seen.add(candidate)
            self.searched += 1
            analysis = analyse(self.judge.facts, candidate)
            rule, miss, text = None, 0.0, ""
            if analysis.bytes_bound > have:
                rule, miss = RefusalRule.memory_bound, analysis.bytes_bound / have
                text = f"weights, optimizer state and layer inputs alone need at least {gibibytes(analysis.bytes_bound)} of {gibibytes(have)}"
            elif problem := self.judge.broken(candidate, analysis.seconds_bound):
                total = self.judge.total(candidate, analysis.seconds_bound)
                rule, miss = RefusalRule.goal, self.judge.goal.excess(total)
                text = f"at the chip's peak rate it {problem}"
            if rule is None:
                yield Ranked(candidate=candidate, analysis=analysis)
                continue
            over[rule] += 1
            if rule not in least or miss < least[rule][0]:
                least[rule] = (miss, f"{text} (nearest: {candidate.text})")
        for rule, number in over.items():
            miss, text = least[rule]
            self._refuse(on, number, rule, text, miss)
        if not seen:
            batch = global_batch(self.judge.facts.job, on)
            self._refuse(
                on,
                None,
                RefusalRule.divisibility,
                f"no mesh of {plural(on.num_devices, 'device')} divides the model and a batch of {batch}; change the batch, or let the search choose it with --free batch",
            )

    def _refuse(
        self,
        on: Slice,
        layouts: int | None,
        rule: RefusalRule,
        reason: str,
        miss: float | None = None,
    ) -> None:
        """Records layouts of a slice (all with None) that are not searched."""
        refused = Refused(on=on, layouts=layouts, rule=rule, reason=reason, miss=miss)
        self.refused.append(refused)


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
    unique: dict[Candidate, Neighbour] = {}
    for neighbour in (*_estimated(facts, base, freedom), *_others(facts, base, freedom, tight)):
        if neighbour.candidate != base:
            unique.setdefault(neighbour.candidate, neighbour)
    return list(unique.values())


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
        yield from (other for other in policies(facts.job, layout, base.on) if other != layout)


def _chunks(
    layout: Layout, now: Layout, share: float, sequence: int | None, own: Layout
) -> list[int]:
    """Loss chunks to try: the present ones, those that the logits need, and the job's own."""
    if sequence is None:
        return [now.loss_chunks]
    counts = [*chunks_of(layout, share, sequence), now.loss_chunks, own.loss_chunks]
    return [n for n in dict.fromkeys(counts) if sequence % (n * layout.context) == 0]


def _kind(now: Layout, then: Layout, rebatched: bool) -> Kind:
    groups = (Group.mesh, Group.passes, Group.remat, Group.loss)
    changed: set[Group | ChangedPart] = {group for group in groups if now.differs(then, group)}
    # What the logits need is no decision of its own.
    kept = changed - {Group.loss} or changed
    return frozenset((*kept, *([ChangedPart.batch] if rebatched else [])))
