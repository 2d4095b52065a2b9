"""Changes of settings for a slow step, each compiled and simulated for its gain."""

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from systolic.chips import Slice
from systolic.core.errors import SystolicError
from systolic.core.units import duration, gibibytes
from systolic.forecasting import Forecast
from systolic.job import Axis, Precision, Remat
from systolic.job.layout import Group
from systolic.planning import variants
from systolic.planning.analytic import Facts, analyse, capacity
from systolic.planning.candidate import (
    Candidate,
    Change,
    ChangedPart,
    compatible,
    differences,
    layout_change,
    together,
)
from systolic.planning.goal import Goal, Limits, Objective
from systolic.planning.plan import Trial
from systolic.planning.search import CandidateEvaluator, PendingForecast, Search, SearchProgress
from systolic.planning.space import NAMED, Freedom, check, narrower

GAIN = 0.005
"""Relative gain below which a change counts as no gain."""


class RemedyStage(enum.Enum):
    """Stages in which changes are tried; the values are those of the JSON."""

    single = "single"
    """One setting alone, and those that helped together."""
    combined = "combined"
    """On from the best, any settings, until none gains."""
    training = "training"
    """On top of the best: precision or batch, which change training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Compiled change."""

    text: str
    """``remat full -> minimal``."""
    candidate: Candidate
    stage: RemedyStage = RemedyStage.single
    same_result: bool = True
    """Whether training gives the same model but for rounding."""
    step_seconds: float | None = None
    units_per_second: float | None = None
    unit: str = "tokens"
    need_bytes: int = 0
    have_bytes: int
    gain: float | None = None
    """Units a second over those of the base, minus 1; None when it does not fit or compile."""
    problem: str = ""
    trial: Trial | None = None
    """Compiled candidate with its forecast; None where it did not compile."""

    @property
    def verdict(self) -> str:
        """``+11.1% tokens/s, 410 ms a step (fits, 13.90 GiB of 15.75 GiB)``."""
        if self.problem:
            return self.problem
        size = f"{gibibytes(self.need_bytes)} of {gibibytes(self.have_bytes)}"
        if self.gain is None:
            return f"does not fit: {size}"
        if abs(self.gain) < GAIN:
            return f"no gain (fits, {size})"
        step = f", {duration(self.step_seconds)} a step" if self.step_seconds else ""
        return f"{self.gain:+.1%} {self.unit}/s{step} (fits, {size})"

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Plain values; ``settings`` are the options of the change."""
        return {
            "change": self.text,
            "stage": self.stage.value,
            "settings": settings,
            "flags": list(self.candidate.compiler_flags),
            "same_result": self.same_result,
            "fits": self.gain is not None,
            "step_seconds": self.step_seconds,
            "gain": self.gain,
            "gain_of": f"{self.unit} per second",
            "need_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
            "verdict": self.verdict,
        }


def changes(facts: Facts, base: Candidate) -> list[Change]:
    """Single changes of a candidate that keep training the same, the likeliest gains by the analytic model first."""
    have = capacity(base.on)
    speeds: dict[Change, float] = {}
    for change in _all(facts, base):
        after = change.on(base)
        if check(facts.job, after) is None:
            analysis = analyse(facts, after)
            if analysis.bytes_bound <= have:
                over = analysis.bytes_estimate > 1.3 * have
                speeds[change] = analysis.seconds_estimate / after.batch * (10 if over else 1)
    # In turns, so that meshes don't crowd out the rest: the first of each kind, then the second …
    kinds: Counter[frozenset[Group | ChangedPart]] = Counter()
    turns: dict[Change, int] = {}
    for change in sorted(speeds, key=lambda change: speeds[change]):
        kinds[change.touches] += 1
        turns[change] = kinds[change.touches]
    return sorted(turns, key=lambda change: turns[change])


def _all(facts: Facts, base: Candidate) -> Iterator[Change]:
    layout = base.layout
    known = facts.job.model.policies()
    for remat in (Remat.none, Remat.minimal, Remat.save_names, Remat.full):
        for names in NAMED if remat is Remat.save_names else (layout.remat_names,):
            same = remat is layout.remat
            if remat is Remat.save_names:
                same = same and names == layout.remat_names
            if remat in known and not same:
                yield layout_change(remat=remat, remat_names=names, saved_names=())
    for accumulate in (layout.accumulate // 2, layout.accumulate * 2):
        if accumulate >= 1:
            yield layout_change(accumulate=accumulate)
    # Meshes with half of one axis moved to another.
    axes = [axis for axis in Axis if axis in facts.job.model.axes() and axis is not Axis.pipeline]
    for source, target in itertools.permutations(axes, 2):
        size = layout.size(source)
        if size % 2 == 0:
            yield layout_change(**{source.value: size // 2, target.value: 2 * layout.size(target)})
    yield from variants.changes(facts.job, base)


def training_changes(facts: Facts, base: Candidate) -> list[Change]:
    """Changes of a candidate that change training: a narrower precision and twice the batch."""
    wanted = [Change(batch=2 * base.batch)]
    if base.precision is Precision.bf16:
        wanted[:0] = [Change(precision=precision) for precision in narrower(facts.job, base.on)]
    if base.precision is Precision.f32:
        wanted.insert(0, Change(precision=Precision.bf16))
    return [change for change in wanted if check(facts.job, change.on(base)) is None]


RemedyWatch = Callable[[Remedy, int, int], None]
"""Called with each remedy in the order of the changes, the number compiled so far and the total."""


def try_all(
    facts: Facts,
    forecast: Forecast,
    base: Candidate,
    wanted: Sequence[Change],
    evaluator: CandidateEvaluator,
    watch: RemedyWatch = lambda *_: None,
) -> list[Remedy]:
    """Remedies: each change compiled up to its schedule and simulated, largest gain first.

    When several helped, they are also compiled together.

    Args:
        facts: Facts of the job.
        forecast: Forecast of ``base``, the reference for gains.
        base: The candidate to change.
        wanted: Changes to try.
        evaluator: Forecasts the changes.
        watch: Called with each remedy when it is known.
    """

    def start(candidate: Candidate) -> PendingForecast:
        return evaluator.submit(facts.job, candidate, full=False)

    remedies: dict[Change, Remedy] = {}
    # Answers are taken in the order of the changes, whichever compile ends first.
    for change, pending in [(change, start(change.on(base))) for change in wanted]:
        text, same = change.text(base), change.same_result
        remedies[change] = _remedy(
            facts, forecast, change.on(base), pending, text, same_result=same
        )
        watch(remedies[change], len(remedies), len(wanted))
    joint = compatible(_helped(remedies))
    after = together(base, joint)
    last = []
    if len(joint) > 1 and check(facts.job, after) is None:
        text = "together: " + "; ".join(remedies[change].text for change in joint)
        last.append(_remedy(facts, forecast, after, start(after), text, same_result=True))
        watch(last[0], len(remedies) + 1, len(wanted) + 1)
    return sorted((*remedies.values(), *last), key=lambda remedy: -_gain(remedy))


@dataclass(frozen=True, kw_only=True)
class Follower:
    """Goes on from changes that were tried alone, until nothing gains.

    Args:
        facts: Facts of the job.
        forecast: Forecast of ``base``, the reference for gains.
        base: The candidate that is changed.
        evaluator: Forecasts the changes.
        most: Most compiles of one climb.
        workers: Compiles at once.
        watch: Called with each remedy when it is known, the number compiled so far and the most there may be.
    """

    facts: Facts
    forecast: Forecast
    base: Candidate
    evaluator: CandidateEvaluator
    most: int
    workers: int = 1
    watch: RemedyWatch = lambda *_: None

    def combine(self, tried: Sequence[Remedy]) -> list[Remedy]:
        """Remedies of a climb from the best of some that keep training the same, or from the base."""
        known = [
            remedy.trial for remedy in tried if remedy.trial is not None and remedy.same_result
        ]
        return self._climb(self.facts, [self._own, *known], RemedyStage.combined)

    def change_training(self, tried: Sequence[Remedy]) -> list[Remedy]:
        """Changes of training on top of the best that keeps it the same, and a climb from the best precision."""
        same = [remedy for remedy in tried if remedy.same_result and _gain(remedy) > GAIN]
        best = max(same, key=_gain).candidate if same else self.base
        least = max(map(_gain, same), default=GAIN)
        remedies: list[Remedy] = []
        wanted = training_changes(self.facts, best)
        for change in wanted:
            candidate = change.on(best)
            pending = self.evaluator.submit(self.facts.job, candidate, full=False)
            text = _difference(self.base, candidate)
            remedy = _remedy(self.facts, self.forecast, candidate, pending, text, same_result=False)
            remedies.append(replace(remedy, stage=RemedyStage.training))
            self.watch(remedies[-1], len(remedies), len(wanted))
        narrow = [remedy for remedy in remedies if remedy.candidate.precision is not best.precision]
        first = max(narrow, key=_gain, default=None)
        if first is None or first.trial is None or _gain(first) <= least:
            return remedies
        job = replace(self.facts.job, precision=first.candidate.precision)
        facts = replace(self.facts, job=job)
        return [*remedies, *self._climb(facts, [first.trial], RemedyStage.training)]

    @property
    def _own(self) -> Trial:
        return _trial(self.facts, self.base, self.forecast)

    def _climb(self, facts: Facts, known: Sequence[Trial], stage: RemedyStage) -> list[Remedy]:
        """Remedies that a local search compiles, in their order."""
        remedies: list[Remedy] = []

        def see(progress: SearchProgress) -> None:
            trial = progress.latest
            if trial is not None:
                remedies.append(self._remedy_of(trial, stage))
                self.watch(remedies[-1], len(remedies), self.most)

        search = Search(
            facts=facts,
            slices=[self.base.on],
            goal=_goal(facts),
            freedom=Freedom(),
            limits=Limits(programs=len(known) + self.most, finalists=0, workers=self.workers),
            watch=see,
            tried=[*known],
        )
        search.climb(self.evaluator)
        return remedies

    def _remedy_of(self, trial: Trial, stage: RemedyStage) -> Remedy:
        same = trial.candidate.precision is self.base.precision
        text = _difference(self.base, trial.candidate)
        remedy = _of_trial(self.forecast, trial, text, same_result=same)
        return replace(remedy, stage=stage)


def _goal(facts: Facts) -> Goal:
    return Goal(objective=Objective.time, units=1.0, unit=facts.unit)


def _trial(facts: Facts, candidate: Candidate, forecast: Forecast) -> Trial:
    goal = _goal(facts)
    units = candidate.batch * facts.units_per_example
    seconds = forecast.step_seconds
    return Trial(
        candidate=candidate,
        analysis=analyse(facts, candidate),
        forecast=forecast,
        total=goal.total(goal.tariff(candidate.on), units, seconds) if seconds else None,
    )


def _difference(before: Candidate, after: Candidate) -> str:
    """Settings that changed, as text."""
    parts = differences(before.layout, after)
    if before.batch != after.batch:
        parts.append(f"batch {before.batch} -> {after.batch}")
    if before.precision is not after.precision:
        parts.append(f"precision {before.precision.value} -> {after.precision.value}")
    return ", ".join(parts) or "the same settings"


def _gain(remedy: Remedy) -> float:
    return -9.0 if remedy.gain is None else remedy.gain


def _helped(remedies: Mapping[Change, Remedy]) -> list[Change]:
    """Changes with a gain that do not change training, largest gain first."""
    good = [change for change in remedies if change.same_result and _gain(remedies[change]) > GAIN]
    return sorted(good, key=lambda change: -_gain(remedies[change]))


def _remedy(
    facts: Facts,
    base: Forecast,
    candidate: Candidate,
    pending: PendingForecast,
    text: str,
    *,
    same_result: bool,
) -> Remedy:
    try:
        forecast = pending.result()
    except SystolicError as error:
        trial = Trial(candidate=candidate, analysis=analyse(facts, candidate), problem=str(error))
    else:
        trial = _trial(facts, candidate, forecast)
    return _of_trial(base, trial, text, same_result=same_result)


def _of_trial(base: Forecast, trial: Trial, text: str, *, same_result: bool) -> Remedy:
    have, forecast = int(capacity(trial.candidate.on)), trial.forecast
    if forecast is None:
        return Remedy(
            text=text,
            candidate=trial.candidate,
            same_result=same_result,
            have_bytes=have,
            problem=trial.problem or "",
        )
    speed, before = forecast.units_per_second, base.units_per_second
    gain = speed / before - 1 if speed and before and forecast.fits else None
    return Remedy(
        text=text,
        candidate=trial.candidate,
        same_result=same_result,
        step_seconds=forecast.step_seconds,
        units_per_second=speed,
        unit=forecast.unit,
        need_bytes=forecast.need_bytes,
        have_bytes=have,
        gain=gain,
        trial=trial,
    )


def base_of(facts: Facts, on: Slice, flags: tuple[str, ...] = ()) -> Candidate:
    """The job's own layout as a candidate, compiled with these flags.

    Raises:
        LayoutError: it does not divide the slice, the model or the batch.
    """
    job = facts.job.for_slice(on)
    return Candidate(
        on=on,
        layout=job.layout,
        batch=job.batch.resolve(job.layout),
        precision=job.precision,
        base=flags,
    )
