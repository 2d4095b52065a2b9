"""Candidates of a search: a survey of every layout of every slice, which refuses impossible ones with figures before any compile, the neighbours of a compiled one, and the margin that those left out may beat it by."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from systolic.chips import Slice
from systolic.core.errors import NotFoundError, SystolicError
from systolic.core.units import duration, gibibytes, plural
from systolic.job import Axis, Layout, Remat
from systolic.job.layout import Group
from systolic.planning.analytic import Analysis, Facts, analyse, capacity
from systolic.planning.candidate import Candidate, ChangedPart
from systolic.planning.goal import Goal, Tariff, Total
from systolic.planning.plan import Trial
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

NOISE = 0.15
"""Standard deviation of log(compiled / estimated) among layouts with equal features."""
PRIOR = 0.25
"""Prior standard deviation of a feature's weight."""
CHIPS = 12
"""Most kinds of chip that get a feature of their own."""
OPTIMISM = 0.5
"""Standard deviations below the expected time in an optimistic estimate."""
KEEP = 300
"""Fewest layouts of a slice that are kept, by their estimates."""
KEEP_ALL = 6000
"""Layouts of all slices that are kept where there are fewer than this over :data:`KEEP` slices."""
MOST_CHANGES = 2
"""Most of mesh, passes and rematerialisation that a neighbour changes."""
Kind = frozenset[Group | ChangedPart]
"""Parts of a candidate that a neighbour changes."""
MAY_FIT = 1.5
"""Ratio of the estimated need to the memory up to which a layout that was not compiled may fit."""


@dataclass
class Correction:
    """log(compiled / estimated) as a Bayesian linear regression over a candidate's features."""

    chips: dict[str, int] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    _fit: tuple[np.ndarray, np.ndarray] | None = None
    _known: dict[int, tuple[Candidate, np.ndarray]] = field(default_factory=dict)
    """Features by the candidate's id, which stays its own while the candidate is kept here."""

    def learn(self, candidate: Candidate, ratio: float) -> None:
        """Adds a compile by the ratio of its figure to the estimate."""
        if candidate.on.chip.name not in self.chips:
            self.chips[candidate.on.chip.name] = len(self.chips)
            self._known.clear()
        self.rows.append(self._features(candidate))
        self.logs.append(math.log(max(ratio, 1e-6)))
        self._fit = None

    def ratio(self, candidate: Candidate, optimism: float = 0.0) -> float:
        """Factor for an estimate, ``optimism`` standard deviations below the expected one."""
        if not self.rows:
            return 1.0
        weights, spread = self._fitted()
        key = id(candidate)
        if key not in self._known:
            self._known[key] = candidate, self._features(candidate)
        _, row = self._known[key]
        expected = float(row @ weights)
        if optimism:
            expected -= optimism * math.sqrt(max(float(row @ spread @ row), 0.0))
        return math.exp(expected)

    def left_out(self) -> list[float]:
        """log(compiled / estimated) of each compile, its estimate corrected by all other compiles."""
        if not self.rows:
            return []
        rows, logs = np.stack(self.rows), np.array(self.logs)
        weights, spread = self._fitted()
        # The residual of a linear fit without one row, by the row's own weight in the fit with it.
        own = np.einsum("ij,jk,ik->i", rows, spread, rows) / NOISE**2
        return [float(x) for x in (logs - rows @ weights) / np.maximum(1.0 - own, 1e-3)]

    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the features' weights."""
        if self._fit is None:
            rows = np.stack(self.rows)
            precision = np.full(rows.shape[1], PRIOR**-2)
            precision[0] = 1.0  # a wide prior: the common factor of all estimates may be far off
            spread = np.linalg.inv(rows.T @ rows / NOISE**2 + np.diag(precision))
            self._fit = spread @ rows.T @ np.array(self.logs) / NOISE**2, spread
        return self._fit

    def _features(self, candidate: Candidate) -> np.ndarray:
        layout = candidate.layout
        chip = np.zeros(CHIPS)
        known = self.chips.get(candidate.on.chip.name)
        if known is not None and known < CHIPS:
            chip[known] = 1.0
        remat = [1.0 if layout.remat is policy else 0.0 for policy in Remat]
        axes = [math.log2(layout.size(axis)) / 3 for axis in Axis]
        passes = math.log2(layout.accumulate) / 3
        rows = math.log2(max(candidate.per_pass, 1e-6)) / 6
        return np.array([1.0, *chip, *remat, *axes, passes, rows])


def likely(need: float, have: float) -> float:
    """Probability that an expected need of ``need`` bytes fits ``have``, for estimates off by about 15 %."""
    return 1.0 / (1.0 + math.exp(min((need / have - 1.0) / 0.06, 50.0)))


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A candidate in the queue."""

    candidate: Candidate
    analysis: Analysis


@dataclass
class Judge:
    """Scores under one goal; smaller is better."""

    facts: Facts
    goal: Goal
    time_off: Correction = field(default_factory=Correction)
    bytes_off: Correction = field(default_factory=Correction)
    _tariffs: dict[str, Tariff] = field(default_factory=dict)
    """Tariff of each slice, by its name."""

    def total(self, candidate: Candidate, seconds: float) -> Total:
        """Totals of the whole job at ``seconds`` a step."""
        units = candidate.batch * self.facts.units_per_example
        on = candidate.on
        if (tariff := self._tariffs.get(on.name)) is None:
            tariff = self._tariffs[on.name] = self.goal.tariff(on)
        return self.goal.total(tariff, units, seconds)

    def broken(self, candidate: Candidate, seconds: float) -> str | None:
        """Message about the goal's limit that ``seconds`` a step break; None where they break none."""
        return self.goal.broken(self.total(candidate, seconds))

    def expected(self, ranked: Ranked) -> Total:
        """Totals of the whole job by the corrected estimate."""
        ratio = self.time_off.ratio(ranked.candidate)
        return self.total(ranked.candidate, ranked.analysis.seconds_estimate * ratio)

    def need(self, ranked: Ranked) -> float:
        """Bytes of a device by the corrected estimate."""
        return ranked.analysis.bytes_estimate * self.bytes_off.ratio(ranked.candidate)

    def estimated(self, ranked: Ranked, optimism: float = 0.0) -> float:
        """Score by the corrected estimate, with a penalty for a candidate that may not fit."""
        candidate, analysis = ranked.candidate, ranked.analysis
        ratio = self.time_off.ratio(candidate, optimism)
        seconds = max(analysis.seconds_estimate * ratio, analysis.seconds_bound)
        fits = likely(self.need(ranked), capacity(candidate.on))
        penalty = 1 + 0.4 * (1 - fits) + (20 if fits < 0.03 else 0)
        total = self.total(candidate, seconds)
        limit = 1.0 if self.goal.broken(total) is None else 3.0
        return self.goal.score(total) * penalty * limit

    def hopeful(self, ranked: Ranked) -> float:
        """Score by the optimistic estimate."""
        return self.estimated(ranked, OPTIMISM)

    def beside(self, ranked: Ranked, base: Trial) -> float:
        """Score by the figures of a compiled candidate near it, times the ratio of the corrected estimates.

        Errors that both have in common cancel. Infinite where the bound exceeds the base's score.
        """
        candidate, analysis = ranked.candidate, ranked.analysis
        assert base.forecast is not None
        step = base.forecast.step_seconds
        assert step is not None
        near = self.time_off.ratio(candidate) / self.time_off.ratio(base.candidate)
        seconds = step * near * analysis.seconds_estimate / base.analysis.seconds_estimate
        need = base.forecast.need_bytes
        ratio = self.bytes_off.ratio(candidate)
        need += ratio * (analysis.bytes_estimate - base.analysis.bytes_estimate)
        fits = likely(need, capacity(candidate.on))
        # One that does not fit costs a compile and no more.
        penalty = 1 + 0.1 * (1 - fits) + (20 if fits < 0.03 else 0)
        total = self.total(candidate, max(seconds, analysis.seconds_bound))
        limit = 1.0 if self.goal.broken(total) is None else 3.0
        return self.goal.score(total) * penalty * limit

    def score(self, trial: Trial) -> float:
        """Score of a compiled candidate; infinite where it does not fit."""
        return float("inf") if trial.total is None else self.goal.score(trial.total)

    def learn(self, ranked: Ranked, trial: Trial) -> None:
        """Corrects estimates by the result of a compile."""
        forecast = trial.forecast
        if forecast is None:
            return
        need = forecast.need_bytes
        if need:
            self.bytes_off.learn(ranked.candidate, need / ranked.analysis.bytes_estimate)
        if forecast.step_seconds:
            ratio = forecast.step_seconds / ranked.analysis.seconds_estimate
            self.time_off.learn(ranked.candidate, ratio)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A candidate near another."""

    candidate: Candidate
    kind: Kind
    estimated: bool
    """Whether the analytic model knows the effect of what it changes."""


def neighbours(facts: Facts, base: Candidate, freedom: Freedom, tight: bool) -> list[Neighbour]:
    """Neighbours of a candidate, each once, without the candidate itself.

    A change of one setting alone often does not fit or does not divide: fewer passes need more loss chunks, another mesh
    another number of passes. A neighbour therefore differs in up to two of mesh, passes and rematerialisation, with any
    number of loss chunks, or in one of the settings that the analytic model can't tell apart.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """Layouts that were not compiled, beside the answer.

    Their times are estimates, corrected by the compiles, and no bounds: a margin assumes that they are off by
    no more than those of the compiled layouts were, each corrected by the other compiles.
    """

    layouts: int
    """Layouts that may fit and whose bound does not exclude that they beat the answer."""
    bounded: int
    """Layouts that can't beat it: their bound does not."""
    nearest: float
    """Ratio of the best estimated score among them to the answer's."""
    low: float
    """Smallest ratio of a compiled step time to its estimate."""
    high: float
    """Largest ratio of a compiled step time to its estimate."""
    compiled: int
    """Compiles that the ratios come from."""
    best: float
    """Ratio of the nearest's score to the answer's, if its estimate is off by ``low``."""

    @property
    def share(self) -> float:
        """Share of the answer's score by which one of them may beat it; 0 where none is expected to."""
        return max(0.0, 1.0 - self.best)

    def to_json(self) -> dict[str, Any]:
        """Plain values under their published names."""
        return {
            "layouts": self.layouts,
            "excluded_by_bounds": self.bounded,
            "nearest_estimate": self.nearest,
            "compiled_over_estimate": [self.low, self.high],
            "compiled": self.compiled,
            "may_be_better_by": self.share,
        }


def margin_of(judge: Judge, answer: Trial, waiting: Iterable[Ranked]) -> Margin | None:
    """The margin of an answer over the layouts that wait for a compile; None without any, or without compiles.

    Args:
        judge: Holds the corrections by all compiles.
        answer: The best compiled candidate.
        waiting: Candidates that were not compiled.
    """
    logs = judge.time_off.left_out()
    if not logs:
        return None
    low, high = math.exp(min(logs)), math.exp(max(logs))
    best = judge.score(answer)
    layouts, bounded, nearest, least = 0, 0, math.inf, math.inf
    for ranked in waiting:
        candidate, analysis = ranked.candidate, ranked.analysis
        if judge.need(ranked) > MAY_FIT * capacity(candidate.on):
            continue
        bound = judge.goal.score(judge.total(candidate, analysis.seconds_bound))
        if bound >= best:
            bounded += 1
            continue
        layouts += 1
        total = judge.expected(ranked)
        nearest = min(nearest, judge.goal.score(total) / best)
        hopeful = max(judge.goal.score(total.times(low)), bound)
        least = min(least, hopeful / best)
    if not layouts:
        return None
    return Margin(
        layouts=layouts,
        bounded=bounded,
        nearest=nearest,
        low=low,
        high=high,
        compiled=len(logs),
        best=least,
    )
